// SPDX-License-Identifier: Apache-2.0
// The workload of value_projection.
#include <cmath>

#include "harness/workloads.h"

namespace winnow::harness {

ValueProjectionWork::ValueProjectionWork(const Case& c, const Placement& placement,
                                         std::uint64_t seed)
    : forward_flops(2.0 * c.tokens * c.heads * c.head_dim * c.v_dim),
      backward_flops(2 * forward_flops),
      buffers(c, placement, seed),
      out(buffers.query_input(c.dtype, {c.heads, c.v_dim}, buffers.normal("out"))),
      w_v(buffers.input(c.dtype, {c.heads, c.head_dim, c.v_dim},
                        buffers.normal("w_v", 1 / std::sqrt(static_cast<double>(c.v_dim))))),
      out_v(buffers.query_output(c.dtype, {c.heads, c.head_dim})),
      d_out_v(buffers.query_input(c.dtype, {c.heads, c.head_dim},
                                  buffers.if_live(c.heads, buffers.normal("d_out_v")))),
      d_out(buffers.query_output(c.dtype, {c.heads, c.v_dim})),
      d_w_v(buffers.sum({c.heads, c.head_dim, c.v_dim})),
      d_w_v_rounded(c.dtype == DType::f32
                        ? buffers.absent()
                        : buffers.output(c.dtype, {c.heads, c.head_dim, c.v_dim})),
      forward{.out = out.tensor(), .w_v = w_v.tensor(), .out_v = out_v.tensor()},
      backward{.out = out.tensor(),
               .w_v = w_v.tensor(),
               .d_out_v = d_out_v.tensor(),
               .d_out = d_out.tensor(),
               .d_w_v = d_w_v.tensor()},
      backward_rounded(backward) {
  backward_rounded.d_w_v = d_w_v_rounded.tensor();
}

std::vector<Step> ValueProjectionWork::steps() const {
  return {step("forward", forward, forward_flops), step("backward", backward, backward_flops)};
}

}  // namespace winnow::harness
