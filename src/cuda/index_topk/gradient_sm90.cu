// SPDX-License-Identifier: Apache-2.0
// The gradients of the indexer's scores on Hopper: rows of up to 128 elements, bf16 and f16, any
// number of heads.
//
// A thread block has one query row and up to 32 or 64 of its heads; their q stays in shared memory
// while the row's keys pass, 64 at a time.
//
// clang-format off
// producer warp        gathers blocks of keys, with their rows and d_scores
// consumer warpgroup   a = k q^T [keys, heads]. d_weights += d_scores max(a, 0). Where a > 0 the
//                      weights stay in registers as fragments, and d_scores go to shared memory
//                      d_q^T += k^T d_scores [columns, heads], in registers until the row ends
//                      d_k = weights q [keys, 64 columns], times d_scores, through shared memory
//                      to its keys: by atomics, or as terms summed later (common/key_sums.cuh)
//
// barriers of a block  slots_full  which keys, and their d_scores
//                      full        the rows of the keys have landed
//                      free        its products are done, so the next keys may be gathered
//                      sync_consumers, once: the d_scores where a > 0 are there for all four warps
// clang-format on
//
// Nothing else overlaps within a thread block: three of them share an SM (two with 64 heads), and
// one multiplies while another adds. Shared memory with 32 heads: keys 32, q 8, d_scores 10, d_k
// 18 KiB. Powers of two are factored out of weights and d_scores, so that they are around 1 in f16.
// Products that are not finite are summed term by term (terms.cuh). The limit is L2, which adds 512
// bytes for every key of a query.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/refusals.h"
#include "cuda/common/block_reduce.cuh"
#include "cuda/common/runtime.h"
#include "cuda/index_topk/gradient.cuh"
#include "cuda/index_topk/gradient_sm90/producer.cuh"
#include "cuda/index_topk/gradient_sm90/row.cuh"

namespace winnow::cuda {
namespace {

using namespace gradient_sm90;

/// The scales of a row, by all threads; 1 where the type has the range of fp32.
template <class T, int kHeads>
__device__ RowScale scale_of_row(const Parameters<T>& params, std::int64_t t, const RowSlots& slots,
                                 SharedStorage<T, kHeads>& shared) {
  if constexpr (!std::is_same_v<T, __half>) {
    return {};
  } else {
    const int thread = static_cast<int>(threadIdx.x);
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    float d_score = 0;
    for (int slot = thread; slot < slots.count; slot += kThreads) {
      if (slots.key(slot) < 0) continue;
      d_score =
          fmaxf(d_score, finite_magnitude(params.d_scores[t * params.d_scores_stride + slot]));
    }
    float weight = 0;
    if (thread < params.heads) {
      weight = finite_magnitude(params.weights[t * params.weights_stride + thread]);
    }
    return {1 / power_of_two_below(reduce_block<kThreads>(d_score, shared.reduction, larger)),
            power_of_two_below(reduce_block<kThreads>(weight, shared.reduction, larger))};
  }
}

template <class T, int kHeads, KeyGradient kMode>
__global__ void __launch_bounds__(kThreads, kHeads == kFewHeads ? 3 : 2)
    index_gradient_kernel(const __grid_constant__ Parameters<T> params) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedStorage<T, kHeads>*>(memory);
  const std::int64_t t = params.tokens - 1 - blockIdx.x;  // long windows come last
  const RowSlots slots = params.slots.row(t);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(32);
      shared.slots_full[i].init(32);
      shared.free[i].init(kConsumers);
    }
    fence_barrier_init();
    for (Scores<kHeads>& scores : shared.scores) scores.infinite_block = -1;
  }
  const RowScale scale = scale_of_row(params, t, slots, shared);
  __syncthreads();  // what thread 0 initialises is there for all
  const int blocks = slots.count / kBlock + (slots.count % kBlock != 0 ? 1 : 0);
  if (threadIdx.x >= kConsumers) {
    Producer<T, kHeads>(params, t, slots, shared).run(blocks);
  } else {
    Row<T, kHeads, kMode>(params, t, scale, shared).run(blocks);
  }
}

