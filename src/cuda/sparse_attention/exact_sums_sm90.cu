// SPDX-License-Identifier: Apache-2.0
// Exact sums of key gradients on Hopper: the bounds of their terms, quanta, and what follows the
// sums. The bounds take a pass over all slots:
//
// clang-format off
// warpgroup 0         gathers Q and d_out of an item, 64 heads of a query, then its keys, 64 a block
// warpgroup 1         Q in registers; S = Q K^T, P, its part of the bounds, exp(s - lse) to 2
// warpgroup 2         d_out in registers; dP = dO V^T, dS, its part; adds the bounds of a block
//
//   1     | S n | P n |     | S n+1 | P n+1 |
//   2           | dP n | dS n, add |  | dP n+1 | dS n+1, add |
//
// barriers            full, free                            of a stage of the ring
//                     exponentials_full, exponentials_free  between 1 and 2
// clang-format on
//
// Shared memory: three stages of 72 KiB, 10 KiB for what 1 and 2 exchange. The limit is the tensor
// cores, 2176 cycles a block.
#include <algorithm>
#include <cmath>

#include "cuda/sparse_attention/backward_sm90/bounds.cuh"
#include "cuda/sparse_attention/backward_sm90/head_constants.cuh"
#include "cuda/sparse_attention/exact_sums_sm90.h"

