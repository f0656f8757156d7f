// SPDX-License-Identifier: Apache-2.0
// The value projection: one dense product per head, in blocks of tokens that are converted to fp32
// and stay in L2.
#include <algorithm>

#include "backend_operators.h"
#include "core/refusals.h"
#include "core/threads.h"
#include "core/view.h"
#include "cpu/attention.h"
#include "cpu/plan.h"
#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/value_projection.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/matmul-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/widen-inl.h"

#ifndef WINNOW_CPU_VALUE_PROJECTION_ONCE_
#define WINNOW_CPU_VALUE_PROJECTION_ONCE_
namespace winnow::cpu {
namespace {

constexpr std::int64_t kTokens = 192;           // tokens per block
constexpr std::int64_t kChannels = 128;         // channels of head_dim per block
constexpr std::int64_t kGradientChannels = 64;  // the same for d_w_v: fewer, to have more tasks

struct Projection {
  std::int64_t tokens, heads, head_dim, v_dim;

  std::int64_t token_blocks() const { return ceil_div(tokens, kTokens); }
  std::int64_t gradient_blocks() const { return ceil_div(head_dim, kGradientChannels); }
};

template <class Args>
Projection sizes(const Args& args) {
  return {args.out.shape[0], args.w_v.shape[0], args.w_v.shape[1], args.w_v.shape[2]};
}

std::size_t matrix_bytes(std::int64_t rows, std::int64_t columns) {
  return Scratch::bytes<float>(rows * padded_stride(columns));
}

float* take_matrix(Scratch& scratch, std::int64_t rows, std::int64_t columns) {
  return scratch.take<float>(rows * padded_stride(columns)).data();
}

std::size_t project_bytes(const Projection& n) {
  return matrix_bytes(kTokens, n.v_dim) + matrix_bytes(n.v_dim, kChannels) +
         matrix_bytes(kTokens, kChannels);
}

std::size_t output_gradient_bytes(const Projection& n) {
  return matrix_bytes(kTokens, kChannels) + matrix_bytes(kChannels, n.v_dim) +
         matrix_bytes(kTokens, n.v_dim);
}

std::size_t weight_gradient_bytes(const Projection& n) {
  return matrix_bytes(kTokens, kGradientChannels) + matrix_bytes(kTokens, n.v_dim) +
         matrix_bytes(kGradientChannels, n.v_dim);
}

/// Channels [begin, begin + count) of head h of `tensor` [tokens, heads, dim], as [tokens, count].
Tensor head_of(Tensor tensor, std::int64_t h, std::int64_t begin, std::int64_t count) {
  tensor.data = static_cast<char*>(tensor.data) +
                (h * tensor.stride[1] + begin) * element_bytes(tensor.dtype);
  tensor.rank = 2;
  tensor.shape = {tensor.shape[0], count};
  tensor.stride = {tensor.stride[0], 1};
  return tensor;
}

}  // namespace
}  // namespace winnow::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace {

/// Computes out_v of head h for the block of tokens that begins at `token`.
void project(const ValueProjectionForward& args, std::int64_t h, std::int64_t token,
             Scratch scratch) {
  const Projection n = sizes(args);
  const std::int64_t tokens = std::min(kTokens, n.tokens - token);
  const std::int64_t stride = padded_stride(n.v_dim);
  const std::int64_t channel_stride = padded_stride(kChannels);
  float* const out = take_matrix(scratch, kTokens, n.v_dim);      // [tokens, v_dim]
  float* const w = take_matrix(scratch, n.v_dim, kChannels);      // [v_dim, channels]
  float* const out_v = take_matrix(scratch, kTokens, kChannels);  // [tokens, channels]
  widen_rows(head_of(args.out, h, 0, n.v_dim), token, tokens, out, stride);
  for (std::int64_t begin = 0; begin < n.head_dim; begin += kChannels) {
    const std::int64_t channels = std::min(kChannels, n.head_dim - begin);
    // out_v serves as scratch until the product is written to it.
    transpose_rows(slice(args.w_v, h), begin, channels, w, channel_stride, out_v);
    multiply_blocked(KMajor{out, stride}, tokens, w, channel_stride, channels, n.v_dim, out_v,
                     channel_stride);
    const Tensor to = head_of(args.out_v, h, begin, channels);
    for (std::int64_t i = 0; i < tokens; ++i) {
      narrow_row(to.dtype, out_v + i * channel_stride, 1, row_of(to, token + i), channels);
    }
  }
}

/// Computes d_out of head h for the block of tokens that begins at `token`.
void output_gradient(const ValueProjectionBackward& args, std::int64_t h, std::int64_t token,
                     Scratch scratch) {
  const Projection n = sizes(args);
  const std::int64_t tokens = std::min(kTokens, n.tokens - token);
  const std::int64_t stride = padded_stride(n.v_dim);
  const std::int64_t channel_stride = padded_stride(kChannels);
  float* const d_out_v = take_matrix(scratch, kTokens, kChannels);  // [tokens, channels]
  float* const w = take_matrix(scratch, kChannels, n.v_dim);        // [channels, v_dim]
  float* const d_out = take_matrix(scratch, kTokens, n.v_dim);      // [tokens, v_dim]
  for (std::int64_t begin = 0; begin < n.head_dim; begin += kChannels) {
    const std::int64_t channels = std::min(kChannels, n.head_dim - begin);
    widen_rows(head_of(args.d_out_v, h, begin, channels), token, tokens, d_out_v, channel_stride);
    widen_rows(slice(args.w_v, h), begin, channels, w, stride);
    multiply_blocked(KMajor{d_out_v, channel_stride}, tokens, w, stride, n.v_dim, channels, d_out,
                     stride, begin > 0);
  }
  for (std::int64_t i = 0; i < tokens; ++i) {
    narrow_row(args.d_out.dtype, d_out + i * stride, 1, row_of(args.d_out, token + i, h), n.v_dim);
  }
}

