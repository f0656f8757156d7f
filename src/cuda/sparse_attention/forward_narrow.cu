// SPDX-License-Identifier: Apache-2.0
// Sparse attention, forward, for narrow rows of up to 256 elements in bf16 and f16, from compute
// capability 8.0 on.
//
// A block computes one query for a group of 16, 32 or 64 heads by 4 warps of 16 heads each, in
// teams of 1, 2 or 4. Team i walks over blocks i, i + teams, ... of the row's slots, 16 keys each:
// clang-format off
//   gather   8 lanes copy a row by cp.async into the team's ring of 3 or 4 stages; a slot without a
//            key is zeros. Which slots hold a key stays in a register.
//   scores   Q from registers, K from the ring.
//   softmax  Within the warp. A row's base, from which its logits are measured, moves only when a
//            logit passes it by 2^8, so accumulators are seldom rescaled.
//   values   P goes from the accumulator of the scores straight into the operand of the next
//            product; the accumulator of the warp's 16 heads by all columns of the values is in
//            registers.
// clang-format on
// A team waits for nothing but its next rows: the loop has no barrier of the block, and none at all
// in a team of one warp. At the end the teams' accumulators are added in shared memory, where the
// rings were. Limits: the gather from L2 (32 flops a byte with 16 heads), with more heads the
// bandwidth of shared memory (2 to 3 cycles a product).
#include <algorithm>
#include <cstdint>
#include <string>

#include "core/refusals.h"
#include "cuda/common/runtime.h"
#include "cuda/sparse_attention/forward_narrow/row.cuh"
#include "cuda/sparse_attention/kernels.h"

namespace winnow::cuda {
namespace {

using namespace sparse_attention::forward_narrow;

/// Up to this many heads it is faster than the general kernel, which has three barriers for 64 keys
/// and reads P and Q from shared memory too.
constexpr std::int64_t kMaxHeads = 128;
constexpr std::int64_t kMaxDim = 256;  // the accumulators of 16 heads leave room for no more

template <class T, int kDim, int kTeam>
__global__ void __launch_bounds__(
    kThreads, sparse_attention::forward_narrow::Shape<T, kDim, kTeam>::kMinBlocks)
    attend_narrow_kernel(const __grid_constant__ ForwardParameters parameters) {
  extern __shared__ __align__(16) unsigned char memory[];
  RowAttention<T, kDim, kTeam> attention(parameters, memory);
  const std::int64_t items = parameters.tokens * parameters.head_groups;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    attention.run(item / parameters.head_groups,
                  static_cast<int>(item % parameters.head_groups) * attention.kHeads);
  }
}

// ---- The launcher.

struct Choice {
  void (*kernel)(ForwardParameters) = nullptr;
  int group_heads = 0;
  std::size_t shared_bytes = 0;
};

template <class T, int kDim, int kTeam>
Choice choice_of() {
  using Shape = sparse_attention::forward_narrow::Shape<T, kDim, kTeam>;
  return {attend_narrow_kernel<T, kDim, kTeam>, Shape::kHeads, Shape::kSharedBytes};
}

template <class T, int kDim>
Choice choose_team(std::int64_t heads) {
  if (heads <= 16) return choice_of<T, kDim, 1>();
  return heads <= 32 ? choice_of<T, kDim, 2>() : choice_of<T, kDim, 4>();
}

template <class T>
Choice choose_dim(std::int64_t qk_dim, std::int64_t heads) {
  if (qk_dim <= 64) return choose_team<T, 64>(heads);
  if (qk_dim <= 128) return choose_team<T, 128>(heads);
  return qk_dim <= 192 ? choose_team<T, 192>(heads) : choose_team<T, 256>(heads);
}

Choice choose(const SparseAttentionForward& args) {
  const std::int64_t heads = args.q.shape[1];
  const std::int64_t qk_dim = args.q.shape[2];
  return args.q.dtype == DType::bf16 ? choose_dim<__nv_bfloat16>(qk_dim, heads)
                                     : choose_dim<__half>(qk_dim, heads);
}

std::string why_not(const SparseAttentionForward& args, const Execution&) {
  if (args.q.dtype != DType::bf16 && args.q.dtype != DType::f16)
    return sentence(refusal::takes_dtypes, "bf16 and f16");
  if (args.q.shape[2] > kMaxDim) return sentence(refusal::takes_dim_up_to, "qk_dim", kMaxDim);
  if (args.q.shape[1] > kMaxHeads) return sentence(refusal::takes_dim_up_to, "heads", kMaxHeads);
  if (!has_aligned_rows(args.q) || !has_aligned_rows(args.kv) || !has_aligned_rows(args.out)) {
    return sentence(refusal::takes_aligned_rows, "q, kv and out");
  }
  if (choose(args).shared_bytes >
      static_cast<std::size_t>(device_properties(args.q.device).shared_bytes)) {
    return refusal::too_little_shared;
  }
  return {};
}

void run(const SparseAttentionForward& args, const Execution& execution) {
  const DeviceGuard guard(args.q.device);
  const Choice choice = choose(args);
  const ForwardParameters parameters = forward_parameters(args, choice.group_heads);
  launch(choice.kernel,
         {.blocks = std::min(parameters.tokens * parameters.head_groups, kMaxBlocks),
          .threads = kThreads,
          .shared_bytes = choice.shared_bytes,
          .stream = execution.stream},
         parameters);
}

}  // namespace

const winnow::Kernel<SparseAttentionForward> forward_narrow = {"narrow", why_not, no_workspace,
                                                               run};

}  // namespace winnow::cuda