namespace winnow::cuda {
namespace {

using namespace sparse_attention::backward_sm90;

constexpr int kThreadsOfRows = 256;

// ---- Bounds.

/// The larger of two magnitudes; NaN stays NaN.
__device__ __nv_bfloat162 larger(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __hmax2_nan(a, __habs2(b));
}
__device__ __half2 larger(__half2 a, __half2 b) { return __hmax2_nan(a, __habs2(b)); }
__device__ float larger(float a, float b) {
  float result = 0;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

/// The largest magnitude of what a quad is shown of a row.
template <class T>
class LargestOfRow {
 public:
  __device__ void visit(uint4 words) {
    for (const std::uint32_t word : {words.x, words.y, words.z, words.w}) {
      largest_ = larger(largest_, reinterpret_cast<const Pair&>(word));
    }
  }
  __device__ float of_quad() const {
    const float2 pair = unpack_pair<T>(reinterpret_cast<const std::uint32_t&>(largest_));
    float result = larger(pair.x, pair.y);
    result = larger(result, __shfl_xor_sync(0xffffffffu, result, 1));
    return larger(result, __shfl_xor_sync(0xffffffffu, result, 2));
  }

 private:
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  Pair largest_{};
};

/// A block takes an item, four lanes a head: the constants of the heads, and the sizes of q and
/// d_out.
template <class T, int kTiles>
__global__ void __launch_bounds__(4 * kHeads)
    head_sizes_kernel(const __grid_constant__ BoundParameters<T> params, HeadConstants* constants,
                      float2* sizes) {
  const auto number = static_cast<int>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  const Item item = item_of(params.call, number);
  const int head = item.first_head + thread / 4;
  const std::int64_t first = std::int64_t{number} * kHeads;
  LargestOfRow<T> of_q;
  if (head < params.call.heads) {
    const T* const q = params.q + item.t * params.q_token_stride + head * params.q_head_stride;
#pragma unroll 6
    for (int i = 0; i < kTiles * 2; ++i) {
      of_q.visit(__ldg(reinterpret_cast<const uint4*>(q + i * 32 + thread % 4 * 8)));
    }
  }
  LargestOfRow<T> of_d_out;
  for_each_head(
      params.call, item, thread, [&](uint4 words) { of_d_out.visit(words); },
      [&](int of_item, const HeadConstants& of_head) { constants[first + of_item] = of_head; });
  const float2 size = {kSizeUnit * of_q.of_quad(), kSizeUnit * of_d_out.of_quad()};
  if (thread % 4 == 0) sizes[first + thread / 4] = size;
}

template <class T, int kTiles>
__global__ void __launch_bounds__(kThreads, 1)
    bound_terms_kernel(const __grid_constant__ BoundParameters<T> params) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<BoundStorage<kTiles>*>(memory);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    shrink_registers<kProducerRegisters>();
    BoundProducer<T, kTiles>(params, shared).run();
  } else if (threadIdx.x < 2 * kWarpgroup) {
    grow_registers<kProbabilityRegisters>();
    bound_probabilities(params, shared);
  } else {
    grow_registers<kBoundRegisters>();
    bound_gradients(params, shared);
  }
}

template <class T, int kTiles>
void launch_bounds(const SparseAttentionBackward& piece, const ExactSums& sums,
                   cudaStream_t stream) {
  BoundParameters<T> params = {.call = backward_sm90_parameters<T>(piece, kHeads),
                               .q = data_of<const T>(piece.q),
                               .q_token_stride = piece.q.stride[0],
                               .q_head_stride = piece.q.stride[1],
                               .sizes = sums.sizes,
                               .bounds = sums.bounds};
  params.call.constants = sums.constants;
  launch(head_sizes_kernel<T, kTiles>,
         {.blocks = params.call.items, .threads = 4 * kHeads, .stream = stream}, params,
         sums.constants, sums.sizes);
  const int processors = device_properties(piece.q.device).multiprocessors;
  launch(bound_terms_kernel<T, kTiles>,
         {.blocks = std::min(params.call.items, processors),
          .threads = kThreads,
          .shared_bytes = sizeof(BoundStorage<kTiles>),
          .stream = stream},
         params);
}

template <class T>
void launch_bounds(const SparseAttentionBackward& piece, const ExactSums& sums,
                   cudaStream_t stream) {
  if (piece.q.shape[2] == kMaxTiles * kTileColumns) {
    launch_bounds<T, kMaxTiles>(piece, sums, stream);
  } else {
    launch_bounds<T, kValueTiles>(piece, sums, stream);
  }
}

// ---- Quanta.

__device__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

/// The quantum of a key from its bound: 2^-23 of it, rounded up to a power of two. NaN where a
/// bound is not finite or beyond all floats, so that the key's sums become NaN.
__global__ void __launch_bounds__(kThreadsOfRows)
    quanta_kernel(const unsigned long long* bounds, std::int64_t keys, float* quanta,
                  float* inverse_quanta) {
  const std::int64_t key = std::int64_t{blockIdx.x} * kThreadsOfRows + threadIdx.x;
  if (key >= keys) return;
  double bound = 0;  // exact or rounded up
#pragma unroll
  for (int bin = 0; bin < kBoundBins; ++bin) {
    bound = __fma_ru(__ull2double_ru(bounds[key * kBoundBins + bin]), exp2(double(bin_unit(bin))),
                     bound);
  }
  float quantum = 0;
  float inverse = 0;
  if (bound > 0) {
    int exponent = 0;
    const double fraction = frexp(bound * (0x1p-23 / kSizeUnit), &exponent);
    if (fraction == 0.5) --exponent;
    exponent = max(exponent, -126);
    const bool is_finite = exponent <= 126;
    quantum = is_finite ? power_of_two(exponent) : NAN;
    inverse = is_finite ? power_of_two(-exponent) : NAN;
  }
  quanta[key] = quantum;
  inverse_quanta[key] = inverse;
}

// ---- From quanta to gradients.

/// Turns sums of quanta into gradients, four columns a thread: added to those of an fp32 tensor, or
/// rounded. Keys to which nothing was added stay as they are in the former.
template <class T>
__global__ void __launch_bounds__(kThreadsOfRows)
    scale_sums_kernel(KeySums sums, const float* quanta, T* to, std::int64_t stride) {
  const auto groups = static_cast<int>(sums.dim / 4);
  const std::int64_t step = std::int64_t{gridDim.x} * kThreadsOfRows;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreadsOfRows + threadIdx.x;
       i < sums.keys * groups; i += step) {
    const std::int64_t key = i / groups;
    const std::int64_t d = i % groups * 4;
    const float quantum = quanta[key];
    if (std::is_same_v<T, float> && quantum == 0) continue;
    const float* const row = sums.data + key * sums.stride;
    const float2 first = *reinterpret_cast<const float2*>(row + fragment_place(d));
    const float2 second = *reinterpret_cast<const float2*>(row + fragment_place(d + 2));
    if constexpr (std::is_same_v<T, float>) {
      auto* const columns = reinterpret_cast<float4*>(to + key * stride + d);
      const float4 before = *columns;
      *columns = {fmaf(first.x, quantum, before.x), fmaf(first.y, quantum, before.y),
                  fmaf(second.x, quantum, before.z), fmaf(second.y, quantum, before.w)};
    } else {
      *reinterpret_cast<uint2*>(to + key * stride + d) = {
          pack<T>(first.x * quantum, first.y * quantum),
          pack<T>(second.x * quantum, second.y * quantum)};
    }
  }
}

template <class T>
void scale_sums(const ExactSums& sums, T* to, std::int64_t stride, cudaStream_t stream) {
  launch(scale_sums_kernel<T>,
         {.blocks = blocks_for(sums.quanta_sums.keys * sums.quanta_sums.dim / 4, kThreadsOfRows),
          .threads = kThreadsOfRows,
          .stream = stream},
         sums.quanta_sums, sums.quanta, to, stride);
}

// ---- Memory.

/// A bound grows with the number of terms, and the quantum with it; each term is off by up to half
/// a quantum. So at most this many items (64 heads of a row) have quanta in common, half as many
/// where that is possible: the sums of more rows are put together from pieces, which costs little.
constexpr std::int64_t kMostTerms = 32768;
constexpr std::int64_t kLeastRows = 1024;

