// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "backend_operators.h"
#include "core/check.h"
#include "core/rows.h"
#include "core/threads.h"
#include "reference/linear.h"

namespace winnow::reference {

std::size_t scratch_bytes(const ValueProjectionForward& args, const Execution&) {
  return 2 * Scratch::bytes<double>(args.out.shape[2]);
}

void run(const ValueProjectionForward& args, const Execution& execution) {
  const std::int64_t heads = args.w_v.shape[0];
  const std::int64_t v_dim = args.w_v.shape[2];
  parallel_for(execution, args.out.shape[0] * heads, scratch_bytes(args, execution),
               [&](std::int64_t i, Scratch scratch) {
                 const std::int64_t t = i / heads;
                 const std::int64_t h = i % heads;
                 const std::span<double> out = scratch.take<double>(v_dim);
                 const std::span<double> w = scratch.take<double>(v_dim);
                 read_row(args.out, {t, h}, out);
                 for (std::int64_t d = 0; d < args.w_v.shape[1]; ++d) {
                   read_row(args.w_v, {h, d}, w);
                   write(args.out_v, {t, h, d}, dot(w, out));
                 }
               });
}

std::size_t scratch_bytes(const ValueProjectionBackward& args, const Execution&) {
  return 2 * Scratch::bytes<double>(args.out.shape[2]);
}

void run(const ValueProjectionBackward& args, const Execution& execution) {
  const std::int64_t tokens = args.out.shape[0];
  const std::int64_t heads = args.w_v.shape[0];
  const std::int64_t head_dim = args.w_v.shape[1];
  const std::int64_t v_dim = args.w_v.shape[2];

  parallel_for(execution, tokens * heads, scratch_bytes(args, execution),
               [&](std::int64_t i, Scratch scratch) {
                 const std::int64_t t = i / heads;
                 const std::int64_t h = i % heads;
                 const std::span<double> d_out = scratch.take<double>(v_dim);
                 const std::span<double> w = scratch.take<double>(v_dim);
                 std::fill(d_out.begin(), d_out.end(), 0.0);
                 for (std::int64_t d = 0; d < head_dim; ++d) {
                   read_row(args.w_v, {h, d}, w);
                   add_scaled(d_out, read(args.d_out_v, {t, h, d}), w);
                 }
                 write_row(args.d_out, {t, h}, d_out);
               });

  const bool is_added_to = args.d_w_v.dtype == accumulation_type(args.out.dtype);
  parallel_for(execution, heads * head_dim, scratch_bytes(args, execution),
               [&](std::int64_t i, Scratch scratch) {
                 const std::int64_t h = i / head_dim;
                 const std::int64_t d = i % head_dim;
                 const std::span<double> d_w = scratch.take<double>(v_dim);
                 const std::span<double> out = scratch.take<double>(v_dim);
                 std::fill(d_w.begin(), d_w.end(), 0.0);
                 if (is_added_to) read_row(args.d_w_v, {h, d}, d_w);
                 for (std::int64_t t = 0; t < tokens; ++t) {
                   read_row(args.out, {t, h}, out);
                   add_scaled(d_w, read(args.d_out_v, {t, h, d}), out);
                 }
                 write_row(args.d_w_v, {h, d}, d_w);
               });
}

}  // namespace winnow::reference
