// SPDX-License-Identifier: Apache-2.0
// The value projection: one dense product per head, in blocks of tokens that are packed and stay in
// L2.
//
// Kernel `simd` multiplies floats. Kernel `avx512_bf16` multiplies pairs of bf16, but floats where
// denormals could occur: for rows of out_v and d_out, or for a block of tokens of d_w_v.
#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "backend_operators.h"
#include "core/refusals.h"
#include "core/threads.h"
#include "core/view.h"
#include "cpu/attention.h"
#include "cpu/bf16_pairs.h"
#include "cpu/elements.h"
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

/// A matrix [rows, columns] of elements, its rows padded.
template <class Element>
std::size_t matrix_bytes(std::int64_t rows, std::int64_t columns) {
  return Scratch::bytes<Element>(rows * padded_stride(columns));
}

template <class Element>
Element* take_matrix(Scratch& scratch, std::int64_t rows, std::int64_t columns) {
  return scratch.take<Element>(rows * padded_stride(columns)).data();
}

// Scratch of the three products: the two operands, of which pairs take half, and the sums.

std::size_t project_bytes(const Projection& n) {
  return matrix_bytes<float>(kTokens, n.v_dim) + matrix_bytes<float>(n.v_dim, kChannels) +
         matrix_bytes<float>(4, n.v_dim) + matrix_bytes<float>(kTokens, kChannels);
}

std::size_t output_gradient_bytes(const Projection& n) {
  return matrix_bytes<float>(kTokens, kChannels) + matrix_bytes<float>(kChannels, n.v_dim) +
         matrix_bytes<float>(kTokens, n.v_dim);
}

std::size_t weight_gradient_bytes(const Projection& n) {
  return matrix_bytes<float>(kTokens, kGradientChannels) + matrix_bytes<float>(kTokens, n.v_dim) +
         matrix_bytes<float>(kGradientChannels, n.v_dim);
}

/// Rows of a block of tokens, counted from its first one.
struct Rows {
  explicit Rows(std::int64_t count) : count(count) {
    std::iota(numbers.begin(), numbers.begin() + count, 0);
  }

  std::array<std::int32_t, kTokens> numbers;
  std::int64_t count;
};

/// Channels [begin, begin + count) of head h of `tensor` [tokens, heads, dim] from `token` on, as
/// [tokens, count].
Tensor head_of(Tensor tensor, std::int64_t token, std::int64_t h, std::int64_t begin,
               std::int64_t count) {
  tensor.data =
      static_cast<char*>(tensor.data) +
      (token * tensor.stride[0] + h * tensor.stride[1] + begin) * element_bytes(tensor.dtype);
  tensor.rank = 2;
  tensor.shape = {tensor.shape[0] - token, count};
  tensor.stride = {tensor.stride[0], 1};
  return tensor;
}

}  // namespace
}  // namespace winnow::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace {

/// The least magnitudes but 0 of two operands, which tell for which rows products of pairs are
/// right. Of floats all are.
template <class Element>
class LeastMagnitudes {
 public:
  LeastMagnitudes() { of_row_.fill(std::numeric_limits<float>::infinity()); }

  void see_rows(const Element* rows, std::int64_t stride, std::int64_t count, std::int64_t depth) {
    if constexpr (kArePairs) {
      for (std::int64_t i = 0; i < count; ++i)
        of_row_[i] = std::min(of_row_[i], least_magnitude(rows + i * stride, stride, 1, depth));
    }
  }
  void see_weights(const Element* w, std::int64_t stride, std::int64_t depth,
                   std::int64_t columns) {
    if constexpr (kArePairs) of_w_ = std::min(of_w_, least_magnitude(w, stride, depth, columns));
  }
  /// Leaves the rows that floats must be multiplied for.
  void keep_rows_for_floats(Rows& rows) const {
    std::int64_t kept = 0;
    if constexpr (kArePairs) {
      for (std::int64_t i = 0; i < rows.count; ++i)
        if (!have_normal_products(of_row_[i], of_w_)) rows.numbers[kept++] = rows.numbers[i];
    }
    rows.count = kept;
  }

 private:
  static constexpr bool kArePairs = kElementDepth<Element> == 2;
  std::array<float, kTokens> of_row_;
  float of_w_ = std::numeric_limits<float>::infinity();
};

