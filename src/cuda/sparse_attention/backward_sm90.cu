// SPDX-License-Identifier: Apache-2.0
// Sparse attention, backward, on Hopper: 576/512 and 512/512, bf16 and f16, any number of heads.
//
// A thread block takes 64 heads of a query at a time; their rows of q and d_out stay in shared
// memory while blocks of 64 keys pass. dQ stays in registers; dKV is computed 64 columns at a time
// and added to device memory straight from the accumulators, in whose order d_kv's columns stand
// until the last kernel of the call puts them back.
//
// clang-format off
// warpgroup 0         gathers a block; S = Q K^T and dP = dO V^T; then P and dS to shared memory.
//                     With 576 columns also dQ of the last 64 (the rope part). After an item's last
//                     block the constants of the next item's heads, from out and d_out, which TMA
//                     loads into the buffer of keys.
// warpgroups 1, 2     dQ += dS K of 256 columns each, and dKV = dS^T Q + P^T dO of one half each
//
//   0     | S | P | dP | dS |gather      | S | P | dP | dS |gather ...
//   1, 2  ... dKV, add  ... |dQ| dKV, add | dKV, add | ... |dQ| ...
//
// barriers of a block scores_full  P and dS are written
//                     kv_free      dQ is done, so the next block may be gathered
//                     scores_free  dKV is done, so the next P and dS may be written
// and of an item      tile_free    the last dKV of a tile is done, so the next q and d_out may be loaded
//                     q_full, d_out_full  they have landed
//                     half_full    half of what the constants need has landed
// clang-format on
//
// An item may be split between thread blocks (pieces.cuh): then all this holds for its pieces,
// which hand their sums of dQ on.
//
// Shared memory: q 72, d_out 64, keys 72, P and dS 16 KiB. The limit is L2, which adds 2304 bytes
// for every key of a query.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/refusals.h"
#include "cuda/common/key_sums.cuh"
#include "cuda/common/row_slots.cuh"
#include "cuda/common/runtime.h"
#include "cuda/common/tensor_map.h"
#include "cuda/sparse_attention/backward_sm90/gradients.cuh"
#include "cuda/sparse_attention/backward_sm90/pacing.cuh"
#include "cuda/sparse_attention/backward_sm90/scores.cuh"
#include "cuda/sparse_attention/exact_sums_sm90.h"
#include "cuda/sparse_attention/kernels.h"

