// SPDX-License-Identifier: Apache-2.0
#include "winnow/index_topk.h"

#include "ops/contents.h"
#include "ops/dispatch.h"

namespace winnow {
namespace {

void check_sizes(const Check& check) {
  check.dim_in_range("index_heads", 1, kMaxInt32);
  check.dim_in_range("index_dim", 8, kMaxInt32);
  check.dim_multiple_of("index_dim", 8);
  check.dim_in_range("keys", 0, kMaxInt32);
  check.dim_in_range("topk", 1, kMaxTopk);
}

}  // namespace

Checked<IndexTopkForward> checked(const IndexTopkForward& args) {
  Check check(IndexTopkForward::kOperator);
  check.input("q", args.q, {"tokens", "index_heads", "index_dim"},
              {DType::bf16, DType::f16, DType::f32, DType::f64, DType::f8_e4m3});
  const DType accumulation = accumulation_type(args.q.dtype);
  check.input("k", args.k, {"keys", "index_dim"}, {args.q.dtype});
  check.input("weights", args.weights, {"tokens", "index_heads"}, {accumulation});
  check.optional_input("k_scale", args.k_scale, {"keys"}, {DType::f32});
  check.input("begin", args.begin, {"tokens"}, {DType::i32});
  check.input("end", args.end, {"tokens"}, {DType::i32});
  if (args.replay) {
    check.input("indices", args.indices, {"tokens", "topk"}, {DType::i32});
    check.optional_input("lengths", args.lengths, {"tokens"}, {DType::i32});
  } else {
    check.output("indices", args.indices, {"tokens", "topk"}, {DType::i32});
    check.optional_output("lengths", args.lengths, {"tokens"}, {DType::i32});
  }
  check.optional_output("scores", args.scores, {"tokens", "topk"}, {accumulation});
  check.in_range("order", static_cast<std::int32_t>(args.order), 0,
                 static_cast<std::int32_t>(SlotOrder::by_score));
  check_sizes(check);
  const bool fp8 = args.q.dtype == DType::f8_e4m3;
  if (fp8 && !args.k_scale) check.fail("k_scale", "absent", refusal::fp8_needs_scale);
  if (!fp8 && args.k_scale) check.fail("k_scale", describe(args.k_scale), refusal::needs_fp8);
  if (args.replay && !args.scores) check.fail("scores", "absent", refusal::replay_needs_scores);
  check_windows(check, args.begin, args.end, check.dim("keys"));
  if (args.replay) check_lengths(check, args.lengths, check.dim("topk"));
  return {args, check.device()};
}

Checked<IndexTopkBackward> checked(const IndexTopkBackward& args) {
  Check check(IndexTopkBackward::kOperator);
  check.input("q", args.q, {"tokens", "index_heads", "index_dim"}, kActivationTypes);
  const DType accumulation = accumulation_type(args.q.dtype);
  check.input("k", args.k, {"keys", "index_dim"}, {args.q.dtype});
  check.input("weights", args.weights, {"tokens", "index_heads"}, {accumulation});
  check.input("begin", args.begin, {"tokens"}, {DType::i32});
  check.input("end", args.end, {"tokens"}, {DType::i32});
  check.input("indices", args.indices, {"tokens", "topk"}, {DType::i32});
  check.optional_input("lengths", args.lengths, {"tokens"}, {DType::i32});
  check.input("d_scores", args.d_scores, {"tokens", "topk"}, {accumulation});
  check.output("d_q", args.d_q, {"tokens", "index_heads", "index_dim"}, {args.q.dtype});
  check.output("d_weights", args.d_weights, {"tokens", "index_heads"}, {accumulation});
  check.output("d_k", args.d_k, {"keys", "index_dim"}, {accumulation, args.q.dtype});
  check_sizes(check);
  check_windows(check, args.begin, args.end, check.dim("keys"));
  check_lengths(check, args.lengths, check.dim("topk"));
  return {args, check.device()};
}

bool is_written(const IndexTopkForward& args, const Field<IndexTopkForward, Tensor>& field) {
  if (args.replay) return field.member == &IndexTopkForward::scores;
  return field.role == FieldRole::output;
}

template struct Operator<IndexTopkForward>;
template struct Operator<IndexTopkBackward>;

}  // namespace winnow