/// Computes d_w_v of head h for the block of channels at `begin`, summed over all tokens in order.
void weight_gradient(const ValueProjectionBackward& args, std::int64_t h, std::int64_t begin,
                     Scratch scratch) {
  const Projection n = sizes(args);
  const std::int64_t channels = std::min(kGradientChannels, n.head_dim - begin);
  const std::int64_t stride = padded_stride(n.v_dim);
  const std::int64_t channel_stride = padded_stride(kGradientChannels);
  float* const d_out_v = take_matrix(scratch, kTokens, kGradientChannels);  // [tokens, channels]
  float* const out = take_matrix(scratch, kTokens, n.v_dim);                // [tokens, v_dim]
  float* const d_w = take_matrix(scratch, kGradientChannels, n.v_dim);      // [channels, v_dim]
  const bool is_added_to = args.d_w_v.dtype == DType::f32;
  std::fill_n(d_w, channels * stride, 0.0f);
  for (std::int64_t token = 0; token < n.tokens; token += kTokens) {
    const std::int64_t tokens = std::min(kTokens, n.tokens - token);
    widen_rows(head_of(args.d_out_v, h, begin, channels), token, tokens, d_out_v, channel_stride);
    widen_rows(head_of(args.out, h, 0, n.v_dim), token, tokens, out, stride);
    multiply_blocked(MnMajor{d_out_v, channel_stride}, channels, out, stride, n.v_dim, tokens, d_w,
                     stride, true);
  }
  for (std::int64_t i = 0; i < channels; ++i) {
    float* const sum = d_w + i * stride;
    void* const to = row_of(args.d_w_v, h, begin + i);
    if (is_added_to) {
      const auto* const previous = static_cast<const float*>(to);
      for (std::int64_t d = 0; d < n.v_dim; ++d) sum[d] += previous[d];
    }
    narrow_row(args.d_w_v.dtype, sum, 1, to, n.v_dim);
  }
}

}  // namespace
}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::cpu {
namespace {

HWY_EXPORT(project);
HWY_EXPORT(output_gradient);
HWY_EXPORT(weight_gradient);

std::size_t lane_bytes(const ValueProjectionForward& args) { return project_bytes(sizes(args)); }

std::size_t lane_bytes(const ValueProjectionBackward& args) {
  return std::max(output_gradient_bytes(sizes(args)), weight_gradient_bytes(sizes(args)));
}

template <class Args>
std::string why_not_lane(const Args& args, const Execution& execution) {
  if (args.out.dtype == DType::f64) return refusal::no_f64;
  return over_limit(lane_bytes(args), execution);
}

}  // namespace

std::string why_not(const ValueProjectionForward& args, const Execution& execution) {
  return why_not_lane(args, execution);
}
std::string why_not(const ValueProjectionBackward& args, const Execution& execution) {
  return why_not_lane(args, execution);
}
std::size_t workspace_bytes(const ValueProjectionForward& args, const Execution& execution) {
  return all_lanes_bytes(execution, lane_bytes(args));
}
std::size_t workspace_bytes(const ValueProjectionBackward& args, const Execution& execution) {
  return all_lanes_bytes(execution, lane_bytes(args));
}

void run(const ValueProjectionForward& args, const Execution& execution) {
  const Projection n = sizes(args);
  const auto project_on_target = HWY_DYNAMIC_DISPATCH(project);
  parallel_for(execution, n.heads * n.token_blocks(), lane_bytes(args),
               [&](std::int64_t i, Scratch scratch) {
                 project_on_target(args, i / n.token_blocks(), i % n.token_blocks() * kTokens,
                                   scratch);
               });
}

void run(const ValueProjectionBackward& args, const Execution& execution) {
  const Projection n = sizes(args);
  const auto output_gradient_on_target = HWY_DYNAMIC_DISPATCH(output_gradient);
  const auto weight_gradient_on_target = HWY_DYNAMIC_DISPATCH(weight_gradient);
  parallel_for(execution, n.heads * n.token_blocks(), lane_bytes(args),
               [&](std::int64_t i, Scratch scratch) {
                 output_gradient_on_target(args, i / n.token_blocks(),
                                           i % n.token_blocks() * kTokens, scratch);
               });
  parallel_for(execution, n.heads * n.gradient_blocks(), lane_bytes(args),
               [&](std::int64_t i, Scratch scratch) {
                 weight_gradient_on_target(args, i / n.gradient_blocks(),
                                           i % n.gradient_blocks() * kGradientChannels, scratch);
               });
}

}  // namespace winnow::cpu
#endif
