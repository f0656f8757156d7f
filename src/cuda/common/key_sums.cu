// SPDX-License-Identifier: Apache-2.0
// Sums of key gradients: the order of columns, the final rounding, and deterministic sums by a
// stable sort of (key, term). The limit is the memory bandwidth: terms are written once and read
// once.
#include <algorithm>
#include <bit>

#include <cub/device/device_radix_sort.cuh>

#include "cuda/common/key_sums.cuh"
#include "cuda/common/mma.cuh"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostTerms = std::int64_t{1} << 22;  // of a piece
constexpr std::int64_t kLeastSlots = 64;
constexpr int kLaneVectors = 5;  // float4 of a lane at a time: a whole row of 576 or 512

// ---- The order of columns.

/// Puts every 16 columns of the rows into fragment order, or back, in place: in pairs, 2 x 4 are
/// transposed. A warp takes a row, four lanes 16 columns of it, so that accesses are coalesced.
template <bool kBack>
__global__ void __launch_bounds__(kThreads) reorder_kernel(KeySums sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int part = lane % 4;  // of the 16 columns, as they are stored
  const int from = kBack ? part % 2 * 8 + part / 2 * 2 : part * 2;
  constexpr int kToNext = kBack ? 4 : 8;
  const std::int64_t step = std::int64_t{gridDim.x} * (kThreads / 32);
  for (std::int64_t key = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
       key < sums.keys; key += step) {
    for (std::int64_t base = 0; base < sums.dim; base += 32 * 4) {
      const std::int64_t column = base + lane / 4 * 16;
      float* const columns = sums.data + key * sums.stride + column;
      float2 first{};
      float2 second{};
      if (column < sums.dim) {
        first = *reinterpret_cast<const float2*>(columns + from);
        second = *reinterpret_cast<const float2*>(columns + from + kToNext);
      }
      __syncwarp();  // All lanes have read.
      if (column < sums.dim) {
        *reinterpret_cast<float4*>(columns + part * 4) = {first.x, first.y, second.x, second.y};
      }
    }
  }
}

template <bool kBack>
void reorder(const KeySums& sums, cudaStream_t stream) {
  if (sums.order == ColumnOrder::natural || sums.keys == 0) return;
  launch(reorder_kernel<kBack>,
         {.blocks = blocks_for(sums.keys, kThreads / 32), .threads = kThreads, .stream = stream},
         sums);
}

// ---- Rounding.

/// Rounds the four columns that a lane has in fragment order, and swaps with the other lanes of its
/// quad: lane c has columns 2c, 2c + 1, 2c + 8 and 2c + 9 of 16, and gets 4c to 4c + 3.
template <class T>
__device__ uint2 columns_of_fragment(const float4& fragment) {
  const std::uint32_t low = pack<T>(fragment.x, fragment.y);
  const std::uint32_t high = pack<T>(fragment.z, fragment.w);
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  const int first = lane / 4 * 4 + lane % 2 * 2;  // the lane of the first of two pairs
  const bool is_low = lane % 4 < 2;
  const auto pair_of = [&](int from) {
    const std::uint32_t from_low = __shfl_sync(0xffffffffu, low, from);
    const std::uint32_t from_high = __shfl_sync(0xffffffffu, high, from);
    return is_low ? from_low : from_high;
  };
  return {pair_of(first), pair_of(first + 1)};
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    round_sums_kernel(KeySums sums, T* d_keys, std::int64_t stride) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < sums.keys * sums.dim;
       i += step) {
    const std::int64_t key = i / sums.dim;
    const std::int64_t d = i % sums.dim;
    d_keys[key * stride + d] = from_float<T>(sums.data[key * sums.stride + d]);
  }
}

