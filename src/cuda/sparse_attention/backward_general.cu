// SPDX-License-Identifier: Apache-2.0
// Sparse attention, backward, for every shape in bf16, f16 and f32, from compute capability 8.0 on,
// and deterministically where that is asked for.
//
// By default one launch computes all gradients (backward_general/tile.cuh, many_heads.cuh, or
// wide.cuh where a GPU has too little shared memory for the first). A deterministic call
// makes three kinds of launches: d_q; d_sink, a block a head; and piece by piece the terms of
// slots, which common/key_sums.cu adds to d_kv. The scores are then computed twice, but a piece
// need not hold whole rows.
#include <algorithm>
#include <cstdint>

#include "core/refusals.h"
#include "cuda/common/block_reduce.cuh"
#include "cuda/common/key_sums.cuh"
#include "cuda/common/runtime.h"
#include "cuda/sparse_attention/backward_general/many_heads.h"
#include "cuda/sparse_attention/backward_general/tile.cuh"
#include "cuda/sparse_attention/backward_general/wide.cuh"
#include "cuda/sparse_attention/kernels.h"

namespace winnow::cuda {
namespace {

// ---- The deterministic gradient of the sink.

constexpr int kSinkThreads = 1024;
constexpr int kSinkWarps = kSinkThreads / 32;

/// Sums d_sink over all rows: a block has one head, a warp every 32nd row.
template <class T>
__global__ void __launch_bounds__(kSinkThreads)
    sum_d_sink_kernel(const __grid_constant__ BackwardParameters parameters) {
  __shared__ float reduction[kSinkWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t h = blockIdx.x; h < parameters.heads; h += gridDim.x) {
    float sum = 0;
    for (std::int64_t t = threadIdx.x / 32; t < parameters.rows; t += kSinkWarps) {
      if (!sparse_attention::backward_general::has_keys(parameters.slots.row(t), lane)) continue;
      sum += sparse_attention::backward_general::constants_of_head<T>(parameters, t, h).d_sink;
    }
    const float total = reduce_block<kSinkThreads>(lane == 0 ? sum : 0, reduction,
                                                   [](float a, float b) { return a + b; });
    if (threadIdx.x == 0) parameters.d_sink[h] += total;
  }
}

// ---- The launchers.

struct Tile {
  int heads = 0;
  int keys = 0;
  int stages = 0;
  std::size_t shared_bytes = 0;
  int threads = 0;
  void (*kernel)(BackwardParameters) = nullptr;  // null: that of choose_kernel
};

template <class T>
std::size_t shared_bytes_of(const Tile& tile, int qk_dim, int v_dim) {
  using namespace sparse_attention::backward_general;
  const std::size_t fixed = tile.heads == 64   ? sizeof(SharedStorage<T, 64, 64>)
                            : tile.heads == 32 ? sizeof(SharedStorage<T, 32, 64>)
                                               : sizeof(SharedStorage<T, 16, 64>);
  const int elements = tile.heads * (row_elements<T>(qk_dim) + v_row_elements<T>(v_dim)) +
                       tile.stages * tile.keys * row_elements<T>(qk_dim);
  return fixed + static_cast<std::size_t>(elements) * sizeof(T);
}

/// The tile with the most heads that fit, up to those for which a kernel has registers; where none
/// fits, eight heads without a tile of keys. It does not depend on the number of rows or keys.
template <class T>
Tile choose_tile(const SparseAttentionBackward& args) {
  const std::int64_t heads = args.q.shape[1];
  const auto qk_dim = static_cast<int>(args.q.shape[2]);
  const auto v_dim = static_cast<int>(args.out.shape[2]);
  const auto limit = static_cast<std::size_t>(device_properties(args.q.device).shared_bytes);
  const auto with_bytes = [&](Tile tile) {
    tile.shared_bytes = shared_bytes_of<T>(tile, qk_dim, v_dim);
    tile.threads = sparse_attention::backward_general::kThreads<64>;
    if (tile.heads == 16) tile.threads = sparse_attention::backward_general::kThreads<16>;
    return tile;
  };
  if constexpr (sizeof(T) == 2) {
    if (heads > 32) {
      const auto many = sparse_attention::backward_general::many_heads<T>(qk_dim, v_dim, limit);
      if (many.kernel != nullptr) {
        return {many.heads, many.keys, many.stages, many.shared_bytes, many.threads, many.kernel};
      }
    }
  }
  int most_heads = 16;
  if (sizeof(T) == 2 && heads > 16) most_heads = heads > 32 && qk_dim <= 512 ? 64 : 32;
  for (int rows = most_heads; rows >= 16; rows /= 2) {
    // A second stage is worth less than another resident block on the SM.
    const std::size_t most_blocks = rows > 16 ? 2 : qk_dim > 128 ? 3 : 4;
    const auto blocks = [&](const Tile& tile) {
      return std::min(limit / tile.shared_bytes, most_blocks);
    };
    const Tile one = with_bytes({rows, 64, 1});
    const Tile two = with_bytes({rows, 64, 2});
    const Tile less = with_bytes({rows, 48, 1});
    if (rows == 16 && blocks(less) > blocks(one)) return less;
    if (blocks(two) > 0 && blocks(two) == blocks(one)) return two;
    if (blocks(one) > 0) return one;
    const Tile narrow = with_bytes({rows, 32, 1});
    if (blocks(narrow) > 0) return narrow;
  }
  const Tile narrowest = with_bytes({16, 16, 1});
  if (narrowest.shared_bytes <= limit) return narrowest;
  using namespace sparse_attention::backward_general;
  return {.heads = kWideHeads,
          .keys = 16,  // a split has 64 or more
          .shared_bytes = kWideHeads * qk_dim * sizeof(float),
          .threads = kWideThreads,
          .kernel = sparse_attention_backward_wide_kernel<T>};
}

using Kernel = void (*)(BackwardParameters);

template <class T>
Kernel choose_kernel(const Tile& tile, int qk_dim) {
  using namespace sparse_attention::backward_general;
  if (tile.kernel != nullptr) return tile.kernel;
  const int pairs = (qk_dim + 15) / 16;  // of all warps
  if constexpr (sizeof(T) == 2) {
    if (tile.heads == 64) {
      if (pairs <= 8) return sparse_attention_backward_general_kernel<T, 64, 1>;
      return pairs <= 16 ? sparse_attention_backward_general_kernel<T, 64, 2>
                         : sparse_attention_backward_general_kernel<T, 64, 4>;
    }
    if (tile.heads == 32) {
      if (pairs <= 16) return sparse_attention_backward_general_kernel<T, 32, 2>;
      return pairs <= 32 ? sparse_attention_backward_general_kernel<T, 32, 4>
                         : sparse_attention_backward_general_kernel<T, 32, 8>;
    }
  }
  if (pairs <= 8) return sparse_attention_backward_general_kernel<T, 16, 2>;
  if (pairs <= 16) return sparse_attention_backward_general_kernel<T, 16, 4>;
  return pairs <= 32 ? sparse_attention_backward_general_kernel<T, 16, 8>
                     : sparse_attention_backward_general_kernel<T, 16, 16>;
}

/// The parameters for all rows and heads, with no gradient asked for yet.
BackwardParameters parameters_of(const SparseAttentionBackward& args, const Tile& tile) {
  const std::int64_t heads = args.q.shape[1];
  return {.q = args.q.data,
          .kv = args.kv.data,
          .out = args.out.data,
          .d_out = args.d_out.data,
          .sink = data_of<const float>(args.sink),
          .lse = data_of<const float>(args.lse),
          .d_lse = data_of<const float>(args.d_lse),
          .d_q = nullptr,
          .d_kv = nullptr,
          .d_sink = nullptr,
          .q_token_stride = args.q.stride[0],
          .q_head_stride = args.q.stride[1],
          .kv_stride = args.kv.stride[0],
          .out_token_stride = args.out.stride[0],
          .out_head_stride = args.out.stride[1],
          .d_out_token_stride = args.d_out.stride[0],
          .d_out_head_stride = args.d_out.stride[1],
          .lse_stride = args.lse.stride[0],
          .d_lse_stride = args.d_lse.stride[0],
          .d_q_token_stride = args.d_q.stride[0],
          .d_q_head_stride = args.d_q.stride[1],
          .d_kv_stride = 0,
          .slots = {.indices = data_of<const std::int32_t>(args.indices),
                    .lengths = data_of<const std::int32_t>(args.lengths),
                    .indices_stride = args.indices.stride[0],
                    .slots = args.indices.shape[1],
                    .keys = args.kv.shape[0]},
          .first_row = 0,
          .rows = args.q.shape[0],
          .first_head = 0,
          .groups = (heads + tile.heads - 1) / tile.heads,
          .splits = 1,
          .heads = heads,
          .qk_dim = static_cast<std::int32_t>(args.q.shape[2]),
          .v_dim = static_cast<std::int32_t>(args.out.shape[2]),
          .tile_keys = tile.keys,
          .stages = tile.stages,
          .key_gradient = KeyGradient::none,
          .q_aligned = has_aligned_rows(args.q),
          .kv_aligned = has_aligned_rows(args.kv),
          .out_aligned = has_aligned_rows(args.out),
          .d_out_aligned = has_aligned_rows(args.d_out),
          .d_q_aligned = has_aligned_rows(args.d_q),
          .d_kv_aligned = true,
          .scale = args.scale};
}

template <class T>
void launch_gradients(const BackwardParameters& parameters, const Tile& tile, cudaStream_t stream) {
  // One launch, but for more blocks than it may have.
  const std::int64_t row_blocks = parameters.groups * parameters.splits;
  const std::int64_t most_rows = kMaxBlocks / row_blocks;
  for (std::int64_t row = 0; row < parameters.rows; row += most_rows) {
    BackwardParameters part = parameters;
    part.first_row += row;
    part.rows = std::min(most_rows, parameters.rows - row);
    part.slots = parameters.slots.part(row, 0, parameters.slots.slots);
    if (parameters.key_gradient != KeyGradient::added && row > 0) {
      part.d_kv += row * parameters.slots.slots * parameters.d_kv_stride;
    }
    launch(choose_kernel<T>(tile, parameters.qk_dim),
           {.blocks = part.rows * row_blocks,
            .threads = tile.threads,
            .shared_bytes = tile.shared_bytes,
            .stream = stream},
           part);
  }
}

/// Computes all gradients in one launch, with atomics.
template <class T>
void add_gradients(const SparseAttentionBackward& args, const Tile& tile, const KeySums& d_kv,
                   cudaStream_t stream) {
  BackwardParameters parameters = parameters_of(args, tile);
  parameters.d_q = args.d_q.data;
  parameters.d_sink = data_of<float>(args.d_sink);
  parameters.d_kv = d_kv.data;
  parameters.d_kv_stride = d_kv.stride;
  parameters.d_kv_aligned =
      reinterpret_cast<std::uintptr_t>(d_kv.data) % sizeof(float4) == 0 && d_kv.stride % 4 == 0;
  parameters.key_gradient = KeyGradient::added;
  launch_gradients<T>(parameters, tile, stream);
}

template <class T>
void add_gradients_in_order(const SparseAttentionBackward& args, const Tile& tile,
                            const KeySums& d_kv, const TermPlan& plan, const TermMemory& memory,
                            cudaStream_t stream) {
  BackwardParameters parameters = parameters_of(args, tile);
  parameters.d_q = args.d_q.data;
  launch_gradients<T>(parameters, tile, stream);
  parameters.d_q = nullptr;
  if (args.d_sink && parameters.rows > 0) {
    parameters.d_sink = data_of<float>(args.d_sink);
    launch(sum_d_sink_kernel<T>,
           {.blocks = std::min(parameters.heads, kMaxBlocks),
            .threads = kSinkThreads,
            .stream = stream},
           parameters);
    parameters.d_sink = nullptr;
  }

  // Enough blocks for all SMs, each with some tiles.
  const std::int64_t wanted = 4 * device_properties(args.q.device).multiprocessors;
  const SlotLists slots = parameters.slots;
  const std::int64_t tokens = parameters.rows;
  parameters.d_kv = memory.terms;
  parameters.d_kv_stride = d_kv.dim;
  parameters.groups = 1;
  for (std::int64_t row = 0; row < tokens; row += plan.rows) {
    parameters.first_row = row;
    parameters.rows = std::min(plan.rows, tokens - row);
    for (std::int64_t slot = 0; slot < slots.slots; slot += plan.slots) {
      parameters.slots = slots.part(row, slot, std::min(plan.slots, slots.slots - slot));
      const std::int64_t most_splits = parameters.slots.slots / (4 * tile.keys);
      parameters.splits = static_cast<std::int32_t>(std::clamp<std::int64_t>(
          wanted / parameters.rows, 1, std::max<std::int64_t>(most_splits, 1)));
      for (std::int64_t h = 0; h < parameters.heads; h += tile.heads) {
        parameters.first_head = h;
        parameters.key_gradient = h == 0 ? KeyGradient::stored : KeyGradient::stored_too;
        launch_gradients<T>(parameters, tile, stream);
      }
      add_in_order(plan, memory, parameters.slots, parameters.rows, d_kv, stream);
    }
  }
}

KeySumPlan plan_of(const SparseAttentionBackward& args, const Execution& execution) {
  return plan_key_sums(args.indices, args.kv, args.d_kv, execution);
}

template <class T>
void run_for(const SparseAttentionBackward& args, const Execution& execution) {
  const KeySumPlan plan = plan_of(args, execution);
  const Tile tile = choose_tile<T>(args);
  Workspace workspace(execution, plan.bytes);
  const KeySums d_kv = begin_key_sums(args.d_kv, workspace, execution.stream);
  if (execution.deterministic) {
    const TermMemory memory = take_terms(plan.terms, workspace);
    add_gradients_in_order<T>(args, tile, d_kv, plan.terms, memory, execution.stream);
  } else {
    add_gradients<T>(args, tile, d_kv, execution.stream);
  }
  finish_key_sums(d_kv, args.d_kv, execution.stream);
}

std::size_t workspace_bytes(const SparseAttentionBackward& args, const Execution& execution) {
  return plan_of(args, execution).bytes;
}

std::string why_not(const SparseAttentionBackward& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  return over_limit(plan_of(args, execution).bytes - key_copy_bytes(args.d_kv), execution);
}

void run(const SparseAttentionBackward& args, const Execution& execution) {
  const DeviceGuard guard(args.q.device);
  if (args.q.dtype == DType::bf16) return run_for<__nv_bfloat16>(args, execution);
  if (args.q.dtype == DType::f16) return run_for<__half>(args, execution);
  run_for<float>(args, execution);
}

}  // namespace

const winnow::Kernel<SparseAttentionBackward> backward_general = {"general", why_not,
                                                                  workspace_bytes, run};

}  // namespace winnow::cuda
