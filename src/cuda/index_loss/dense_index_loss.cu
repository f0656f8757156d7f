// SPDX-License-Identifier: Apache-2.0
// The warm-up loss: the indexer against dense attention over every row's window, in steps that the
// other ops for training the indexer share.
// clang-format off
//   forward   The lse of attention over the window, unless it is given; then, for some rows at a
//             time, target and scores of all keys of their windows in the workspace, and the
//             divergence of both.
//   backward  Target and scores likewise, from the given lse; d_scores in place of the scores; the
//             indexer's gradients from them.
// clang-format on
// Forward computes the products of attention twice, with a given lse once, as backward does. A row
// needs 8 bytes of workspace a key; its bits do not depend on how many rows fit.
#include <algorithm>
#include <cmath>

#include "backend_operators.h"
#include "core/refusals.h"
#include "cuda/index_loss/attention_target.cuh"
#include "cuda/index_loss/divergence.cuh"
#include "cuda/index_loss/head_sum.cuh"
#include "cuda/index_loss/log_sum.cuh"
#include "cuda/index_loss/window_sums_sm90.h"
#include "cuda/index_topk/gradient.cuh"

namespace winnow::cuda {
namespace {

constexpr std::int64_t kMostRows = 1024;  // at a time: enough for all SMs

// ---- lse.

template <class T, int kHeads>
struct LseStorage {
  typename HeadTile<T, kHeads>::Stage stages[kHeadStages];
  LogSum partial[HeadTile<T, kHeads>::kKeyWarps][kHeads];
};

/// A block has one query row. A lane keeps a sum over its keys for each of its heads; the sums are
/// combined at the end.
template <class T, int kHeads>
__global__ void __launch_bounds__(kHeadThreads, 3)
    dense_lse_kernel(const __grid_constant__ HeadOperands operands, float* lse,
                     std::int64_t lse_stride, float scale) {
  using Tile = HeadTile<T, kHeads>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<LseStorage<T, kHeads>*>(memory);

  for (std::int64_t item = blockIdx.x; item < operands.tokens; item += gridDim.x) {
    const std::int64_t t = operands.tokens - 1 - item;  // the longest windows are often the last
    const RowSlots slots = operands.slots.row(t);
    HeadProducts<T, kHeads> tiles(operands, slots, t, shared.stages);
    LogSum sums[Tile::kHeadBlocks][2];
    for (int tile = 0; tile < tiles.tiles(); ++tile) {
      typename Tile::Accumulator products;
      const auto& stage = tiles.multiply(products);
      bool has_key[Tile::kKeyBlocks][2];
#pragma unroll
      for (int i = 0; i < Tile::kKeyBlocks; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) has_key[i][r] = stage.key[Tile::key(i, r * 2)] >= 0;
      }
#pragma unroll
      for (int n = 0; n < Tile::kHeadBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float largest = sums[n][e].largest;
#pragma unroll
          for (int i = 0; i < Tile::kKeyBlocks; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              float& s = products[i][n][r * 2 + e];
              s = __fmul_rn(s, scale);  // not fused with the difference, so that the largest is 0
              if (has_key[i][r]) largest = fmaxf(largest, s);
            }
          }
          sums[n][e].raise(largest);
#pragma unroll
          for (int i = 0; i < Tile::kKeyBlocks; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              if (has_key[i][r]) sums[n][e].add(products[i][n][r * 2 + e]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < Tile::kHeadBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        LogSum& sum = sums[n][e];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum.add_lane(step);
        if (Tile::lane() < 4) shared.partial[Tile::key_warp()][Tile::head(n, e)] = sum;
      }
    }
    __syncthreads();  // the warps' sums are there; no thread reads the last stage any more
    const int h = static_cast<int>(threadIdx.x);
    if (h < operands.heads) {
      LogSum sum = shared.partial[0][h];
#pragma unroll
      for (int warp = 1; warp < Tile::kKeyWarps; ++warp) sum.add(shared.partial[warp][h]);
      lse[t * lse_stride + h] = sum.lse();
    }
    __syncthreads();  // the next row's sums overwrite this one's
  }
}

// ---- Scores of the indexer.

/// weight * max(product, 0), where max keeps NaN.
struct WeightedPart {
  const float* weights;  // [tokens, heads]
  std::int64_t stride;