std::size_t bytes_of(const SparseAttentionBackward& args, std::int64_t rows, bool in_copy) {
  const std::int64_t heads = args.q.shape[1];
  const std::int64_t keys = args.kv.shape[0];
  const std::int64_t items = rows * ((heads + kHeads - 1) / kHeads);
  const auto bytes = [](std::int64_t count, std::size_t size) {
    return static_cast<std::size_t>(count) * size;
  };
  return Workspace::bytes({bytes(keys, sizeof(float)), bytes(keys, sizeof(float)),
                           bytes(keys * kBoundBins, sizeof(unsigned long long)),
                           bytes(items * kHeads, sizeof(HeadConstants)),
                           bytes(items * kHeads, sizeof(float2)),
                           args.d_sink ? bytes(rows * heads, sizeof(float)) : 0,
                           in_copy ? 0 : bytes(keys * args.kv.shape[1], sizeof(float))});
}

}  // namespace

ExactPlan plan_exact_sums(const SparseAttentionBackward& args, std::size_t limit) {
  const std::int64_t tokens = args.q.shape[0];
  if (tokens == 0 || args.kv.shape[0] == 0) return {};
  const auto plan_of = [&](std::int64_t rows) {
    ExactPlan plan{.rows = rows, .in_copy = rows >= tokens && args.d_kv.dtype != DType::f32};
    plan.bytes = bytes_of(args, rows, plan.in_copy);
    return plan;
  };
  const std::int64_t head_groups = (args.q.shape[1] + kHeads - 1) / kHeads;
  const std::int64_t most_rows = kMostTerms / 2 / head_groups;
  for (std::int64_t rows = most_rows; rows >= kLeastRows; rows /= 2) {
    const std::int64_t pieces = (tokens + rows - 1) / rows;
    const ExactPlan plan = plan_of((tokens + pieces - 1) / pieces);
    if (plan.bytes <= limit) return plan;
  }
  // The sums of a 16-bit d_kv need no rows of their own where all terms have quanta in common.
  const ExactPlan plan = plan_of(tokens);
  return tokens * head_groups <= kMostTerms && plan.bytes <= limit ? plan : ExactPlan{};
}

ExactSums begin_exact_sums(const SparseAttentionBackward& args, const ExactPlan& plan,
                           Workspace& workspace, cudaStream_t stream) {
  const std::int64_t heads = args.q.shape[1];
  const std::int64_t keys = args.kv.shape[0];
  ExactSums sums{};
  sums.in_copy = plan.in_copy;
  sums.total = begin_key_sums(args.d_kv, workspace, stream);
  sums.quanta_sums = {.data = sums.total.data,
                      .stride = args.kv.shape[1],
                      .keys = keys,
                      .dim = args.kv.shape[1],
                      .order = ColumnOrder::fragments};
  if (!plan.in_copy) sums.quanta_sums.data = workspace.take<float>(keys * args.kv.shape[1]);
  sums.quanta = workspace.take<float>(keys);
  sums.inverse_quanta = workspace.take<float>(keys);
  sums.bounds = workspace.take<unsigned long long>(keys * kBoundBins);
  const std::int64_t items = plan.rows * ((heads + kHeads - 1) / kHeads);
  sums.constants = workspace.take<HeadConstants>(items * kHeads);
  sums.sizes = workspace.take<float2>(items * kHeads);
  if (args.d_sink) sums.d_sink = workspace.take<float>(plan.rows * heads);
  return sums;
}

void bound_key_sums(const SparseAttentionBackward& piece, const ExactSums& sums,
                    cudaStream_t stream) {
  const KeySums& rows = sums.quanta_sums;
  cuda_check(cudaMemsetAsync(
      sums.bounds, 0, static_cast<std::size_t>(rows.keys) * kBoundBins * sizeof(*sums.bounds),
      stream));
  if (piece.q.dtype == DType::bf16) {
    launch_bounds<__nv_bfloat16>(piece, sums, stream);
  } else {
    launch_bounds<__half>(piece, sums, stream);
  }
  launch(quanta_kernel,
         {.blocks = blocks_for(rows.keys, kThreadsOfRows),
          .threads = kThreadsOfRows,
          .stream = stream},
         sums.bounds, rows.keys, sums.quanta, sums.inverse_quanta);
  if (!sums.in_copy) {
    cuda_check(cudaMemsetAsync(
        rows.data, 0, static_cast<std::size_t>(rows.keys * rows.dim) * sizeof(float), stream));
  }
}

void add_exact_sums(const ExactSums& sums, cudaStream_t stream) {
  if (sums.in_copy) return;
  scale_sums(sums, sums.total.data, sums.total.stride, stream);
}

void finish_exact_sums(const ExactSums& sums, const Tensor& d_kv, cudaStream_t stream) {
  if (!sums.in_copy) {
    finish_key_sums(sums.total, d_kv, stream);
  } else if (d_kv.dtype == DType::bf16) {
    scale_sums(sums, data_of<__nv_bfloat16>(d_kv), d_kv.stride[0], stream);
  } else {
    scale_sums(sums, data_of<__half>(d_kv), d_kv.stride[0], stream);
  }
}

}  // namespace winnow::cuda
