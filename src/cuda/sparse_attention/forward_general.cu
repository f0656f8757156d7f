// SPDX-License-Identifier: Apache-2.0
// Sparse attention, forward, for every shape in bf16 and f16, from compute capability 8.0 on.
//
// A block of 4 or 8 warps computes one query for a group of 16, 32 or 64 heads. It walks over the
// row's slots in tiles of 64 keys (32 or 16 where rows are wide):
// clang-format off
//   gather   8 lanes copy a row by cp.async; a slot without a key is zeros. With two stages the
//            next tile is in flight during the products of this one.
//   scores   A warp has 16 keys and 16 or 32 heads; Q and K are read from shared memory.
//   softmax  The four warps that share a row exchange its maximum through shared memory; P goes
//            there too, rounded to the type of the inputs.
//   values   A warp has all heads and every 4th or 8th block of 16 columns, in accumulators.
// clang-format on
// There are three barriers a tile: rows are there; maxima are there; P and the factors are there.
// Limits: the bandwidth of shared memory (3 to 4 cycles a product), then that of the gather.
#include <algorithm>
#include <cstdint>
#include <string>

#include "core/refusals.h"
#include "cuda/common/runtime.h"
#include "cuda/sparse_attention/forward_general/row.cuh"
#include "cuda/sparse_attention/kernels.h"

namespace winnow::cuda {
namespace {

using namespace sparse_attention::forward_general;

/// Minimum resident blocks per SM (`__launch_bounds__`): as many as leave each enough registers.
template <int kHeads, int kPairs>
constexpr int kMinBlocks = kHeads / 16 * kPairs > 8 ? 1
                           : kHeads > 16            ? 2
                           : kPairs > 4             ? 3
                                                    : 4;

template <class T, int kHeads, int kPairs>
__global__ void __launch_bounds__(kWarps<kHeads> * 32, kMinBlocks<kHeads, kPairs>)
    attend_kernel(const __grid_constant__ ForwardParameters parameters) {
  extern __shared__ __align__(16) unsigned char memory[];
  RowAttention<T, kHeads, kPairs> attention(parameters, memory);
  const std::int64_t items = parameters.tokens * parameters.head_groups;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    attention.run(item / parameters.head_groups,
                  static_cast<int>(item % parameters.head_groups) * kHeads);
  }
}

// ---- The launcher.

struct Tile {
  int heads = 0;
  int keys = 0;
  int stages = 0;
  std::size_t shared_bytes = 0;
};

std::size_t shared_bytes_of(int heads, int keys, int stages, int qk_dim) {
  const std::size_t fixed = heads == 64   ? sizeof(SharedStorage<__half, 64>)
                            : heads == 32 ? sizeof(SharedStorage<__half, 32>)
                                          : sizeof(SharedStorage<__half, 16>);
  return fixed +
         static_cast<std::size_t>(heads + stages * keys) * row_elements(qk_dim) * sizeof(__half);
}

/// The largest tile that fits, with two stages if possible. With 64 heads the registers suffice for
/// 512 columns of values.
Tile choose_tile(const SparseAttentionForward& args) {
  struct KeysAndStages {
    int keys, stages;
  };
  const auto heads = args.q.shape[1];
  const auto qk_dim = static_cast<int>(args.q.shape[2]);
  const auto limit = static_cast<std::size_t>(device_properties(args.q.device).shared_bytes);
  int rows = heads > 32 && args.out.shape[2] <= 512 ? 64 : heads > 16 ? 32 : 16;
  for (; rows >= 16; rows /= 2) {
    for (const auto [keys, stages] :
         {KeysAndStages{64, 2}, {32, 2}, {64, 1}, {32, 1}, {16, 2}, {16, 1}}) {
      const std::size_t bytes = shared_bytes_of(rows, keys, stages, qk_dim);
      if (bytes <= limit) return {rows, keys, stages, bytes};
    }
  }
  return {};
}

using Kernel = void (*)(ForwardParameters);

template <class T>
Kernel choose_kernel(const Tile& tile, std::int64_t v_dim) {
  const std::int64_t pairs = (v_dim + 15) / 16;
  if (tile.heads == 64) return pairs <= 16 ? attend_kernel<T, 64, 2> : attend_kernel<T, 64, 4>;
  if (tile.heads == 32) {
    if (pairs <= 16) return attend_kernel<T, 32, 2>;
    return pairs <= 32 ? attend_kernel<T, 32, 4> : attend_kernel<T, 32, 8>;
  }
  if (pairs <= 16) return attend_kernel<T, 16, 4>;
  return pairs <= 32 ? attend_kernel<T, 16, 8> : attend_kernel<T, 16, 16>;
}

/// Whether pairs of elements can be stored by one instruction.
bool has_aligned_pairs(const Tensor& tensor) {
  auto bits = reinterpret_cast<std::uintptr_t>(tensor.data) / 2;
  for (int i = 0; i < 2; ++i) {
    if (tensor.shape[i] > 1) bits |= static_cast<std::uintptr_t>(tensor.stride[i]);
  }
  return bits % 2 == 0;
}

std::string why_not(const SparseAttentionForward& args, const Execution&) {
  if (args.q.dtype != DType::bf16 && args.q.dtype != DType::f16)
    return sentence(refusal::takes_dtypes, "bf16 and f16");
  if (choose_tile(args).heads == 0) return refusal::too_little_shared;
  return {};
}

void run(const SparseAttentionForward& args, const Execution& execution) {
  const DeviceGuard guard(args.q.device);
  const Tile tile = choose_tile(args);
  ForwardParameters parameters = forward_parameters(args, tile.heads);
  parameters.tile_keys = tile.keys;
  parameters.stages = tile.stages;
  parameters.q_aligned = has_aligned_rows(args.q);
  parameters.kv_aligned = has_aligned_rows(args.kv);
  parameters.out_aligned = has_aligned_pairs(args.out);
  const Kernel kernel = args.q.dtype == DType::bf16
                            ? choose_kernel<__nv_bfloat16>(tile, args.out.shape[2])
                            : choose_kernel<__half>(tile, args.out.shape[2]);
  launch(kernel,
         {.blocks = std::min(parameters.tokens * parameters.head_groups, kMaxBlocks),
          .threads = tile.heads == 16 ? kWarps<16> * 32 : kWarps<64> * 32,
          .shared_bytes = tile.shared_bytes,
          .stream = execution.stream},
         parameters);
}

}  // namespace

const winnow::Kernel<SparseAttentionForward> forward_general = {"general", why_not, no_workspace,
                                                                run};

}  // namespace winnow::cuda
