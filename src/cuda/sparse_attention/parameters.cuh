// SPDX-License-Identifier: Apache-2.0
// What the kernels of sparse attention are given: tensors with their shapes, strides in elements.
#pragma once

#include <cstdint>

#include "core/logit_scale.h"
#include "cuda/common/key_sums.cuh"
#include "cuda/common/row_slots.cuh"
#include "cuda/common/runtime.h"
#include "cuda/common/softmax.cuh"
#include "winnow/sparse_attention.h"

namespace winnow::cuda {

/// The parameters of every forward kernel. A work item is one query row and one group of its heads;
/// how many heads a group has is the kernel's choice.
struct ForwardParameters {
  const void* q;                // [tokens, heads, qk_dim]
  const void* kv;               // [keys, qk_dim]
  const std::int32_t* indices;  // [tokens, topk]
  const std::int32_t* lengths;  // [tokens], or null: all slots count
  const float* sink;            // [heads], or null
  void* out;                    // [tokens, heads, v_dim]
  float* lse;                   // [tokens, heads]
  float* max_logits;            // [tokens, heads], or null
  std::int64_t q_token_stride, q_head_stride;
  std::int64_t kv_stride;
  std::int64_t indices_stride;
  std::int64_t out_token_stride, out_head_stride;
  std::int64_t lse_stride;
  std::int64_t max_logits_stride;
  std::int32_t heads, keys, topk;
  std::int32_t head_groups;
  std::int32_t items;  // tokens * head_groups; an out of more than 2^31 would pass a terabyte
  float power, rest;   // scale = power * rest
  float rest_log2;     // rest * log2(e)
  float scale_log2;    // scale * log2(e)
  std::int64_t tokens;
  std::int32_t qk_dim, v_dim;
  std::int32_t tile_keys, stages;  // of the kernels that choose their tile by the device
  bool q_aligned, kv_aligned;      // rows begin at 16-byte boundaries
  bool out_aligned;                // pairs of elements begin at 4-byte boundaries
};

/// `group_heads`: heads of a work item. Tile and alignment are left for the kernels that use them.
inline ForwardParameters forward_parameters(const SparseAttentionForward& args, int group_heads) {
  const std::int64_t heads = args.q.shape[1];
  const std::int64_t head_groups = (heads + group_heads - 1) / group_heads;
  const LogitScale scale(args.scale);
  return {.q = args.q.data,
          .kv = args.kv.data,
          .indices = data_of<const std::int32_t>(args.indices),
          .lengths = data_of<const std::int32_t>(args.lengths),
          .sink = data_of<const float>(args.sink),
          .out = args.out.data,
          .lse = data_of<float>(args.lse),
          .max_logits = data_of<float>(args.max_logits),
          .q_token_stride = args.q.stride[0],
          .q_head_stride = args.q.stride[1],
          .kv_stride = args.kv.stride[0],
          .indices_stride = args.indices.stride[0],
          .out_token_stride = args.out.stride[0],
          .out_head_stride = args.out.stride[1],
          .lse_stride = args.lse.stride[0],
          .max_logits_stride = args.max_logits.stride[0],
          .heads = static_cast<std::int32_t>(heads),
          .keys = static_cast<std::int32_t>(args.kv.shape[0]),
          .topk = static_cast<std::int32_t>(args.indices.shape[1]),
          .head_groups = static_cast<std::int32_t>(head_groups),
          .items = static_cast<std::int32_t>(args.q.shape[0] * head_groups),
          .power = scale.power,
          .rest = scale.rest,
          .rest_log2 = static_cast<float>(scale.rest * double{kLog2E}),
          .scale_log2 = static_cast<float>(args.scale * double{kLog2E}),
          .tokens = args.q.shape[0],
          .qk_dim = static_cast<std::int32_t>(args.q.shape[2]),
          .v_dim = static_cast<std::int32_t>(args.out.shape[2]),
          .tile_keys = 0,
          .stages = 0,
          .q_aligned = false,
          .kv_aligned = false,
          .out_aligned = false};
}

/// The parameters of the general backward kernel, for all rows and heads or for a piece of them.
struct BackwardParameters {
  const void* q;       // [tokens, heads, qk_dim]
  const void* kv;      // [keys, qk_dim]
  const void* out;     // [tokens, heads, v_dim]
  const void* d_out;   // [tokens, heads, v_dim]
  const float* sink;   // [heads], or null
  const float* lse;    // [tokens, heads]
  const float* d_lse;  // [tokens, heads], or null
  void* d_q;           // [tokens, heads, qk_dim], or null: not made by this launch
  float* d_kv;         // [keys, qk_dim], or terms [rows, slots, qk_dim]
  float* d_sink;       // [heads], or null: not made by this launch
  std::int64_t q_token_stride, q_head_stride;
  std::int64_t kv_stride;
  std::int64_t out_token_stride, out_head_stride;
  std::int64_t d_out_token_stride, d_out_head_stride;
  std::int64_t lse_stride, d_lse_stride;
  std::int64_t d_q_token_stride, d_q_head_stride;
  std::int64_t d_kv_stride;
  SlotLists slots;          // of the rows from first_row on
  std::int64_t first_row;   // of the launch
  std::int64_t rows;        // of the launch
  std::int64_t first_head;  // of the launch
  std::int64_t groups;      // of heads, in the launch
  std::int32_t splits;      // parts of a row's slots, one a block; 1 where there is a d_q
  std::int64_t heads;
  std::int32_t qk_dim, v_dim;
  std::int32_t tile_keys, stages;
  KeyGradient key_gradient;
  bool q_aligned, kv_aligned;       // rows begin at 16-byte boundaries
  bool out_aligned, d_out_aligned;  // likewise
  bool d_q_aligned, d_kv_aligned;   // likewise
  float scale;
};

namespace sparse_attention::backward_sm90 {
struct HeadConstants;
}

/// What the thread blocks of Hopper's backward tell each other; words are zero at a launch.
struct BackwardExchange {
  unsigned* progress = nullptr;  // of all blocks; null: none keeps pace (backward_sm90/pacing.cuh)
  // Where items are split (backward_sm90/pieces.cuh):
  int parts = 0;                       // of each item of the last round, or 0
  int team_blocks = 0;                 // that share as many items and one more, or 0
  float* sums = nullptr;               // [split items, 64, qk_dim]
  unsigned* words = nullptr;           // [split items, kCarriedWords]
  unsigned* started_blocks = nullptr;  // how many have a number
};

/// The parameters of Hopper's backward kernel, beside the tensor maps of q, out and d_out. Sizes
/// are 32-bit numbers here: tensors with more rows would pass a terabyte.
template <class T>
struct BackwardSm90Parameters {
  const T* kv;                  // [keys, qk_dim]
  const T* out;                 // [tokens, heads, v_dim]
  const T* d_out;               // [tokens, heads, v_dim]
  const std::int32_t* indices;  // [tokens, topk]
  const std::int32_t* lengths;  // [tokens], or null: all slots count
  const float* sink;            // [heads], or null
  const float* lse;             // [tokens, heads]
  const float* d_lse;           // [tokens, heads], or null
  T* d_q;                       // [tokens, heads, qk_dim]
  float* d_kv;                  // [keys, qk_dim], or terms [tokens, topk, qk_dim]
  float* d_sink;                // [heads], or [tokens, heads] where sums are deterministic, or null
  BackwardExchange exchange;
  int lead;      // the most blocks of keys that a thread block in pace may be ahead
  bool fits_l2;  // keys and their gradients together
  // Where sums are exact (exact_sums_sm90.h):
  const float* inverse_quanta;                                      // [keys]
  const sparse_attention::backward_sm90::HeadConstants* constants;  // [items, 64]
  std::int64_t kv_stride, out_token_stride, out_head_stride, d_out_token_stride, d_out_head_stride,
      indices_stride, lse_stride, d_lse_stride;
  std::int64_t d_q_token_stride, d_q_head_stride, d_kv_stride, d_sink_stride;
  int heads, keys, topk, head_groups, items;
  float scale, scale_log2;
};

/// `group_heads`: heads of a work item. Where the sums go is left for the launch.
template <class T>
BackwardSm90Parameters<T> backward_sm90_parameters(const SparseAttentionBackward& args,
                                                   int group_heads) {
  const auto heads = static_cast<int>(args.q.shape[1]);
  const int head_groups = (heads + group_heads - 1) / group_heads;
  return {.kv = data_of<const T>(args.kv),
          .out = data_of<const T>(args.out),
          .d_out = data_of<const T>(args.d_out),
          .indices = data_of<const std::int32_t>(args.indices),
          .lengths = data_of<const std::int32_t>(args.lengths),
          .sink = data_of<const float>(args.sink),
          .lse = data_of<const float>(args.lse),
          .d_lse = data_of<const float>(args.d_lse),
          .d_q = data_of<T>(args.d_q),
          .d_kv = nullptr,
          .d_sink = nullptr,
          .exchange = {},
          .lead = 0,
          .fits_l2 = false,
          .inverse_quanta = nullptr,
          .constants = nullptr,
          .kv_stride = args.kv.stride[0],
          .out_token_stride = args.out.stride[0],
          .out_head_stride = args.out.stride[1],
          .d_out_token_stride = args.d_out.stride[0],
          .d_out_head_stride = args.d_out.stride[1],
          .indices_stride = args.indices.stride[0],
          .lse_stride = args.lse.stride[0],
          .d_lse_stride = args.d_lse ? args.d_lse.stride[0] : 0,
          .d_q_token_stride = args.d_q.stride[0],
          .d_q_head_stride = args.d_q.stride[1],
          .d_kv_stride = 0,
          .d_sink_stride = 0,
          .heads = heads,
          .keys = static_cast<int>(args.kv.shape[0]),
          .topk = static_cast<int>(args.indices.shape[1]),
          .head_groups = head_groups,
          .items = static_cast<int>(args.q.shape[0] * head_groups),
          .scale = args.scale,
          .scale_log2 = args.scale * kLog2E};
}

/// The slots of a row that may hold a key. `params` are those of a forward or backward kernel.
template <class Parameters>
__device__ int slots_of_row(const Parameters& params, std::int64_t t) {
  if (params.lengths == nullptr) return params.topk;
  return max(min(__ldg(params.lengths + t), params.topk), 0);
}

}  // namespace winnow::cuda