/// One pass over the heads from first_head on.
template <class T, KeyGradient kMode>
void launch_pass(const IndexGradient& call, std::int64_t first_head, cudaStream_t stream) {
  const std::int64_t heads = std::min<std::int64_t>(call.q.shape[1] - first_head, kMostHeads);
  const Parameters<T> params = {.q = data_of<const T>(call.q) + first_head * call.q.stride[1],
                                .k = data_of<const T>(call.k),
                                .weights = data_of<const float>(call.weights) + first_head,
                                .d_scores = call.d_scores,
                                .d_q = data_of<T>(call.d_q) + first_head * call.d_q.stride[1],
                                .d_weights = data_of<float>(call.d_weights) + first_head,
                                .d_k = call.d_k.data,
                                .q_token_stride = call.q.stride[0],
                                .q_head_stride = call.q.stride[1],
                                .k_stride = call.k.stride[0],
                                .weights_stride = call.weights.stride[0],
                                .d_scores_stride = call.d_scores_stride,
                                .d_q_token_stride = call.d_q.stride[0],
                                .d_q_head_stride = call.d_q.stride[1],
                                .d_weights_stride = call.d_weights.stride[0],
                                .d_k_stride = call.d_k.stride,
                                .tokens = call.q.shape[0],
                                .slots = call.slots,
                                .heads = static_cast<std::int32_t>(heads),
                                .dim = static_cast<std::int32_t>(call.q.shape[2]),
                                .zero_is_no_slot = call.zero_is_no_slot};
  const bool few = heads <= kFewHeads;
  launch(few ? index_gradient_kernel<T, kFewHeads, kMode>
             : index_gradient_kernel<T, kMostHeads, kMode>,
         {.blocks = params.tokens,
          .threads = kThreads,
          .shared_bytes =
              few ? sizeof(SharedStorage<T, kFewHeads>) : sizeof(SharedStorage<T, kMostHeads>),
          .stream = stream},
         params);
}

/// Heads come outermost, so that terms are summed in the same order however rows are cut.
template <class T>
void run_gradient(const IndexGradient& call, const TermPlan& plan, const TermMemory& memory,
                  cudaStream_t stream) {
  const std::int64_t tokens = call.q.shape[0];
  const std::int64_t rows_at_once = plan.rows == 0 ? kMaxBlocks : std::min(plan.rows, kMaxBlocks);
  for (std::int64_t head = 0; head < call.q.shape[1]; head += kMostHeads) {
    for (std::int64_t first_row = 0; first_row < tokens; first_row += rows_at_once) {
      const std::int64_t rows = std::min(rows_at_once, tokens - first_row);
      IndexGradient piece = part_of(call, first_row, rows, 0, call.slots.slots);
      if (plan.rows == 0) {
        launch_pass<T, KeyGradient::added>(piece, head, stream);
        continue;
      }
      piece.d_k = terms_of(piece, memory);
      launch_pass<T, KeyGradient::stored>(piece, head, stream);
      add_in_order(plan, memory, piece.slots, rows, call.d_k, stream);
    }
  }
}

}  // namespace

void index_gradient_sm90(const IndexGradient& call, const TermPlan& plan, const TermMemory& memory,
                         cudaStream_t stream) {
  if (call.q.dtype == DType::bf16) {
    run_gradient<__nv_bfloat16>(call, plan, memory, stream);
  } else {
    run_gradient<__half>(call, plan, memory, stream);
  }
}

std::string why_not_gradient_sm90(const Tensor& q, const Tensor& k, const Tensor& d_q,
                                  const Tensor& d_k) {
  if (std::string reason = needs_sm90_and_16_bits(q); !reason.empty()) return reason;
  if (q.shape[2] > kColumns) return sentence(refusal::takes_dim_up_to, "index_dim", kColumns);
  for (const Tensor* tensor : {&q, &k, &d_q, &d_k}) {
    if (!has_aligned_rows(*tensor))
      return sentence(refusal::takes_aligned_rows, "q, k and gradients");
  }
  return {};
}

}  // namespace winnow::cuda
