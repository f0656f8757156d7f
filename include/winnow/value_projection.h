// SPDX-License-Identifier: Apache-2.0
// value_projection: projects the output of latent attention to the values of each head.
#pragma once

#include <tuple>

#include "winnow/call.h"

namespace winnow {

/// out_v[t,h] = w_v[h] @ out[t,h]
struct ValueProjectionForward {
  Tensor out{};    // [tokens, heads, v_dim]    bf16 | f16 | f32 | f64 (reference)
  Tensor w_v{};    // [heads, head_dim, v_dim]  as out
  Tensor out_v{};  // [tokens, heads, head_dim] as out, out

  static constexpr char kOperator[] = "value_projection_forward";
  static constexpr auto fields() {
    using Args = ValueProjectionForward;
    return std::tuple{fields::input("out", &Args::out), fields::input("w_v", &Args::w_v),
                      fields::output("out_v", &Args::out_v)};
  }
};

/// d_out[t,h] = w_v[h]^T @ d_out_v[t,h],   d_w_v[h] += sum_t d_out_v[t,h] (outer) out[t,h]
struct ValueProjectionBackward {
  Tensor out{};      // [tokens, heads, v_dim]
  Tensor w_v{};      // [heads, head_dim, v_dim]
  Tensor d_out_v{};  // [tokens, heads, head_dim]  as out
  Tensor d_out{};    // [tokens, heads, v_dim]     as out, out
  Tensor d_w_v{};    // [heads, head_dim, v_dim]   f32 (f64 with f64): added to; else as out,
                     //   overwritten, rounded once

  static constexpr char kOperator[] = "value_projection_backward";
  static constexpr auto fields() {
    using Args = ValueProjectionBackward;
    return std::tuple{fields::input("out", &Args::out), fields::input("w_v", &Args::w_v),
                      fields::input("d_out_v", &Args::d_out_v),
                      fields::output("d_out", &Args::d_out), fields::output("d_w_v", &Args::d_w_v)};
  }
};

extern template struct Operator<ValueProjectionForward>;
extern template struct Operator<ValueProjectionBackward>;

inline void value_projection_forward(const ValueProjectionForward& args,
                                     const Execution& execution = {}) {
  run(args, execution);
}
inline void value_projection_backward(const ValueProjectionBackward& args,
                                      const Execution& execution = {}) {
  run(args, execution);
}

}  // namespace winnow
