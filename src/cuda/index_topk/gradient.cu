// SPDX-License-Identifier: Apache-2.0
// The gradients of the indexer's scores, for every shape and type; and the choice between this
// kernel and Hopper's.
//
// A block has one query row, up to 64 of its heads and 128 of its columns, and walks over the row's
// slots in tiles of 64 keys (common/head_products.cuh):
// clang-format off
//   products   a = q . k of keys and heads. From it d_weights in fp32, and two matrices of keys x
//              heads in shared memory: d_score where a > 0, weight where a > 0.
//   gradients  64 columns of keys and heads are loaded again. d_q += d_scores^T k stays in
//              registers; weights q, times each key's d_score, goes to d_k: by atomics, or as a
//              term that is summed deterministically later (common/key_sums.cuh).
// clang-format on
// More heads and columns take more passes. Powers of two are factored out of both matrices, so that
// their elements are around 1 in f16 too. A tile with a product that is not finite is summed term
// by term, because terms that a > 0 excludes must not enter as 0 * inf. Shared memory: 53 to 74
// KiB, three or four blocks per SM. Limits: L2 (every row is read twice, and the atomics), then
// shared memory.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "cuda/index_topk/gradient.cuh"
#include "cuda/index_topk/row_gradient.cuh"

namespace winnow::cuda {
namespace {

using namespace row_gradient;

/// Minimum resident blocks per SM. Four leave 128 registers a thread, too few for 64 heads and for
/// the scales of f16, and too little shared memory for f32.
template <class T, int kHeads>
constexpr int kResidentBlocks = std::is_same_v<T, __nv_bfloat16>&& kHeads < 64 ? 4 : 3;

template <class T, int kHeads>
__global__ void __launch_bounds__(kHeadThreads, kResidentBlocks<T, kHeads>)
    index_gradient_kernel(const __grid_constant__ GradientParameters parameters) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedStorage<T, kHeads>*>(memory);
  for (std::int64_t item = blockIdx.x; item < parameters.operands.tokens; item += gridDim.x) {
    const std::int64_t t = parameters.operands.tokens - 1 - item;  // long windows come last
    const RowSlots slots = parameters.operands.slots.row(t);
    RowGradient<T, kHeads> row(parameters, slots, t, shared);
    row.run();
    __syncthreads();  // the next row's weights and stages overwrite this one's
  }
}

// ---- The launchers.

/// Whether elements that begin at a multiple of `count` in their row are aligned to `count` of
/// them.
bool are_aligned(const void* data, std::initializer_list<std::int64_t> strides, int count,
                 std::size_t element) {
  bool aligned = reinterpret_cast<std::uintptr_t>(data) % (count * element) == 0;
  for (const std::int64_t stride : strides) aligned = aligned && stride % count == 0;
  return aligned;
}

/// Which of the gradients all passes over heads and columns make.
struct Wanted {
  bool query;
  KeyGradient key;  // of the first heads
};

void launch_passes(const IndexGradient& call, const Wanted& wanted, cudaStream_t stream) {
  for_each_pass(
      call.q, call.k, call.slots,
      [&]<class T, int kHeads>(const HeadOperands& operands, std::int64_t first_head) {
        T* const d_q =
            wanted.query ? data_of<T>(call.d_q) + first_head * call.d_q.stride[1] : nullptr;
        KeyGradient key_gradient = wanted.key;
        if (key_gradient == KeyGradient::stored && first_head > 0) {
          key_gradient = KeyGradient::stored_too;
        }
        constexpr int kColumns = kColumnSteps<T> * HeadTile<T, kHeads>::kChannels;
        for (std::int32_t column = 0; column < operands.dim; column += kColumns) {
          const std::int32_t columns = std::min(kColumns, operands.dim - column);
          const bool has_d_weights = wanted.query && column == 0;
          const GradientParameters parameters{
              .operands = operands,
              .weights = data_of<const float>(call.weights) + first_head,
              .d_scores = call.d_scores,
              .d_q = d_q,
              .d_weights = has_d_weights ? data_of<float>(call.d_weights) + first_head : nullptr,
              .d_k = call.d_k.data,
              .weights_stride = call.weights.stride[0],
              .d_scores_stride = call.d_scores_stride,
              .d_q_token_stride = call.d_q.stride[0],
              .d_q_head_stride = call.d_q.stride[1],
              .d_weights_stride = call.d_weights.stride[0],
              .d_k_stride = call.d_k.stride,
              .first_column = column,
              .column_steps =
                  (columns + HeadTile<T, kHeads>::kChannels - 1) / HeadTile<T, kHeads>::kChannels,
              .key_gradient = key_gradient,
              .zero_is_no_slot = call.zero_is_no_slot,
              .d_q_aligned =
                  are_aligned(d_q, {call.d_q.stride[0], call.d_q.stride[1]}, 2, sizeof(T)),
              .d_k_aligned = are_aligned(call.d_k.data, {call.d_k.stride}, 4, sizeof(float))};
          launch(index_gradient_kernel<T, kHeads>,
                 {.blocks = std::min(operands.tokens, kMaxBlocks),
                  .threads = kHeadThreads,
                  .shared_bytes = sizeof(SharedStorage<T, kHeads>),
                  .stream = stream},
                 parameters);
        }
      });
}

}  // namespace

void index_gradient_general(const IndexGradient& call, const TermPlan& plan,
                            const TermMemory& memory, cudaStream_t stream) {
  if (plan.rows == 0) return launch_passes(call, {true, KeyGradient::added}, stream);
  launch_passes(call, {true, KeyGradient::none}, stream);
  const std::int64_t tokens = call.q.shape[0];
  for (std::int64_t first_row = 0; first_row < tokens; first_row += plan.rows) {
    const std::int64_t rows = std::min(plan.rows, tokens - first_row);
    for (std::int64_t first_slot = 0; first_slot < call.slots.slots; first_slot += plan.slots) {
      IndexGradient piece = part_of(call, first_row, rows, first_slot,
                                    std::min(plan.slots, call.slots.slots - first_slot));
      piece.d_k = terms_of(piece, memory);
      launch_passes(piece, {false, KeyGradient::stored}, stream);
      add_in_order(plan, memory, piece.slots, rows, call.d_k, stream);
    }
  }
}

IndexGradientKernel choose_index_gradient(const Tensor& q, const Tensor& k, const Tensor& d_q,
                                          const KeySums& d_k, const TermPlan& plan) {
  Tensor sums = tensor(d_k.data, DType::f32, {d_k.keys, d_k.dim}, q.device);
  sums.stride[0] = d_k.stride;
  // Whether a plan has whole rows depends on their number and length, which may not change bits.
  const bool on_hopper = plan.rows == 0 && why_not_gradient_sm90(q, k, d_q, sums).empty();
  return on_hopper ? index_gradient_sm90 : index_gradient_general;
}

}  // namespace winnow::cuda