/// Rounds rows in fragment order, which begin at 16-byte boundaries on both sides. A warp takes a
/// row; four lanes load 16 columns of it as they are stored, and swap pairs of them.
template <class T>
__global__ void __launch_bounds__(kThreads)
    round_fragments_kernel(KeySums sums, T* d_keys, std::int64_t stride) {
  wait_for_previous_grid();
  constexpr int kWarpColumns = 32 * 4;
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  const auto dim = static_cast<int>(sums.dim);
  const std::int64_t step = std::int64_t{gridDim.x} * (kThreads / 32);
  for (std::int64_t key = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
       key < sums.keys; key += step) {
    const float* const row = sums.data + key * sums.stride;
    for (int base = 4 * lane; base - 4 * lane < dim; base += kLaneVectors * kWarpColumns) {
      float4 fragments[kLaneVectors];
#pragma unroll
      for (int i = 0; i < kLaneVectors; ++i) {
        const int d = base + i * kWarpColumns;
        fragments[i] = d < dim ? __ldcs(reinterpret_cast<const float4*>(row + d)) : float4{};
      }
#pragma unroll
      for (int i = 0; i < kLaneVectors; ++i) {
        const int d = base + i * kWarpColumns;
        const uint2 columns = columns_of_fragment<T>(fragments[i]);
        if (d < dim) __stcs(reinterpret_cast<uint2*>(d_keys + key * stride + d), columns);
      }
    }
  }
}

template <class T>
void round_sums(const KeySums& sums, const Tensor& d_keys, cudaStream_t stream) {
  if (sums.order == ColumnOrder::fragments) {
    launch(round_fragments_kernel<T>,
           {.blocks = blocks_for(sums.keys, kThreads / 32),
            .threads = kThreads,
            .stream = stream,
            .pdl = true},
           sums, data_of<T>(d_keys), d_keys.stride[0]);
    return;
  }
  launch(
      round_sums_kernel<T>,
      {.blocks = blocks_for(sums.keys * sums.dim, kThreads), .threads = kThreads, .stream = stream},
      sums, data_of<T>(d_keys), d_keys.stride[0]);
}

// ---- Deterministic sums.

/// Lists the key of every slot; a slot without a key sorts after all keys.
__global__ void __launch_bounds__(kThreads)
    list_keys_kernel(const __grid_constant__ SlotLists slots, std::int64_t count,
                     std::uint32_t no_key, std::uint32_t* keys, std::uint32_t* terms) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const std::int32_t key = slots.row(i / slots.slots).key(i % slots.slots);
    keys[i] = key < 0 ? no_key : static_cast<std::uint32_t>(key);
    terms[i] = static_cast<std::uint32_t>(i);
  }
}

/// The first place from `place` on that holds another key, found by all lanes of a warp.
__device__ std::int64_t end_of_key(const std::uint32_t* __restrict__ keys, std::int64_t count,
                                   std::int64_t place, std::uint32_t key, int lane) {
  while (true) {
    const std::int64_t own = place + lane;
    const unsigned others = __ballot_sync(0xffffffffu, own >= count || keys[own] != key);
    if (others != 0) return place + __ffs(static_cast<int>(others)) - 1;
    place += 32;
  }
}

