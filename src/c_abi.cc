// SPDX-License-Identifier: Apache-2.0
// The private C ABI under the Python package: a table of the operators, errors as numbers.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "winnow/winnow.h"

namespace winnow::c_abi {

enum class Kind : std::int32_t { input, output, i32, f32, boolean, words };

/// One member of an argument struct; a tensor, a number, or an enum by the words of its values.
struct FieldEntry {
  const char* name;
  Kind kind;
  std::int32_t offset;
  const char* words;     // "ascending|by_score" for Kind::words, else null
  double default_value;  // of numbers and enums
};

/// One operator. All functions return 0, or an ErrorCode whose text winnow_last_error gives.
struct OperatorEntry {
  const char* name;
  std::size_t args_bytes;  // size of its argument struct, which `args` points to
  const FieldEntry* fields;
  std::size_t field_count;
  int (*run)(const void* args, const Execution* execution);
  int (*workspace_bytes)(const void* args, const Execution* execution, std::size_t* bytes);
  int (*why_not)(const void* args, const Execution* execution, const char** reason);
  /// A line for every candidate: backend, kernel and reason, with tabs between them.
  int (*explain)(const void* args, const Execution* execution, const char** lines);
  /// The names that Execution::kernel may ask for on a backend, a line each.
  int (*kernels)(int backend, const char** lines);
};

/// DLPack's tensor, as its exchange API fills it in.
struct DLTensor {
  void* data;
  struct {
    std::int32_t device_type;
    std::int32_t device_id;
  } device;
  std::int32_t ndim;
  struct {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
  } dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
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

template <class Args, class Value>
FieldEntry entry_of(const Field<Args, Value>& field) {
  static const Args kDefaults{};
  const auto offset = reinterpret_cast<const char*>(&(kDefaults.*field.member)) -
                      reinterpret_cast<const char*>(&kDefaults);
  FieldEntry entry{.name = field.name,
                   .kind = field.role == FieldRole::input ? Kind::input : Kind::output,
                   .offset = static_cast<std::int32_t>(offset),
                   .words = field.words,
                   .default_value = 0};
  if constexpr (!std::is_same_v<Value, Tensor>) {
    static_assert(std::is_enum_v<Value> || std::is_same_v<Value, float> ||
                  std::is_same_v<Value, bool> || std::is_same_v<Value, std::int32_t>);
    entry.kind = std::is_enum_v<Value>          ? Kind::words
                 : std::is_same_v<Value, float> ? Kind::f32
                 : std::is_same_v<Value, bool>  ? Kind::boolean
                                                : Kind::i32;
    entry.default_value = static_cast<double>(kDefaults.*field.member);
  }
  return entry;
}

template <class Args>
std::span<const FieldEntry> fields_of() {
  static const auto kFields = std::apply(
      [](const auto&... field) { return std::array{entry_of(field)...}; }, Args::fields());
  return kFields;
}

std::string lines_of(const std::vector<Candidate>& candidates) {
  std::string lines;
  for (const Candidate& candidate : candidates) {
    lines.append(name(candidate.backend)).append("\t").append(candidate.kernel).append("\t");
    lines.append(candidate.why_not).append("\n");
  }
  return lines;
}

std::string lines_of(const std::vector<std::string_view>& names) {
  std::string lines;
  for (const std::string_view name : names) lines.append(name).append("\n");
  return lines;
}

template <class Args>
OperatorEntry entry_of() {
  static_assert(std::is_standard_layout_v<Args> && std::is_trivially_copyable_v<Args>);
  return {
      .name = Args::kOperator,
      .args_bytes = sizeof(Args),
      .fields = fields_of<Args>().data(),
      .field_count = fields_of<Args>().size(),
      .run =
          [](const void* args, const Execution* execution) {
            return guard([&] { run(as<Args>(args), *execution); });
          },
      .workspace_bytes =
          [](const void* args, const Execution* execution, std::size_t* bytes) {
            return guard([&] { *bytes = workspace_bytes(as<Args>(args), *execution); });
          },
      .why_not =
          [](const void* args, const Execution* execution, const char** reason) {
            return give_text(reason, [&] { return why_not(as<Args>(args), *execution); });
          },
      .explain =
          [](const void* args, const Execution* execution, const char** lines) {
            return give_text(lines, [&] { return lines_of(explain(as<Args>(args), *execution)); });
          },
      .kernels =
          [](int backend, const char** lines) {
            return give_text(
                lines, [&] { return lines_of(kernels<Args>(static_cast<Backend>(backend))); });
          },
  };
}

std::span<const OperatorEntry> operator_entries() {
  static const std::vector<OperatorEntry> kEntries = [] {
    std::vector<OperatorEntry> entries;
    for_each_operator(
        [&]<class Args>(std::type_identity<Args>) { entries.push_back(entry_of<Args>()); });
    return entries;
  }();
  return kEntries;
}

}  // namespace
}  // namespace winnow::c_abi

extern "C" {

const char* winnow_version() { return winnow::version(); }

const char* winnow_last_error() { return winnow::c_abi::last_error.c_str(); }

std::size_t winnow_tensor_bytes() { return sizeof(winnow::Tensor); }

std::size_t winnow_execution_bytes() { return sizeof(winnow::Execution); }

const winnow::c_abi::OperatorEntry* winnow_operators(std::size_t* count) {
  const std::span<const winnow::c_abi::OperatorEntry> entries = winnow::c_abi::operator_entries();
  *count = entries.size();
  return entries.data();
}

/// Fills tensors of an argument struct, those at `offsets`, with views of Python objects; a null
/// object is an absent tensor. `view` is a function of DLPack's exchange API: it must know all of
/// the objects, and it sets Python's error where it fails, so the caller holds Python's lock.
int winnow_view_objects(int (*view)(void* object, winnow::c_abi::DLTensor* tensor),
                        void* const* objects, const std::int32_t* offsets, std::size_t count,
                        std::byte* args) {
  using namespace winnow::c_abi;
  for (std::size_t i = 0; i < count; ++i) {
    if (objects[i] == nullptr) continue;
    DLTensor viewed;
    if (view(objects[i], &viewed) != 0) return kUnexpected;
    auto* const tensor = reinterpret_cast<winnow::Tensor*>(args + offsets[i]);
    if (const int code = guard([&] { *tensor = winnow::from_dlpack(viewed); }); code != 0) {
      return code;
    }
  }
  return 0;
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
