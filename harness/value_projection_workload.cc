// SPDX-License-Identifier: Apache-2.0
// The workload of value_projection.
#include <cmath>

#include "harness/value_projection.h"

namespace winnow::harness {

ValueProjectionWork::ValueProjectionWork(const Case& c, const Placement& placement,
                                         std::uint64_t seed)
    : forward_flops(2.0 * c.tokens * c.heads * c.head_dim * c.v_dim),
      backward_flops(2 * forward_flops),
      buffers(c, placement, seed),
      out(buffers.query_input("out", c.dtype, {c.heads, c.v_dim}, buffers.normal("out"))),
      w_v(buffers.input("w_v", c.dtype, {c.heads, c.head_dim, c.v_dim},
                        buffers.normal("w_v", 1 / std::sqrt(static_cast<double>(c.v_dim))))),
      out_v(buffers.query_output("out_v", c.dtype, {c.heads, c.head_dim})),
      d_out_v(buffers.query_input("d_out_v", c.dtype, {c.heads, c.head_dim},
                                  buffers.if_live(c.heads, buffers.normal("d_out_v")))),
      d_out(buffers.query_output("d_out", c.dtype, {c.heads, c.v_dim})),
      d_w_v(buffers.sum("d_w_v", {c.heads, c.head_dim, c.v_dim})),
      d_w_v_rounded(c.dtype == DType::f32
                        ? buffers.absent()
                        : buffers.output("d_w_v_rounded", c.dtype, {c.heads, c.head_dim, c.v_dim})),
      forward(buffers.arguments<ValueProjectionForward>()),
      backward(buffers.arguments<ValueProjectionBackward>()),
      backward_rounded(backward) {
  backward_rounded.d_w_v = d_w_v_rounded.tensor();
}

std::vector<Call> ValueProjectionWork::calls() const {
  return {call(forward, forward_flops), call(backward, backward_flops)};
}

}  // namespace winnow::harness
