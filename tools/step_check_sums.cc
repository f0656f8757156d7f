// SPDX-License-Identifier: Apache-2.0
// Sums over all queries of a training step, held against the reference on samples of keys and
// heads.
#include <algorithm>

#include <fmt/format.h>

#include "harness/trial.h"
#include "tools/oracle_memory.h"
#include "tools/step_check.h"

namespace winnow::tools {
namespace {

using harness::Buffer;
using harness::compare;
using harness::kOracle;
using harness::Report;
using harness::Rows;
using harness::TrainingStep;

/// The index lists of a step without all other keys. The gradient of a key is that of the whole
/// lists, since lse, out and d_scores of the step go with them; only the work is less.
struct KeptSlots {
  std::int64_t width = 1;
  std::vector<std::int32_t> indices;  // [tokens, width]
  std::vector<std::int64_t> from;     // [tokens, width], where the slot stood; -1: none
};

/// With `first`, the first slot of each list stays too, so that no row loses all of its keys.
KeptSlots keep(const Buffer& lists, const Rows& keys, bool first) {
  const std::vector<std::int32_t> indices = lists.download_ints();
  const std::int64_t tokens = lists.tensor().shape[0];
  const std::int64_t topk = lists.tensor().shape[1];
  std::vector<std::vector<std::int64_t>> kept(tokens);
  KeptSlots slots;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t i = t * topk; i < (t + 1) * topk; ++i) {
      const bool wanted = std::find(keys.begin(), keys.end(), indices[i]) != keys.end();
      if (indices[i] >= 0 && (wanted || (first && i == t * topk))) kept[t].push_back(i);
    }
    slots.width = std::max(slots.width, static_cast<std::int64_t>(kept[t].size()));
  }
  for (std::vector<std::int64_t>& row : kept) {
    row.resize(slots.width, -1);
    for (const std::int64_t i : row) {
      slots.from.push_back(i);
      slots.indices.push_back(i < 0 ? -1 : indices[i]);
    }
  }
  return slots;
}

/// One head of [tokens, heads, dim].
Tensor head_of_rows(Tensor tensor, std::int64_t h) {
  tensor.data =
      static_cast<char*>(tensor.data) + h * tensor.stride[1] * element_bytes(tensor.dtype);
  tensor.shape[1] = 1;
  return tensor;
}

/// One head of [heads, rows, dim].
Tensor head_of_matrices(Tensor tensor, std::int64_t h) {
  tensor.data =
      static_cast<char*>(tensor.data) + h * tensor.stride[0] * element_bytes(tensor.dtype);
  tensor.shape[0] = 1;
  return tensor;
}

void check_attention(const TrainingStep& step, const Rows& keys, std::vector<Report>& reports) {
  OracleMemory memory;
  const KeptSlots slots = keep(step.indices, keys, step.c.sink);
  SparseAttentionBackward args = memory.on_host(step.attend_backward, step.buffers);
  args.indices = memory.filled(DType::i32, {step.c.tokens, slots.width}, slots.indices);
  args.lengths = {};
  run(args, kOracle);
  const harness::Limit limit = harness::gradient_limit(step.c.dtype);
  reports.push_back(
      compare("d_kv", step.d_kv.download(keys), memory.buffer_of(args.d_kv).download(keys), limit));
  if (step.c.sink)
    reports.push_back(
        compare("d_sink", step.d_sink.download(), memory.values_of(args.d_sink), limit));
}

void check_indexer(const TrainingStep& step, const Rows& keys, std::vector<Report>& reports) {
  OracleMemory memory;
  const KeptSlots slots = keep(step.selected, keys, false);
  const std::vector<double> all_d_scores = step.d_scores.download();
  std::vector<double> d_scores;
  for (const std::int64_t i : slots.from) d_scores.push_back(i < 0 ? 0 : all_d_scores[i]);

  IndexTopkBackward args = memory.on_host(step.select_backward, step.buffers);
  args.indices = memory.filled(DType::i32, {step.c.tokens, slots.width}, slots.indices);
  args.lengths = {};
  args.d_scores = memory.filled(DType::f32, {step.c.tokens, slots.width}, d_scores);
  run(args, kOracle);
  reports.push_back(compare("d_index_k", step.d_index_k.download(keys),
                            memory.buffer_of(args.d_k).download(keys),
                            harness::gradient_limit(step.c.dtype)));
}

void check_projection(const TrainingStep& step, std::int64_t head, std::vector<Report>& reports) {
  OracleMemory memory;
  ValueProjectionBackward args = memory.on_host(step.project_backward, step.buffers);
  for (Tensor* rows : {&args.out, &args.d_out_v, &args.d_out}) *rows = head_of_rows(*rows, head);
  args.w_v = head_of_matrices(args.w_v, head);
  args.d_w_v = memory.output(DType::f32, {1, step.c.head_dim, step.c.v_dim});
  run(args, kOracle);
  reports.push_back(compare(fmt::format("d_w_v, head {}", head), step.d_w_v.download({head}),
                            memory.values_of(args.d_w_v), harness::gradient_limit(step.c.dtype)));
}

}  // namespace

std::vector<Report> check_sums(const TrainingStep& step, const Rows& keys, std::int64_t head) {
  std::vector<Report> reports;
  check_attention(step, keys, reports);
  Rows index_keys;  // those of the keys that the indexer knows
  for (const std::int64_t key : keys)
    if (key >= step.c.key_offset()) index_keys.push_back(key - step.c.key_offset());
  check_indexer(step, index_keys, reports);
  if (step.c.head_dim > 0) check_projection(step, head, reports);
  return reports;
}

}  // namespace winnow::tools