/// A warp adds the terms of the keys whose first term is in its 32 places.
__global__ void __launch_bounds__(kThreads)
    add_in_order_kernel(const std::uint32_t* __restrict__ keys,
                        const std::uint32_t* __restrict__ order, std::int64_t count,
                        std::uint32_t no_key, const float* __restrict__ terms, KeySums sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t base = std::int64_t{blockIdx.x} * kThreads + threadIdx.x / 32 * 32;
       base < count; base += step) {
    const std::int64_t own = base + lane;
    const bool begins =
        own < count && keys[own] != no_key && (own == 0 || keys[own - 1] != keys[own]);
    for (unsigned left = __ballot_sync(0xffffffffu, begins); left != 0; left &= left - 1) {
      const std::int64_t first = base + __ffs(static_cast<int>(left)) - 1;
      const std::uint32_t key = keys[first];
      const std::int64_t end = end_of_key(keys, count, first + 1, key, lane);
      float* const sum = sums.data + key * sums.stride;
      for (std::int64_t base_column = lane * 4; base_column < sums.dim;
           base_column += kLaneVectors * 32 * 4) {
        float4 totals[kLaneVectors];
        const auto each_column = [&](auto use) {
#pragma unroll
          for (int j = 0; j < kLaneVectors; ++j) {
            const std::int64_t d = base_column + j * 32 * 4;
            if (d < sums.dim) use(totals[j], d);
          }
        };
        each_column([&](float4& total, std::int64_t d) {
          total = {sum[d], sum[d + 1], sum[d + 2], sum[d + 3]};
        });
#pragma unroll 2
        for (std::int64_t i = first; i < end; ++i) {
          const float* const term = terms + order[i] * sums.dim;
          each_column([&](float4& total, std::int64_t d) {
            const float4 x = __ldcs(reinterpret_cast<const float4*>(term + d));
            total.x += x.x;
            total.y += x.y;
            total.z += x.z;
            total.w += x.w;
          });
        }
        each_column([&](const float4& total, std::int64_t d) {
          sum[d] = total.x;
          sum[d + 1] = total.y;
          sum[d + 2] = total.z;
          sum[d + 3] = total.w;
        });
      }
    }
  }
}

/// Bits of the sort's keys: all rows, and one value after them for slots without a key.
int key_bits(std::int64_t keys) {
  return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(keys)));
}

std::size_t sort_bytes(std::int64_t terms, std::int64_t keys) {
  std::size_t bytes = 0;
  const std::uint32_t* const from = nullptr;
  std::uint32_t* const to = nullptr;
  cuda_check(cub::DeviceRadixSort::SortPairs(nullptr, bytes, from, to, from, to,
                                             static_cast<int>(terms), 0, key_bits(keys)));
  return bytes;
}

/// Bytes of one of the four arrays of the sort.
std::size_t array_bytes(std::int64_t terms) {
  const std::size_t bytes = static_cast<std::size_t>(terms) * sizeof(std::uint32_t);
  return (bytes + Workspace::kAlignment - 1) / Workspace::kAlignment * Workspace::kAlignment;
}

TermPlan plan_pieces(std::int64_t rows, std::int64_t slots, std::int64_t keys, std::int64_t dim) {
  const std::int64_t terms = rows * slots;
  return {.rows = rows,
          .slots = slots,
          .term_bytes = static_cast<std::size_t>(terms * dim) * sizeof(float),
          .order_bytes = 4 * array_bytes(terms) + sort_bytes(terms, keys)};
}

}  // namespace

std::size_t key_copy_bytes(const Tensor& d_keys) {
  if (d_keys.dtype == DType::f32) return 0;
  return static_cast<std::size_t>(d_keys.shape[0] * d_keys.shape[1]) * sizeof(float);
}

KeySums begin_key_sums(const Tensor& d_keys, Workspace& workspace, cudaStream_t stream,
                       ColumnOrder order) {
  KeySums sums{.data = nullptr,
               .stride = d_keys.stride[0],
               .keys = d_keys.shape[0],
               .dim = d_keys.shape[1],
               .order = order};
  if (d_keys.dtype == DType::f32) {
    sums.data = data_of<float>(d_keys);
    reorder<false>(sums, stream);
  } else if (key_copy_bytes(d_keys) > 0) {
    sums.data = workspace.take<float>(sums.keys * sums.dim);
    sums.stride = sums.dim;
    cuda_check(cudaMemsetAsync(sums.data, 0, key_copy_bytes(d_keys), stream));
  }
  return sums;
}

void finish_key_sums(const KeySums& sums, const Tensor& d_keys, cudaStream_t stream) {
  if (d_keys.dtype == DType::f32) reorder<true>(sums, stream);
  if (d_keys.dtype == DType::bf16) round_sums<__nv_bfloat16>(sums, d_keys, stream);
  if (d_keys.dtype == DType::f16) round_sums<__half>(sums, d_keys, stream);
}