/// Computes out_v of head h for some rows of the block at `token`, of which it leaves those that
/// need floats.
template <class Element>
void project_rows(const ValueProjectionForward& args, std::int64_t h, std::int64_t token,
                  Rows& rows, Scratch scratch) {
  const Projection n = sizes(args);
  const std::int64_t depth = elements_of<Element>(n.v_dim);
  const std::int64_t stride = padded_stride(depth);
  const std::int64_t channel_stride = padded_stride(kChannels);
  auto* const out = take_matrix<Element>(scratch, kTokens, depth);  // [rows, depth]
  auto* const w = take_matrix<Element>(scratch, depth, kChannels);  // [depth, channels]
  auto* const four_channels = take_matrix<Element>(scratch, 4, depth);
  auto* const out_v = take_matrix<float>(scratch, kTokens, kChannels);  // [rows, channels]
  LeastMagnitudes<Element> least;
  gather_rows(head_of(args.out, token, h, 0, n.v_dim), rows.numbers.data(), rows.count, out,
              stride);
  least.see_rows(out, stride, rows.count, depth);
  for (std::int64_t begin = 0; begin < n.head_dim; begin += kChannels) {
    const std::int64_t channels = std::min(kChannels, n.head_dim - begin);
    transpose_rows(slice(args.w_v, h), begin, channels, w, channel_stride, four_channels);
    least.see_weights(w, channel_stride, depth, padded_columns(channels));
    multiply_blocked(KMajor<Element>{out, stride}, rows.count, w, channel_stride, channels, depth,
                     out_v, channel_stride);
    const Tensor to = head_of(args.out_v, token, h, begin, channels);
    for (std::int64_t i = 0; i < rows.count; ++i) {
      narrow_row(to.dtype, out_v + i * channel_stride, 1, row_of(to, rows.numbers[i]), channels);
    }
  }
  least.keep_rows_for_floats(rows);
}

/// Computes d_out of head h for some rows of the block at `token`, of which it leaves those that
/// need floats.
template <class Element>
void output_gradient_rows(const ValueProjectionBackward& args, std::int64_t h, std::int64_t token,
                          Rows& rows, Scratch scratch) {
  const Projection n = sizes(args);
  const std::int64_t stride = padded_stride(elements_of<Element>(kChannels));
  const std::int64_t v_stride = padded_stride(n.v_dim);
  auto* const d_out_v =  // [rows, depth]
      take_matrix<Element>(scratch, kTokens, elements_of<Element>(kChannels));
  auto* const w =  // [depth, v_dim]
      take_matrix<Element>(scratch, elements_of<Element>(kChannels), n.v_dim);
  auto* const d_out = take_matrix<float>(scratch, kTokens, n.v_dim);  // [rows, v_dim]
  LeastMagnitudes<Element> least;
  for (std::int64_t begin = 0; begin < n.head_dim; begin += kChannels) {
    const std::int64_t channels = std::min(kChannels, n.head_dim - begin);
    const std::int64_t depth = elements_of<Element>(channels);
    gather_rows(head_of(args.d_out_v, token, h, begin, channels), rows.numbers.data(), rows.count,
                d_out_v, stride);
    load_depth(slice(args.w_v, h), begin, channels, w, v_stride);
    least.see_rows(d_out_v, stride, rows.count, depth);
    least.see_weights(w, v_stride, depth, n.v_dim);
    multiply_blocked(KMajor<Element>{d_out_v, stride}, rows.count, w, v_stride, n.v_dim, depth,
                     d_out, v_stride, begin > 0);
  }
  for (std::int64_t i = 0; i < rows.count; ++i) {
    narrow_row(args.d_out.dtype, d_out + i * v_stride, 1,
               row_of(args.d_out, token + rows.numbers[i], h), n.v_dim);
  }
  least.keep_rows_for_floats(rows);
}

/// Adds a block of tokens to d_w [channels, v_dim] of some channels of head h. Returns false, and
/// has added nothing, if denormals could occur in products of pairs.
template <class Element>
bool add_to_weights(const ValueProjectionBackward& args, std::int64_t h, HeadRange channels,
                    std::int64_t token, std::int64_t tokens, float* d_w, Scratch scratch) {
  const Projection n = sizes(args);
  const std::int64_t stride = padded_stride(n.v_dim);
  const std::int64_t channel_stride = padded_stride(kGradientChannels);
  const std::int64_t depth = elements_of<Element>(tokens);
  auto* const d_out_v =
      take_matrix<Element>(scratch, depth, kGradientChannels);      // [depth, channels]
  auto* const out = take_matrix<Element>(scratch, depth, n.v_dim);  // [depth, v_dim]
  load_depth(head_of(args.d_out_v, token, h, channels.begin, channels.count), 0, tokens, d_out_v,
             channel_stride);
  load_depth(head_of(args.out, token, h, 0, n.v_dim), 0, tokens, out, stride);
  if constexpr (kElementDepth<Element> == 2) {
    if (!have_normal_products(least_magnitude(d_out_v, channel_stride, depth, channels.count),
                              least_magnitude(out, stride, depth, n.v_dim)))
      return false;
  }
  multiply_blocked(MnMajor<Element>{d_out_v, channel_stride}, channels.count, out, stride, n.v_dim,
                   depth, d_w, stride, true);
  return true;
}

