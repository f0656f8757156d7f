// SPDX-License-Identifier: Apache-2.0
// The indexer's target, and its KL divergence from the scores over the selected slots.
#include <algorithm>

#include "backend_operators.h"
#include "core/rows.h"
#include "core/threads.h"
#include "reference/divergence.h"
#include "reference/linear.h"
#include "reference/slots.h"
#include "reference/softmax.h"

namespace winnow::reference {

std::size_t scratch_bytes(const IndexTarget& args, const Execution&) {
  const std::int64_t heads = args.q.shape[1];
  return Scratch::bytes<double>(heads * args.q.shape[2]) + Scratch::bytes<double>(heads) +
         Scratch::bytes<double>(args.q.shape[2]);
}

void run(const IndexTarget& args, const Execution& execution) {
  const std::int64_t heads = args.q.shape[1];
  const std::int64_t dim = args.q.shape[2];
  const Slots slots(args.indices, args.lengths, args.kv.shape[0] - args.key_offset);
  parallel_for(execution, args.q.shape[0], scratch_bytes(args, execution),
               [&](std::int64_t t, Scratch scratch) {
                 const std::span<double> q = scratch.take<double>(heads * dim);
                 const std::span<double> log_sum = scratch.take<double>(heads);
                 const std::span<double> key = scratch.take<double>(dim);
                 for (std::int64_t h = 0; h < heads; ++h) {
                   read_row(args.q, {t, h}, row(q, h, dim));
                   log_sum[h] = log_add_exp(read(args.lse, {t, h}),
                                            args.sink ? read(args.sink, {h}) : kMinusInfinity);
                 }
                 for (std::int64_t j = 0; j < args.indices.shape[1]; ++j) {
                   const std::int64_t i = slots.key(t, j);
                   if (args.accumulate && i == kNoKey) continue;
                   double target = args.accumulate ? read(args.target, {t, j}) : 0;
                   if (i != kNoKey) {
                     read_row(args.kv, {args.key_offset + i}, key);
                     for (std::int64_t h = 0; h < heads; ++h) {
                       target += probability(args.scale * dot(row(q, h, dim), key), log_sum[h]);
                     }
                   }
                   write(args.target, {t, j}, target);
                 }
               });
}

std::size_t scratch_bytes(const IndexLoss& args, const Execution&) {
  return 3 * Scratch::bytes<double>(args.indices.shape[1]);
}

void run(const IndexLoss& args, const Execution& execution) {
  const std::int64_t topk = args.indices.shape[1];
  const View<const std::int32_t, 2> indices(args.indices);
  const View<const std::int32_t, 1> lengths(args.lengths);
  parallel_for(execution, args.indices.shape[0], scratch_bytes(args, execution),
               [&](std::int64_t t, Scratch scratch) {
                 const std::span<double> scores = scratch.take<double>(topk);
                 const std::span<double> target = scratch.take<double>(topk);
                 const std::span<double> d_scores = scratch.take<double>(topk);
                 read_row(args.scores, {t}, scores);
                 read_row(args.target, {t}, target);
                 for (std::int64_t j = 0; j < topk; ++j) {
                   if (indices(t, j) < 0 || (lengths && j >= lengths(t)))
                     scores[j] = kMinusInfinity;
                 }
                 write(args.loss, {t}, divergence(scores, target, d_scores));
                 write_row(args.d_scores, {t}, d_scores);
               });
}

}  // namespace winnow::reference
