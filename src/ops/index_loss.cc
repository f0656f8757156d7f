// SPDX-License-Identifier: Apache-2.0
#include "winnow/index_loss.h"

#include "ops/contents.h"
#include "ops/dispatch.h"

namespace winnow {
namespace {

void check_scale(const Check& check, float scale) {
  check.finite("scale", scale);
  if (scale == 0) check.fail("scale", "0", refusal::scale_absent);
}

void check_attention_sizes(const Check& check) {
  check.dim_in_range("heads", 1, kMaxInt32);
  check.dim_in_range("qk_dim", 8, 1024);
  check.dim_multiple_of("qk_dim", 8);
  check.dim_in_range("keys", 0, kMaxInt32);
}

/// What forward and backward share; lse is an input of backward, and of forward if it is given.
template <class Args>
void check_dense(Check& check, const Args& args, bool writes_lse) {
  check.input("q", args.q, {"tokens", "heads", "qk_dim"}, kActivationTypes);
  const DType accumulation = accumulation_type(args.q.dtype);
  check.input("kv", args.kv, {"keys", "qk_dim"}, {args.q.dtype});
  check.optional_input("sink", args.sink, {"heads"}, {accumulation});
  check.input("index_q", args.index_q, {"tokens", "index_heads", "index_dim"}, {args.q.dtype});
  check.input("index_k", args.index_k, {"index_keys", "index_dim"}, {args.q.dtype});
  check.input("weights", args.weights, {"tokens", "index_heads"}, {accumulation});
  check.input("begin", args.begin, {"tokens"}, {DType::i32});
  check.input("end", args.end, {"tokens"}, {DType::i32});
  (check.*(writes_lse ? &Check::output : &Check::input))("lse", args.lse, {"tokens", "heads"},
                                                         {accumulation});
  check_attention_sizes(check);
  check.dim_in_range("index_heads", 1, kMaxInt32);
  check.dim_in_range("index_dim", 8, kMaxInt32);
  check.dim_multiple_of("index_dim", 8);
  check_scale(check, args.scale);
  check.in_range("key_offset", args.key_offset, 0, check.dim("keys"));
  check.dim_in_range("index_keys", 0, check.dim("keys") - args.key_offset);
  check_windows(check, args.begin, args.end, check.dim("index_keys"));
}

}  // namespace

Checked<IndexTarget> checked(const IndexTarget& args) {
  Check check(IndexTarget::kOperator);
  check.input("q", args.q, {"tokens", "heads", "qk_dim"}, kActivationTypes);
  const DType accumulation = accumulation_type(args.q.dtype);
  check.input("kv", args.kv, {"keys", "qk_dim"}, {args.q.dtype});
  check.input("indices", args.indices, {"tokens", "topk"}, {DType::i32});
  check.optional_input("lengths", args.lengths, {"tokens"}, {DType::i32});
  check.optional_input("sink", args.sink, {"heads"}, {accumulation});
  check.input("lse", args.lse, {"tokens", "heads"}, {accumulation});
  check.output("target", args.target, {"tokens", "topk"}, {accumulation});
  check_attention_sizes(check);
  check.dim_in_range("topk", 1, kMaxTopk);
  check_scale(check, args.scale);
  check.in_range("key_offset", args.key_offset, 0, check.dim("keys"));
  check_lengths(check, args.lengths, check.dim("topk"));
  return {args, check.device()};
}

Checked<IndexLoss> checked(const IndexLoss& args) {
  Check check(IndexLoss::kOperator);
  check.input("indices", args.indices, {"tokens", "topk"}, {DType::i32});
  check.optional_input("lengths", args.lengths, {"tokens"}, {DType::i32});
  check.input("scores", args.scores, {"tokens", "topk"}, {DType::f32, DType::f64});
  check.input("target", args.target, {"tokens", "topk"}, {args.scores.dtype});
  check.output("loss", args.loss, {"tokens"}, {args.scores.dtype});
  check.output("d_scores", args.d_scores, {"tokens", "topk"}, {args.scores.dtype});
  check.dim_in_range("topk", 1, kMaxTopk);
  check_lengths(check, args.lengths, check.dim("topk"));
  return {args, check.device()};
}

Checked<DenseIndexLossForward> checked(const DenseIndexLossForward& args) {
  Check check(DenseIndexLossForward::kOperator);
  check_dense(check, args, !args.lse_given);
  check.output("loss", args.loss, {"tokens"}, {accumulation_type(args.q.dtype)});
  return {args, check.device()};
}

Checked<DenseIndexLossBackward> checked(const DenseIndexLossBackward& args) {
  Check check(DenseIndexLossBackward::kOperator);
  check_dense(check, args, false);
  const DType accumulation = accumulation_type(args.q.dtype);
  check.input("d_loss", args.d_loss, {"tokens"}, {accumulation});
  check.output("d_index_q", args.d_index_q, {"tokens", "index_heads", "index_dim"}, {args.q.dtype});
  check.output("d_weights", args.d_weights, {"tokens", "index_heads"}, {accumulation});
  check.output("d_index_k", args.d_index_k, {"index_keys", "index_dim"},
               {accumulation, args.q.dtype});
  return {args, check.device()};
}

bool is_written(const DenseIndexLossForward& args,
                const Field<DenseIndexLossForward, Tensor>& field) {
  if (args.lse_given && field.member == &DenseIndexLossForward::lse) return false;
  return field.role == FieldRole::output;
}

template struct Operator<IndexTarget>;
template struct Operator<IndexLoss>;
template struct Operator<DenseIndexLossForward>;
template struct Operator<DenseIndexLossBackward>;

}  // namespace winnow
