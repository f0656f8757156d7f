// SPDX-License-Identifier: Apache-2.0
// The private C ABI under the Python package: a table of the ops, errors as numbers.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <new>
#include <span>
#include <string>
#include <type_traits>

#include "winnow/winnow.h"

namespace winnow::c_abi {

/// One op. All three functions return 0, or an ErrorCode whose text winnow_last_error gives.
struct Op {
  const char* name;
  std::size_t args_bytes;  // size of its argument struct, which `args` points to
  int (*run)(const void* args, const Execution* execution);
  int (*workspace_bytes)(const void* args, const Execution* execution, std::size_t* bytes);
  int (*why_not)(const void* args, const Execution* execution, const char** reason);
};

namespace {

constexpr int kUnexpected = -1;  // an exception that is no Error

// Text that was handed out lives until the next call of the same thread.
thread_local std::string last_error;
thread_local std::string last_text;

int fail(int code, const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();
  }
  return code;
}

template <class Function>
int guard(Function function) noexcept {
  try {
    function();
    return 0;
  } catch (const Error& error) {
    return fail(static_cast<int>(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return fail(static_cast<int>(ErrorCode::out_of_memory), "out of host memory");
  } catch (const std::exception& error) {
    return fail(kUnexpected, error.what());
  } catch (...) {
    return fail(kUnexpected, "unknown exception");
  }
}

template <class Function>
int give_text(const char** text, Function function) noexcept {
  return guard([&] {
    last_text = function();
    *text = last_text.c_str();
  });
}

template <class Args>
const Args& as(const void* args) {
  return *static_cast<const Args*>(args);
}

template <class Args>
Args args_of(void (*)(const Args&, const Execution&));

template <auto function>
constexpr Op op(const char* name) {
  using Args = decltype(args_of(function));
  static_assert(std::is_standard_layout_v<Args> && std::is_trivially_copyable_v<Args>);
  return {
      .name = name,
      .args_bytes = sizeof(Args),
      .run =
          [](const void* args, const Execution* execution) {
            return guard([&] { function(as<Args>(args), *execution); });
          },
      .workspace_bytes =
          [](const void* args, const Execution* execution, std::size_t* bytes) {
            return guard([&] { *bytes = workspace_bytes(as<Args>(args), *execution); });
          },
      .why_not =
          [](const void* args, const Execution* execution, const char** reason) {
            return give_text(reason, [&] { return why_not(as<Args>(args), *execution); });
          },
  };
}

constexpr Op kOps[] = {
    op<key_windows>("key_windows"),
    op<window_indices>("window_indices"),
    op<index_topk_forward>("index_topk_forward"),
    op<index_topk_backward>("index_topk_backward"),
    op<sparse_attention_forward>("sparse_attention_forward"),
    op<sparse_attention_backward>("sparse_attention_backward"),
    op<value_projection_forward>("value_projection_forward"),
    op<value_projection_backward>("value_projection_backward"),
    op<index_target>("index_target"),
    op<index_loss>("index_loss"),
    op<dense_index_loss_forward>("dense_index_loss_forward"),
    op<dense_index_loss_backward>("dense_index_loss_backward"),
    op<quantize_fp8>("quantize_fp8"),
};

}  // namespace
}  // namespace winnow::c_abi

extern "C" {

const char* winnow_version() { return winnow::version(); }

const char* winnow_last_error() { return winnow::c_abi::last_error.c_str(); }

std::size_t winnow_tensor_bytes() { return sizeof(winnow::Tensor); }

std::size_t winnow_execution_bytes() { return sizeof(winnow::Execution); }

const winnow::c_abi::Op* winnow_ops(std::size_t* count) {
  *count = std::size(winnow::c_abi::kOps);
  return winnow::c_abi::kOps;
}

int winnow_backend_why_not(int backend, const char** reason) {
  return winnow::c_abi::give_text(
      reason, [&] { return winnow::why_not(static_cast<winnow::Backend>(backend)); });
}

int winnow_backend_describe(int backend, const char** text) {
  return winnow::c_abi::give_text(
      text, [&] { return winnow::describe(static_cast<winnow::Backend>(backend)); });
}

/// rows [tokens]: those of one rank after another's; counts [ranks]: how many each has.
int winnow_shard_rows(const std::int32_t* cu_seqlens, std::size_t offsets, std::int64_t tokens,
                      int ranks, int sharding, int multiple, std::int32_t* rows,
                      std::int64_t* counts) {
  return winnow::c_abi::guard([&] {
    const winnow::Shards shards =
        winnow::shard_rows(std::span(cu_seqlens, offsets), tokens, ranks,
                           static_cast<winnow::Sharding>(sharding), multiple);
    for (const auto& shard : shards.rows) {
      rows = std::copy(shard.begin(), shard.end(), rows);
      *counts++ = static_cast<std::int64_t>(shard.size());
    }
  });
}

/// lengths: of both lists, [rows, most documents of a row]. `lengths + rows` numbers are enough for
/// offsets, `rows` for max_seqlen; written are [chunks, *offsets] of them, padded ones if
/// *has_padded, and the mask of all rows * row_tokens slots.
int winnow_thd_layout(const std::int64_t* seq_lens, const std::int64_t* seq_lens_padded,
                      std::size_t lengths, std::int64_t rows, std::int64_t row_tokens,
                      std::int64_t fill, std::int64_t chunks, std::int64_t* offsets,
                      std::int32_t* cu_seqlens, std::int32_t* cu_seqlens_padded, int* has_padded,
                      std::int32_t* max_seqlen, std::uint8_t* padding_mask) {
  return winnow::c_abi::guard([&] {
    const winnow::ThdLayout layout =
        winnow::thd_layout({.rows = rows,
                            .row_tokens = row_tokens,
                            .seq_lens = std::span(seq_lens, lengths),
                            .seq_lens_padded = std::span(seq_lens_padded, lengths),
                            .fill = fill},
                           chunks);
    *offsets = layout.offsets;
    *has_padded = layout.cu_seqlens_padded.empty() ? 0 : 1;
    std::copy(layout.cu_seqlens.begin(), layout.cu_seqlens.end(), cu_seqlens);
    std::copy(layout.cu_seqlens_padded.begin(), layout.cu_seqlens_padded.end(), cu_seqlens_padded);
    std::copy(layout.max_seqlen.begin(), layout.max_seqlen.end(), max_seqlen);
    std::copy(layout.padding_mask.begin(), layout.padding_mask.end(), padding_mask);
  });
}
}