namespace winnow::cuda {
namespace {

using namespace sparse_attention::backward_sm90;

/// `kHeadSteps`: an item has no more heads than so many steps of kStepHeads.
template <class T, int kTiles, KeyGradients kMode, int kHeadSteps>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_attention_backward_kernel(const __grid_constant__ CUtensorMap q,
                                     const __grid_constant__ CUtensorMap out,
                                     const __grid_constant__ CUtensorMap d_out,
                                     const __grid_constant__ BackwardSm90Parameters<T> params) {
  extern __shared__ __align__(1024) std::byte memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  const bool is_split = begin_pace(params);
  if (threadIdx.x == 0) {
    shared.schedule = schedule_of_block(params, is_split);
    constexpr int kGradientWarps = 2 * kWarpgroup / 32;
    constexpr int kSideWarps = kWarpgroup / 32;
    shared.half_full.init(1);
    shared.q_full.init(1);
    shared.d_out_full.init(1);
    for (int i = 0; i < kValueTiles; ++i) shared.tile_free[i].init(kSideWarps);
    shared.tile_free[kValueTiles].init(kGradientWarps);
    shared.scores_full.init(kWarpgroup);
    shared.scores_free.init(kGradientWarps);
    shared.kv_free.init(kGradientWarps);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    shrink_registers<kScoreRegisters>();
    compute_scores<T, kTiles, kMode>(params, q, out, d_out, shared);
  } else {
    grow_registers<kGradientRegisters>();
    compute_gradients<T, kTiles, kMode, kHeadSteps>(params, shared);
  }
}

/// Where a launch leaves its sums.
struct Destination {
  float* rows;  // of d_kv, or the terms of slots
  std::int64_t row_stride;
  Tensor d_sink;  // summed over rows, or per row if deterministic
  BackwardExchange exchange = {};
  const ExactSums* exact = nullptr;  // whose quanta are added
};

/// Bytes of keys, 2 an element, and of their gradients' sums, 4.
std::int64_t key_bytes(const SparseAttentionBackward& args) {
  return args.kv.shape[0] * args.kv.shape[1] * (2 + 4);
}

/// Whether they stay in L2 whatever the order in which they are used.
bool fits_l2(const SparseAttentionBackward& args) { return key_bytes(args) <= 40 << 20; }

/// How many blocks of keys a thread block may be ahead of others, so that what they use of the keys
/// stays in L2.
int max_lead(const SparseAttentionBackward& args) {
  const std::int64_t blocks = (args.indices.shape[1] + kBlock - 1) / kBlock;
  return static_cast<int>(std::max<std::int64_t>(blocks * (12 << 20) / key_bytes(args), 1));
}

template <class T, KeyGradients kMode>
void launch_for(const SparseAttentionBackward& args, const Destination& to,
                const Execution& execution) {
  BackwardSm90Parameters<T> params = backward_sm90_parameters<T>(args, kHeads);
  params.d_kv = to.rows;
  params.d_kv_stride = to.row_stride;
  params.d_sink = data_of<float>(to.d_sink);
  params.d_sink_stride = to.d_sink ? to.d_sink.stride[0] : 0;
  params.exchange = to.exchange;
  if (to.exchange.progress != nullptr) params.lead = max_lead(args);
  params.fits_l2 = fits_l2(args);
  if (to.exact != nullptr) {
    params.inverse_quanta = to.exact->inverse_quanta;
    params.constants = to.exact->constants;
  }
  const auto kernel_of = [&]<int kHeadSteps>(std::integral_constant<int, kHeadSteps>) {
    const bool has_rope = args.q.shape[2] == kMaxTiles * kTileColumns;
    return has_rope ? sparse_attention_backward_kernel<T, kMaxTiles, kMode, kHeadSteps>
                    : sparse_attention_backward_kernel<T, kValueTiles, kMode, kHeadSteps>;
  };
  auto kernel = kernel_of(std::integral_constant<int, kHeads / kStepHeads>{});
  if constexpr (kMode == KeyGradients::added) {  // of the others there are enough kernels
    if (params.heads <= 2 * kStepHeads) kernel = kernel_of(std::integral_constant<int, 2>{});
    if (params.heads <= kStepHeads) kernel = kernel_of(std::integral_constant<int, 1>{});
  }
  constexpr std::uint32_t kRows = kHeads;
  launch(kernel,
         {.blocks = std::min(params.items, device_properties(args.q.device).multiprocessors),
          .threads = kThreads,
          .shared_bytes = sizeof(SharedStorage),
          .stream = execution.stream},
         make_tensor_map(args.q, {1, kRows, kTileColumns}),
         make_tensor_map(args.out, {1, kRows, kTileColumns}),
         make_tensor_map(args.d_out, {1, kRows, kTileColumns}), params);
}

template <KeyGradients kMode>
void start(const SparseAttentionBackward& args, const Destination& to, const Execution& execution) {
  if (args.q.dtype == DType::bf16) {
    launch_for<__nv_bfloat16, kMode>(args, to, execution);
  } else {
    launch_for<__half, kMode>(args, to, execution);
  }
}

// ---- Deterministic sums. They are exact (exact_sums_sm90.h) where the rows in which they are made
// fit. Otherwise the key gradients of some rows are written as terms, a slot each, sorted by key
// and added (common/key_sums.cuh). Gradients of the sink are written row by row.

struct OrderedPlan {
  ExactPlan exact;  // without rows: by terms
  TermPlan terms;
  std::size_t d_sink_bytes;  // float [tokens, heads]
};

OrderedPlan plan_in_order(const SparseAttentionBackward& args, const Execution& execution) {
  OrderedPlan plan{};
  if (!execution.deterministic) return plan;
  plan.exact = plan_exact_sums(args, execution.workspace_limit);
  if (plan.exact.rows > 0) return plan;
  const DeviceGuard guard(args.q.device);  // the size of the sort depends on the device
  if (args.d_sink) {
    plan.d_sink_bytes = static_cast<std::size_t>(args.q.shape[0] * args.q.shape[1]) * sizeof(float);
  }
  const std::size_t beside = Workspace::bytes({plan.d_sink_bytes});
  plan.terms =
      plan_terms(args.q.shape[0], args.indices.shape[1], args.kv.shape[0], args.kv.shape[1],
                 execution.workspace_limit - std::min(execution.workspace_limit, beside));
  return plan;
}

std::size_t bytes_of(const OrderedPlan& plan) {
  if (plan.exact.rows > 0) return plan.exact.bytes;
  return Workspace::bytes({plan.terms.term_bytes, plan.terms.order_bytes, plan.d_sink_bytes});
}

/// The part of a tensor that has `count` elements of a dimension, from `first` on.
Tensor part_of(Tensor tensor, int dim, std::int64_t first, std::int64_t count) {
  if (!tensor) return tensor;
  tensor.data = static_cast<std::byte*>(tensor.data) +
                first * tensor.stride[dim] * element_bytes(tensor.dtype);
  tensor.shape[dim] = count;
  return tensor;
}

SparseAttentionBackward part_of(SparseAttentionBackward args, std::int64_t first_row,
                                std::int64_t rows, std::int64_t first_head, std::int64_t heads) {
  for (Tensor* tensor : {&args.q, &args.out, &args.lse, &args.d_out, &args.d_lse, &args.d_q}) {
    *tensor = part_of(part_of(*tensor, 0, first_row, rows), 1, first_head, heads);
  }
  for (Tensor* tensor : {&args.indices, &args.lengths}) {
    *tensor = part_of(*tensor, 0, first_row, rows);
  }
  args.sink = part_of(args.sink, 0, first_head, heads);
  return args;
}

constexpr int kSinkThreads = 256;

/// A block sums what all rows give to one head, in an order that depends on the number of rows
/// alone.
__global__ void __launch_bounds__(kSinkThreads)
    add_sinks_kernel(const float* rows, std::int64_t tokens, std::int64_t heads, float* d_sink) {
  __shared__ float sums[kSinkThreads];
  float sum = 0;
  for (std::int64_t t = threadIdx.x; t < tokens; t += kSinkThreads) {
    sum += rows[t * heads + blockIdx.x];
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kSinkThreads; ++i) sum += sums[i];
    d_sink[blockIdx.x] += sum;
  }
}

/// Adds d_sink of rows [tokens, heads], if there is one.
void add_sinks(const Tensor& rows, const Tensor& d_sink, cudaStream_t stream) {
  if (!d_sink) return;
  launch(add_sinks_kernel, {.blocks = rows.shape[1], .threads = kSinkThreads, .stream = stream},
         data_of<const float>(rows), rows.shape[0], rows.shape[1], data_of<float>(d_sink));
}

void run_in_order(const SparseAttentionBackward& args, const OrderedPlan& plan, const KeySums& d_kv,
                  Workspace& workspace, const Execution& execution) {
  const std::int64_t tokens = args.q.shape[0];
  const std::int64_t heads = args.q.shape[1];
  const TermMemory memory = take_terms(plan.terms, workspace);
  Tensor d_sink;
  if (args.d_sink) {
    d_sink =
        tensor(workspace.take<float>(tokens * heads), DType::f32, {tokens, heads}, args.q.device);
  }
  const SlotLists slots{.indices = data_of<const std::int32_t>(args.indices),
                        .lengths = data_of<const std::int32_t>(args.lengths),
                        .indices_stride = args.indices.stride[0],
                        .slots = args.indices.shape[1],
                        .keys = args.kv.shape[0]};
  // Use full waves of thread blocks where the plan holds at least one.
  const std::int64_t wave = device_properties(args.q.device).multiprocessors;
  const std::int64_t rows =
      plan.terms.rows > wave ? plan.terms.rows / wave * wave : plan.terms.rows;
  for (std::int64_t first = 0; first < tokens; first += rows) {
    const std::int64_t count = std::min(rows, tokens - first);
    for (std::int64_t head = 0; head < heads; head += kHeads) {
      const std::int64_t head_count = std::min<std::int64_t>(heads - head, kHeads);
      start<KeyGradients::written>(
          part_of(args, first, count, head, head_count),
          {.rows = memory.terms,
           .row_stride = args.kv.shape[1],
           .d_sink = part_of(part_of(d_sink, 0, first, count), 1, head, head_count)},
          execution);
      add_in_order(plan.terms, memory, slots.part(first, 0, slots.slots), count, d_kv,
                   execution.stream);
    }
  }
  add_sinks(d_sink, args.d_sink, execution.stream);
}

void run_exactly(const SparseAttentionBackward& args, const ExactPlan& plan, Workspace& workspace,
                 const Execution& execution) {
  const std::int64_t tokens = args.q.shape[0];
  const std::int64_t heads = args.q.shape[1];
  const ExactSums sums = begin_exact_sums(args, plan, workspace, execution.stream);
  for (std::int64_t first = 0; first < tokens; first += plan.rows) {
    const std::int64_t count = std::min(plan.rows, tokens - first);
    const SparseAttentionBackward rows = part_of(args, first, count, 0, heads);
    Tensor d_sink;
    if (args.d_sink) d_sink = tensor(sums.d_sink, DType::f32, {count, heads}, args.q.device);
    bound_key_sums(rows, sums, execution.stream);
    start<KeyGradients::exact>(rows,
                               {.rows = sums.quanta_sums.data,
                                .row_stride = sums.quanta_sums.stride,
                                .d_sink = d_sink,
                                .exact = &sums},
                               execution);
    add_exact_sums(sums, execution.stream);
    add_sinks(d_sink, args.d_sink, execution.stream);
  }
  finish_exact_sums(sums, args.d_kv, execution.stream);
}

std::string why_not(const SparseAttentionBackward& args, const Execution& execution) {
  if (std::string reason = needs_sm90_and_16_bits(args.q); !reason.empty()) return reason;
  const std::int64_t qk_dim = args.q.shape[2];
  if ((qk_dim != 576 && qk_dim != 512) || args.out.shape[2] != 512)
    return sentence(refusal::takes_widths, "576/512 and 512/512");
  for (const Tensor* tensor : {&args.kv, &args.out, &args.d_out, &args.d_q, &args.d_kv}) {
    if (!has_aligned_rows(*tensor))
      return sentence(refusal::takes_aligned_rows, "kv, out and gradients");
  }
  for (const Tensor* tensor : {&args.q, &args.out, &args.d_out}) {
    if (args.q.shape[0] > 0 && !can_have_tensor_map(*tensor))
      return sentence(refusal::takes_dense_rows, "q, out and d_out");
  }
  if (execution.deterministic) {
    const OrderedPlan plan = plan_in_order(args, execution);
    if (plan.exact.rows == 0 && plan.terms.slots < args.indices.shape[1])
      return refusal::takes_whole_rows;
    return over_limit(bytes_of(plan), execution);
  }
  return {};
}

struct ExchangePlan {
  int parts = 0;
  int team_blocks = 0;
  std::size_t sum_bytes = 0;
  std::size_t word_bytes = 0;  // all words
};
constexpr int kSingleWords = 2;

std::size_t bytes_of(const ExchangePlan& plan) {
  return Workspace::bytes({plan.sum_bytes}) + Workspace::bytes({plan.word_bytes});
}

/// Items are split where those of the last round are so few that each has two thread blocks or
/// more.
ExchangePlan plan_exchange(const SparseAttentionBackward& args, const Execution& execution) {
  if (execution.deterministic) return {};
  constexpr std::int64_t kLongList = 1536;  // slots; of 1152 pairs were faster, of 2048 parts
  const std::int64_t items = args.q.shape[0] * ((args.q.shape[1] + kHeads - 1) / kHeads);
  const std::int64_t blocks = device_properties(args.q.device).multiprocessors;
  const std::int64_t topk = args.indices.shape[1];
  const std::int64_t last_items = items % blocks;
  const bool may_split = fits_l2(args) || may_be_alike(topk, args.kv.shape[0], items, blocks);
  if (may_split && items > blocks && last_items > 0 && last_items <= blocks / 2) {
    ExchangePlan plan;
    const std::int64_t spare = blocks / last_items;  // thread blocks for an item
    const bool in_parts = topk >= kLongList && items >= 2 * blocks;
    if (in_parts) plan.parts = static_cast<int>(std::min({spare, items / blocks, topk / kBlock}));
    if (!in_parts) plan.team_blocks = static_cast<int>(spare);
    const std::int64_t split_items = in_parts ? last_items : blocks;
    plan.sum_bytes = split_items * kHeads * args.q.shape[2] * sizeof(float);
    plan.word_bytes = (kSingleWords + split_items * kCarriedWords) * sizeof(unsigned);
    if (bytes_of(plan) <= execution.workspace_limit) return plan;
  }
  const ExchangePlan plan = {.word_bytes = fits_l2(args) ? 0 : kSingleWords * sizeof(unsigned)};
  return bytes_of(plan) <= execution.workspace_limit ? plan : ExchangePlan{};
}

BackwardExchange begin_exchange(const SparseAttentionBackward& args, const ExchangePlan& plan,
                                Workspace& workspace, cudaStream_t stream) {
  if (plan.word_bytes == 0) return {};
  auto* const sums = workspace.take<float>(plan.sum_bytes / sizeof(float));
  auto* const words = workspace.take<unsigned>(plan.word_bytes / sizeof(unsigned));
  cuda_check(cudaMemsetAsync(words, 0, plan.word_bytes, stream));
  return {.progress = fits_l2(args) ? nullptr : words,
          .parts = plan.parts,
          .team_blocks = plan.team_blocks,
          .sums = sums,
          .words = words + kSingleWords,
          .started_blocks = words + 1};
}

std::size_t workspace_bytes(const SparseAttentionBackward& args, const Execution& execution) {
  // All are sums of slices; the copy comes on top of the limit.
  return Workspace::bytes({key_copy_bytes(args.d_kv)}) + bytes_of(plan_in_order(args, execution)) +
         bytes_of(plan_exchange(args, execution));
}

void run(const SparseAttentionBackward& args, const Execution& execution) {
  const DeviceGuard guard(args.d_kv.device);
  Workspace workspace(execution, workspace_bytes(args, execution));
  const OrderedPlan plan = plan_in_order(args, execution);
  if (plan.exact.rows > 0) {
    run_exactly(args, plan.exact, workspace, execution);
    return;
  }
  const KeySums sums =
      begin_key_sums(args.d_kv, workspace, execution.stream, ColumnOrder::fragments);
  if (args.q.shape[0] > 0) {
    if (execution.deterministic) {
      run_in_order(args, plan, sums, workspace, execution);
    } else {
      start<KeyGradients::added>(args,
                                 {.rows = sums.data,
                                  .row_stride = sums.stride,
                                  .d_sink = args.d_sink,
                                  .exchange = begin_exchange(args, plan_exchange(args, execution),
                                                             workspace, execution.stream)},
                                 execution);
    }
  }
  finish_key_sums(sums, args.d_kv, execution.stream);
}

}  // namespace

const winnow::Kernel<SparseAttentionBackward> backward_sm90 = {"sm90", why_not, workspace_bytes,
                                                               run};

}  // namespace winnow::cuda