/// Computes out_v of head h for the block of tokens that begins at `token`.
void project(const ValueProjectionForward& args, bool with_pairs, std::int64_t h,
             std::int64_t token, Scratch scratch) {
  Rows rows(std::min(kTokens, sizes(args).tokens - token));
  if constexpr (kMultipliesPairs) {
    if (with_pairs) project_rows<Bf16Pair>(args, h, token, rows, scratch);
  }
  if (rows.count > 0) project_rows<float>(args, h, token, rows, scratch);
}

/// Computes d_out of head h for the block of tokens that begins at `token`.
void output_gradient(const ValueProjectionBackward& args, bool with_pairs, std::int64_t h,
                     std::int64_t token, Scratch scratch) {
  Rows rows(std::min(kTokens, sizes(args).tokens - token));
  if constexpr (kMultipliesPairs) {
    if (with_pairs) output_gradient_rows<Bf16Pair>(args, h, token, rows, scratch);
  }
  if (rows.count > 0) output_gradient_rows<float>(args, h, token, rows, scratch);
}

/// Computes d_w_v of head h for the block of channels at `begin`, summed over all tokens in order.
void weight_gradient(const ValueProjectionBackward& args, bool with_pairs, std::int64_t h,
                     std::int64_t begin, Scratch scratch) {
  const Projection n = sizes(args);
  const HeadRange channels = {begin, std::min(kGradientChannels, n.head_dim - begin)};
  const std::int64_t stride = padded_stride(n.v_dim);
  auto* const d_w = take_matrix<float>(scratch, kGradientChannels, n.v_dim);  // [channels, v_dim]
  const bool is_added_to = args.d_w_v.dtype == DType::f32;
  std::fill_n(d_w, channels.count * stride, 0.0f);
  for (std::int64_t token = 0; token < n.tokens; token += kTokens) {
    const std::int64_t tokens = std::min(kTokens, n.tokens - token);
    bool is_added = false;
    if constexpr (kMultipliesPairs) {
      is_added =
          with_pairs && add_to_weights<Bf16Pair>(args, h, channels, token, tokens, d_w, scratch);
    }
    if (!is_added) add_to_weights<float>(args, h, channels, token, tokens, d_w, scratch);
  }
  for (std::int64_t i = 0; i < channels.count; ++i) {
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

void run_projection(const ValueProjectionForward& args, bool with_pairs,
                    const Execution& execution) {
  const Projection n = sizes(args);
  const auto project_on_target = HWY_DYNAMIC_DISPATCH(project);
  parallel_for(execution, n.heads * n.token_blocks(), lane_bytes(args),
               [&](std::int64_t i, Scratch scratch) {
                 project_on_target(args, with_pairs, i / n.token_blocks(),
                                   i % n.token_blocks() * kTokens, scratch);
               });
}

void run_gradients(const ValueProjectionBackward& args, bool with_pairs,
                   const Execution& execution) {
  const Projection n = sizes(args);
  const auto output_gradient_on_target = HWY_DYNAMIC_DISPATCH(output_gradient);
  const auto weight_gradient_on_target = HWY_DYNAMIC_DISPATCH(weight_gradient);
  parallel_for(execution, n.heads * n.token_blocks(), lane_bytes(args),
               [&](std::int64_t i, Scratch scratch) {
                 output_gradient_on_target(args, with_pairs, i / n.token_blocks(),
                                           i % n.token_blocks() * kTokens, scratch);
               });
  parallel_for(execution, n.heads * n.gradient_blocks(), lane_bytes(args),
               [&](std::int64_t i, Scratch scratch) {
                 weight_gradient_on_target(args, with_pairs, i / n.gradient_blocks(),
                                           i % n.gradient_blocks() * kGradientChannels, scratch);
               });
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
std::string why_not_pairs(const ValueProjectionForward& args) {
  return why_not_pairs_of(args.out.dtype);
}
std::string why_not_pairs(const ValueProjectionBackward& args) {
  return why_not_pairs_of(args.out.dtype);
}
std::size_t workspace_bytes(const ValueProjectionForward& args, const Execution& execution) {
  return all_lanes_bytes(execution, lane_bytes(args));
}
std::size_t workspace_bytes(const ValueProjectionBackward& args, const Execution& execution) {
  return all_lanes_bytes(execution, lane_bytes(args));
}

void run(const ValueProjectionForward& args, const Execution& execution) {
  run_projection(args, false, execution);
}
void run(const ValueProjectionBackward& args, const Execution& execution) {
  run_gradients(args, false, execution);
}
void run_pairs(const ValueProjectionForward& args, const Execution& execution) {
  run_projection(args, true, execution);
}
void run_pairs(const ValueProjectionBackward& args, const Execution& execution) {
  run_gradients(args, true, execution);
}

}  // namespace winnow::cpu
#endif