  __device__ float of_head(std::int64_t t, int h) const { return weights[t * stride + h]; }
  __device__ float operator()(float product, float weight) const {
    return weight * (product < 0 ? 0 : product);
  }
};

// ---- What forward and backward share.

/// The windows of all rows, key by key: keys of the indexer or, with key_offset, of attention.
template <class Args>
SlotLists windows_of(const Args& args, std::int32_t key_offset) {
  return {.begin = data_of<const std::int32_t>(args.begin),
          .end = data_of<const std::int32_t>(args.end),
          .slots = args.index_k.shape[0],
          .keys = args.index_k.shape[0],
          .key_offset = key_offset};
}

/// Scores and target of some rows.
struct Lists {
  float* scores;  // [rows, index_keys]
  float* target;  // [rows, index_keys]
};

/// Bytes of one of the two lists.
template <class Args>
std::size_t list_bytes(const Args& args, std::int64_t rows) {
  return static_cast<std::size_t>(rows * args.index_k.shape[0]) * sizeof(float);
}

template <class Args>
Lists take_lists(const Args& args, std::int64_t rows, Workspace& workspace) {
  const std::int64_t elements = rows * args.index_k.shape[0];
  return {workspace.take<float>(elements), workspace.take<float>(elements)};
}

/// As many rows as `bytes` hold, but at least one.
template <class Args>
std::int64_t rows_within(const Args& args, std::size_t bytes) {
  const std::size_t slack = 3 * Workspace::kAlignment;  // for two slices and for the start
  const std::size_t row = std::max<std::size_t>(2 * list_bytes(args, 1), 1);
  const std::size_t fitting = bytes > slack ? (bytes - slack) / row : 0;
  const std::int64_t most = std::min(std::max<std::int64_t>(args.q.shape[0], 1), kMostRows);
  return std::clamp<std::int64_t>(
      static_cast<std::int64_t>(std::min(fitting, static_cast<std::size_t>(kMostRows))), 1, most);
}

/// The call restricted to the query rows [first, first + rows).
template <class Args>
Args piece_of(Args args, std::int64_t first, std::int64_t rows) {
  for (Tensor* tensor :
       {&args.q, &args.index_q, &args.weights, &args.begin, &args.end, &args.lse}) {
    *tensor = rows_of(*tensor, first, rows);
  }
  return args;
}

/// Attention over the windows, whose target goes to `target`.
template <class Args>
AttentionTarget attention_of(const Args& args, float* target) {
  return {.q = args.q,
          .kv = args.kv,
          .sink = args.sink,
          .lse = args.lse,
          .scale = args.scale,
          .slots = windows_of(args, args.key_offset),
          .target = {.data = target, .stride = args.index_k.shape[0], .fills_rows = false}};
}

/// Computes scores and target of all keys of all windows.
template <bool kSm90, class Args>
void fill_lists(const Args& args, const Lists& lists, cudaStream_t stream) {
  const std::int64_t stride = args.index_k.shape[0];
  const AttentionTarget attention = attention_of(args, lists.target);
  const HeadSums scores{.data = lists.scores, .stride = stride, .fills_rows = false};
  if constexpr (kSm90) {
    sum_window_probabilities_sm90(attention, stream);
    return sum_window_scores_sm90({.q = args.index_q,
                                   .k = args.index_k,
                                   .weights = args.weights,
                                   .slots = windows_of(args, 0),
                                   .scores = scores},
                                  stream);
  }
  sum_probabilities(attention, stream);
  for_each_pass(args.index_q, args.index_k, windows_of(args, 0),
                [&]<class T, int kHeads>(const HeadOperands& operands, std::int64_t first_head) {
                  const WeightedPart term{
                      .weights = data_of<const float>(args.weights) + first_head,
                      .stride = args.weights.stride[0]};
                  sum_heads<T, kHeads>(operands, scores, term, first_head > 0, stream);
                });
}

template <class Args>
Divergence divergence_of(const Args& args, const Lists& lists) {
  const std::int64_t stride = args.index_k.shape[0];
  return {.slots = windows_of(args, 0),
          .scores = lists.scores,
          .target = lists.target,
          .loss = nullptr,
          .d_scores = nullptr,
          .d_loss = nullptr,
          .scores_stride = stride,
          .target_stride = stride,
          .d_scores_stride = stride,
          .tokens = args.q.shape[0]};
}

// ---- Backward's plan.

struct BackwardPlan {
  std::int64_t rows;  // at a time
  TermPlan terms;     // of a deterministic d_index_k
  std::size_t bytes;  // of workspace
};

BackwardPlan plan_with(const DenseIndexLossBackward& args, std::int64_t rows,
                       const Execution& execution) {
  const std::size_t list = list_bytes(args, rows);
  TermPlan terms;
  if (execution.deterministic && args.index_k.shape[0] > 0) {
    const DeviceGuard guard(args.q.device);
    const std::size_t beside = 2 * list + 4 * Workspace::kAlignment;
    const std::size_t limit = execution.workspace_limit;
    terms = plan_terms(rows, args.index_k.shape[0], args.index_k.shape[0], args.index_k.shape[1],
                       limit - std::min(limit, beside));
  }
  return {rows, terms,
          Workspace::bytes(
              {key_copy_bytes(args.d_index_k), list, list, terms.term_bytes, terms.order_bytes})};
}

/// The bytes of a plan that the workspace limit counts.
std::size_t limited_bytes(const DenseIndexLossBackward& args, const BackwardPlan& plan) {
  return plan.bytes - key_copy_bytes(args.d_index_k);
}

BackwardPlan plan_of(const DenseIndexLossBackward& args, const Execution& execution) {
  const std::size_t limit = execution.workspace_limit;
  const std::size_t for_lists = execution.deterministic ? limit / 2 : limit;
  // The copy of d_index_k may take another part of an alignment.
  const std::size_t aside = std::min(for_lists, Workspace::kAlignment);
  const BackwardPlan plan = plan_with(args, rows_within(args, for_lists - aside), execution);
  return limited_bytes(args, plan) <= limit ? plan : plan_with(args, 1, execution);
}

// ---- Forward.

std::size_t workspace_bytes(const DenseIndexLossForward& args, const Execution& execution) {
  const std::size_t list = list_bytes(args, rows_within(args, execution.workspace_limit));
  return Workspace::bytes({list, list});
}

std::string why_not(const DenseIndexLossForward& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  return over_limit(cuda::workspace_bytes(args, execution), execution);
}

template <bool kSm90>
void compute_lse(const DenseIndexLossForward& args, cudaStream_t stream) {
  if constexpr (kSm90) return compute_window_lse_sm90(attention_of(args, nullptr), stream);
  for_each_pass(args.q, args.kv, windows_of(args, args.key_offset),
                [&]<class T, int kHeads>(const HeadOperands& operands, std::int64_t first_head) {
                  launch(dense_lse_kernel<T, kHeads>,
                         {.blocks = std::min(operands.tokens, kMaxBlocks),
                          .threads = kHeadThreads,
                          .shared_bytes = sizeof(LseStorage<T, kHeads>),
                          .stream = stream},
                         operands, data_of<float>(args.lse) + first_head, args.lse.stride[0],
                         args.scale);
                });
}

template <bool kSm90>
void run(const DenseIndexLossForward& args, const Execution& execution) {
  const DeviceGuard guard(args.q.device);
  Workspace workspace(execution, cuda::workspace_bytes(args, execution));
  const cudaStream_t stream = execution.stream;
  if (!args.lse_given) compute_lse<kSm90>(args, stream);

  const std::int64_t tokens = args.q.shape[0];
  const std::int64_t most_rows = rows_within(args, execution.workspace_limit);
  const Lists lists = take_lists(args, most_rows, workspace);
  for (std::int64_t first = 0; first < tokens; first += most_rows) {
    const std::int64_t rows = std::min(most_rows, tokens - first);
    const DenseIndexLossForward piece = piece_of(args, first, rows);
    fill_lists<kSm90>(piece, lists, stream);
    Divergence divergence = divergence_of(piece, lists);
    divergence.loss = data_of<float>(args.loss) + first;
    compute_divergence(divergence, stream);
  }
}

// ---- Backward.

std::size_t workspace_bytes(const DenseIndexLossBackward& args, const Execution& execution) {
  return plan_of(args, execution).bytes;
}

std::string why_not(const DenseIndexLossBackward& args, const Execution& execution) {
  if (args.q.dtype == DType::f64) return refusal::no_f64;
  return over_limit(limited_bytes(args, plan_of(args, execution)), execution);
}

template <bool kSm90>
void run(const DenseIndexLossBackward& args, const Execution& execution) {
  const DeviceGuard guard(args.q.device);
  const BackwardPlan plan = plan_of(args, execution);
  Workspace workspace(execution, plan.bytes);
  const cudaStream_t stream = execution.stream;
  const KeySums d_index_k = begin_key_sums(args.d_index_k, workspace, stream);
  const Lists lists = take_lists(args, plan.rows, workspace);
  const TermMemory memory = take_terms(plan.terms, workspace);
  const IndexGradientKernel gradient =
      choose_index_gradient(args.index_q, args.index_k, args.d_index_q, d_index_k, plan.terms);
  const std::int64_t tokens = args.q.shape[0];
  for (std::int64_t first = 0; first < tokens; first += plan.rows) {
    const std::int64_t rows = std::min(plan.rows, tokens - first);
    const DenseIndexLossBackward piece = piece_of(args, first, rows);
    fill_lists<kSm90>(piece, lists, stream);
    Divergence divergence = divergence_of(piece, lists);
    divergence.d_scores = lists.scores;
    divergence.d_loss = data_of<const float>(args.d_loss) + first;
    compute_divergence(divergence, stream);
    gradient({.q = piece.index_q,
              .k = args.index_k,
              .weights = piece.weights,
              .slots = windows_of(piece, 0),
              .d_scores = lists.scores,
              .d_scores_stride = args.index_k.shape[0],
              .zero_is_no_slot = true,
              .d_q = rows_of(args.d_index_q, first, rows),
              .d_weights = rows_of(args.d_weights, first, rows),
              .d_k = d_index_k},
             plan.terms, memory, stream);
  }
  finish_key_sums(d_index_k, args.d_index_k, stream);
}

/// The kernel `sm90` differs in its products over windows alone. The indexer's gradients are
/// Hopper's with either, wherever that kernel takes the tensors.
template <class Args>
std::string why_not_sm90(const Args& args, const Execution& execution) {
  std::string reason = why_not_windows_sm90(args.q, args.kv, args.index_q, args.index_k);
  return reason.empty() ? why_not(args, execution) : reason;
}

}  // namespace

Kernels<DenseIndexLossForward> kernels(std::type_identity<DenseIndexLossForward>) {
  static constexpr Kernel<DenseIndexLossForward> kKernels[] = {
      {"sm90", why_not_sm90, workspace_bytes, run<true>},
      {"general", why_not, workspace_bytes, run<false>}};
  return kKernels;
}

Kernels<DenseIndexLossBackward> kernels(std::type_identity<DenseIndexLossBackward>) {
  static constexpr Kernel<DenseIndexLossBackward> kKernels[] = {
      {"sm90", why_not_sm90, workspace_bytes, run<true>},
      {"general", why_not, workspace_bytes, run<false>}};
  return kKernels;
}

}  // namespace winnow::cuda
