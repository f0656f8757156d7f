// SPDX-License-Identifier: Apache-2.0
// value_projection: projects the output of latent attention to the values of each head.
#pragma once

#include "winnow/execution.h"
#include "winnow/tensor.h"

namespace winnow {

/// out_v[t,h] = w_v[h] @ out[t,h]
struct ValueProjectionForward {
  Tensor out{};    // [tokens, heads, v_dim]    bf16 | f16 | f32 | f64 (reference)
  Tensor w_v{};    // [heads, head_dim, v_dim]  as out
  Tensor out_v{};  // [tokens, heads, head_dim] as out, out
};

/// d_out[t,h] = w_v[h]^T @ d_out_v[t,h],   d_w_v[h] += sum_t d_out_v[t,h] (outer) out[t,h]
struct ValueProjectionBackward {
  Tensor out{};      // [tokens, heads, v_dim]
  Tensor w_v{};      // [heads, head_dim, v_dim]
  Tensor d_out_v{};  // [tokens, heads, head_dim]  as out
  Tensor d_out{};    // [tokens, heads, v_dim]     as out, out
  Tensor d_w_v{};    // [heads, head_dim, v_dim]   f32 (f64 with f64): added to; else as out,
                     //   overwritten, rounded once
};

void value_projection_forward(const ValueProjectionForward& args, const Execution& execution = {});
void value_projection_backward(const ValueProjectionBackward& args,
                               const Execution& execution = {});
std::size_t workspace_bytes(const ValueProjectionForward& args, const Execution& execution = {});
std::size_t workspace_bytes(const ValueProjectionBackward& args, const Execution& execution = {});
std::string why_not(const ValueProjectionForward& args, const Execution& execution = {});
std::string why_not(const ValueProjectionBackward& args, const Execution& execution = {});

}  // namespace winnow
