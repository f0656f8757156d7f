// SPDX-License-Identifier: Apache-2.0
// A batch is the same call over slices: backends know none.
#include "winnow/sparse_attention.h"

#include <cmath>

#include "core/view.h"
#include "ops/contents.h"
#include "ops/dispatch.h"

namespace winnow {
namespace {

template <class Args>
bool batched(const Args& args) {
  return args.q.rank == 4;
}

/// What forward and backward share: the inputs of attention and its outputs out and lse, which
/// backward reads.
template <class Args>
void check_shared(Check& check, const Args& args, bool writes_out) {
  const auto out_or_in = writes_out ? &Check::output : &Check::input;
  if (batched(args)) check.set_leading_dim("batch");
  check.input("q", args.q, {"tokens", "heads", "qk_dim"}, kActivationTypes);
  const DType accumulation = accumulation_type(args.q.dtype);
  check.input("kv", args.kv, {"keys", "qk_dim"}, {args.q.dtype});
  check.input("indices", args.indices, {"tokens", "topk"}, {DType::i32});
  check.optional_input("lengths", args.lengths, {"tokens"}, {DType::i32});
  (check.*out_or_in)("out", args.out, {"tokens", "heads", "v_dim"}, {args.q.dtype});
  (check.*out_or_in)("lse", args.lse, {"tokens", "heads"}, {accumulation});
  check.dim_in_range("heads", 1, kMaxInt32);
  check.dim_in_range("qk_dim", 8, 1024);
  check.dim_multiple_of("qk_dim", 8);
  check.dim_in_range("v_dim", 8, check.dim("qk_dim"));
  check.dim_multiple_of("v_dim", 8);
  check.dim_in_range("keys", 0, kMaxInt32);
  check.dim_in_range("topk", 1, kMaxTopk);
  check.finite("scale", args.scale);
  if (args.scale == 0 && check.dim("v_dim") != check.dim("qk_dim")) {
    check.fail("scale", "0", refusal::no_default_scale);
  }
}

template <class Args>
void fill_scale(Args& args) {
  const std::int64_t qk_dim = args.q.shape[args.q.rank - 1];
  if (args.scale == 0) args.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(qk_dim)));
}

template <class Args>
std::int64_t slices(const Args& args) {
  return batched(args) ? args.q.shape[0] : 1;
}

/// One slice of every tensor but the sink and its gradient, which all slices share.
template <class Args>
Args slice_batch(Args args, std::int64_t b) {
  if (!batched(args)) return args;
  for_each_field<Args>([&](const auto& field) {
    if constexpr (requires { slice(args.*field.member, b); }) {
      const std::string_view name = field.name;
      if (name != "sink" && name != "d_sink") args.*field.member = slice(args.*field.member, b);
    }
  });
  return args;
}

template <class Args>
void check_contents(const Check& check, const Args& args) {
  for (std::int64_t b = 0; b < slices(args); ++b) {
    check_lengths(check, slice_batch(args, b).lengths, check.dim("topk"));
  }
}

}  // namespace

Checked<SparseAttentionForward> checked(SparseAttentionForward args) {
  Check check(SparseAttentionForward::kOperator);
  check_shared(check, args, true);
  const DType accumulation = accumulation_type(args.q.dtype);
  check.optional_output("max_logits", args.max_logits, {"tokens", "heads"}, {accumulation});
  check.set_leading_dim(std::nullopt);  // all slices share the sink
  check.optional_input("sink", args.sink, {"heads"}, {accumulation});
  check_contents(check, args);
  fill_scale(args);
  return {args, check.device()};
}

Checked<SparseAttentionBackward> checked(SparseAttentionBackward args) {
  Check check(SparseAttentionBackward::kOperator);
  check_shared(check, args, false);
  const DType accumulation = accumulation_type(args.q.dtype);
  check.input("d_out", args.d_out, {"tokens", "heads", "v_dim"}, {args.q.dtype});
  check.optional_input("d_lse", args.d_lse, {"tokens", "heads"}, {accumulation});
  check.output("d_q", args.d_q, {"tokens", "heads", "qk_dim"}, {args.q.dtype});
  check.output("d_kv", args.d_kv, {"keys", "qk_dim"}, {accumulation, args.q.dtype});
  check.set_leading_dim(std::nullopt);
  check.optional_input("sink", args.sink, {"heads"}, {accumulation});
  check.optional_output("d_sink", args.d_sink, {"heads"}, {accumulation});
  if (args.d_sink && !args.sink) check.fail("d_sink", describe(args.d_sink), refusal::needs_sink);
  check.in_range("max_heads_per_pass", args.max_heads_per_pass, 0, kMaxInt32);
  check_contents(check, args);
  fill_scale(args);
  return {args, check.device()};
}

std::int64_t slice_count(const SparseAttentionForward& args) { return slices(args); }
std::int64_t slice_count(const SparseAttentionBackward& args) { return slices(args); }
SparseAttentionForward slice_of(const SparseAttentionForward& args, std::int64_t b) {
  return slice_batch(args, b);
}
SparseAttentionBackward slice_of(const SparseAttentionBackward& args, std::int64_t b) {
  return slice_batch(args, b);
}

template struct Operator<SparseAttentionForward>;
template struct Operator<SparseAttentionBackward>;

}  // namespace winnow