TermPlan plan_terms(std::int64_t tokens, std::int64_t slots, std::int64_t keys, std::int64_t dim,
                    std::size_t limit) {
  const TermPlan least = plan_pieces(1, std::min(slots, kLeastSlots), keys, dim);
  const std::size_t each =
      static_cast<std::size_t>(dim) * sizeof(float) + 4 * sizeof(std::uint32_t);
  std::int64_t most = kMostTerms;  // terms of a piece
  most = std::min(most, std::max<std::int64_t>(tokens, 1) * slots);
  most = static_cast<std::int64_t>(std::min(static_cast<std::size_t>(most), limit / each));
  if (most <= least.slots) return least;
  const std::size_t beside = sort_bytes(most, keys) + 6 * Workspace::kAlignment;
  if (limit <= beside) return least;
  most =
      static_cast<std::int64_t>(std::min(static_cast<std::size_t>(most), (limit - beside) / each));
  if (most <= least.slots) return least;
  const TermPlan plan =
      most >= slots
          ? plan_pieces(std::min(most / slots, std::max<std::int64_t>(tokens, 1)), slots, keys, dim)
          : plan_pieces(1, most / kLeastSlots * kLeastSlots, keys, dim);
  const bool fits = plan.term_bytes + plan.order_bytes + 2 * Workspace::kAlignment <= limit;
  return fits ? plan : least;
}

KeySumPlan plan_key_sums(const Tensor& indices, const Tensor& keys, const Tensor& d_keys,
                         const Execution& execution) {
  TermPlan terms;
  if (execution.deterministic) {
    const DeviceGuard guard(keys.device);
    const std::size_t aside = std::min(execution.workspace_limit, 2 * Workspace::kAlignment);
    terms = plan_terms(indices.shape[0], indices.shape[1], keys.shape[0], keys.shape[1],
                       execution.workspace_limit - aside);
  }
  return {terms, Workspace::bytes({key_copy_bytes(d_keys), terms.term_bytes, terms.order_bytes})};
}

TermMemory take_terms(const TermPlan& plan, Workspace& workspace) {
  if (plan.rows == 0) return {};
  TermMemory memory;
  memory.terms = workspace.take<float>(static_cast<std::int64_t>(plan.term_bytes / sizeof(float)));
  memory.order = workspace.take<std::byte>(static_cast<std::int64_t>(plan.order_bytes));
  return memory;
}

void add_in_order(const TermPlan& plan, const TermMemory& memory, const SlotLists& slots,
                  std::int64_t rows, const KeySums& sums, cudaStream_t stream) {
  const std::int64_t count = rows * slots.slots;
  if (count == 0 || sums.keys == 0) return;
  const std::size_t array = array_bytes(plan.rows * plan.slots);
  const auto array_at = [&](std::size_t i) {
    return reinterpret_cast<std::uint32_t*>(memory.order + i * array);
  };
  std::uint32_t* const listed_keys = array_at(0);
  std::uint32_t* const keys = array_at(1);
  std::uint32_t* const listed_terms = array_at(2);
  std::uint32_t* const order = array_at(3);
  const auto no_key = static_cast<std::uint32_t>(sums.keys);
  launch(list_keys_kernel,
         {.blocks = blocks_for(count, kThreads), .threads = kThreads, .stream = stream}, slots,
         count, no_key, listed_keys, listed_terms);
  std::size_t bytes = plan.order_bytes - 4 * array;
  cuda_check(cub::DeviceRadixSort::SortPairs(
      memory.order + 4 * array, bytes, static_cast<const std::uint32_t*>(listed_keys), keys,
      static_cast<const std::uint32_t*>(listed_terms), order, static_cast<int>(count), 0,
      key_bits(sums.keys), stream));
  launch(add_in_order_kernel,
         {.blocks = blocks_for(count, kThreads), .threads = kThreads, .stream = stream},
         static_cast<const std::uint32_t*>(keys), static_cast<const std::uint32_t*>(order), count,
         no_key, static_cast<const float*>(memory.terms), sums);
}

}  // namespace winnow::cuda
