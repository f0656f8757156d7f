// SPDX-License-Identifier: Apache-2.0
// Sparse attention, forward, for every shape in bf16 and f16, from compute capability 8.0 on.
//
// A block computes one query for a group of 16, 32 or 64 heads. It walks over the row's slots in
// tiles of 16 keys, or 32 with 64 heads. In interval i, between two barriers of the block:
// clang-format off
//   score warps   one for 16 heads: S = Q K^T of tile i, K and most of Q from shared memory; the
//                 softmax; P, rounded to the type of the inputs, to shared memory. A row's base,
//                 from which its logits are measured, moves only when a logit passes it by far, so
//                 that values are seldom rescaled.
//   value warps   4, or 8: gather tile i + 1 (i + 2 with four stages), 8 lanes a row by cp.async;
//                 values += P V of tile i - 1, a warp has up to 32 heads and 32 to 256 columns in
//                 accumulators.
// clang-format on
// So one barrier a tile, and products of both kinds at the same time. Stages: the tiles of i - 1, i
// and i + 1, one more where that leaves as many blocks on an SM, two where there is little shared
// memory (then the gather waits for the values).
// Limits: the bandwidth of shared memory (3 to 4 cycles a product of scores, 1 to 2 one of values).
#include <algorithm>
#include <cstddef>
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
template <class Shape>
constexpr int kMinBlocks = Shape::kHeads == 64   ? 1
                           : Shape::kHeads == 32 ? (Shape::kValueWarps > 4 ? 1 : 2)
                           : Shape::kPairs > 8   ? 2
                           : Shape::kPairs > 4   ? 3
                                                 : 4;

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, kMinBlocks<Shape>)
    attend_kernel(const __grid_constant__ ForwardParameters parameters) {
  extern __shared__ __align__(16) unsigned char memory[];
  RowAttention<Shape> attention(parameters, memory);
  // One item a block: a loop over items would cost registers.
  attention.run();
}

// ---- The launcher.

struct Choice {
  void (*kernel)(ForwardParameters) = nullptr;  // null: there is too little shared memory
  int heads = 0;
  int threads = 0;
  int stages = 0;
  std::size_t shared_bytes = 0;
};

/// The most stages that leave as many resident blocks as fewer would, from three on; two if no
/// more fit.
template <class Shape>
Choice choice_of(const SparseAttentionForward& args) {
  const auto qk_dim = static_cast<int>(args.q.shape[2]);
  const auto v_dim = static_cast<int>(args.out.shape[2]);
  const auto limit = static_cast<std::size_t>(device_properties(args.q.device).shared_bytes);
  constexpr std::size_t kReserved = 1024;  // of every block, by the system
  const auto bytes = [&](int stages) {
    return sizeof(typename Shape::Storage) +
           sizeof(typename Shape::T) *
               (static_cast<std::size_t>(Shape::kHeads) * row_elements(qk_dim) +
                static_cast<std::size_t>(stages) * stage_elements<Shape>(qk_dim, v_dim));
  };
  const auto blocks = [&](int stages) {
    return std::min<std::size_t>((limit + kReserved) / (bytes(stages) + kReserved),
                                 kMinBlocks<Shape>);
  };
  int stages = 3;
  if (blocks(4) == blocks(3)) stages = 4;
  if (blocks(3) == 0) stages = 2;
  if (blocks(stages) == 0) return {};
  return {attend_kernel<Shape>, Shape::kHeads, Shape::kThreads, stages, bytes(stages)};
}

/// The block with the most heads that fits. It does not depend on the number of rows or keys.
template <class T>
Choice choose(const SparseAttentionForward& args) {
  const std::int64_t heads = args.q.shape[1];
  const std::int64_t v_dim = args.out.shape[2];
  Choice choice;
  if (heads > 32 && v_dim <= 512) {
    choice = v_dim <= 256 ? choice_of<Shape<T, 64, 32, 8, 4>>(args)
                          : choice_of<Shape<T, 64, 32, 8, 8>>(args);
  }
  if (choice.kernel == nullptr && heads > 16) {
    choice = v_dim <= 256   ? choice_of<Shape<T, 32, 16, 4, 4>>(args)
             : v_dim <= 512 ? choice_of<Shape<T, 32, 16, 4, 8>>(args)
                            : choice_of<Shape<T, 32, 16, 8, 8>>(args);
  }
  if (choice.kernel == nullptr) {
    choice = v_dim <= 128   ? choice_of<Shape<T, 16, 16, 4, 2>>(args)
             : v_dim <= 256 ? choice_of<Shape<T, 16, 16, 4, 4>>(args)
             : v_dim <= 512 ? choice_of<Shape<T, 16, 16, 4, 8>>(args)
                            : choice_of<Shape<T, 16, 16, 4, 16>>(args);
  }
  return choice;
}

Choice choose(const SparseAttentionForward& args) {
  return args.q.dtype == DType::bf16 ? choose<__nv_bfloat16>(args) : choose<__half>(args);
}

/// Whether pairs of elements can be stored by one instruction.
bool has_aligned_pairs(const Tensor& tensor) {
  auto bits = reinterpret_cast<std::uintptr_t>(tensor.data) / 2;
  for (int i = 0; i < 2; ++i) {
    if (tensor.shape[i] > 1) bits |= static_cast<std::uintptr_t>(tensor.stride[i]);
  }
  return bits % 2 == 0;
}

/// The parameters for the rows from `row` on.
ForwardParameters rows_from(ForwardParameters parameters, std::int64_t row) {
  constexpr std::int64_t kSize = sizeof(__half);
  parameters.q =
      static_cast<const std::byte*>(parameters.q) + row * parameters.q_token_stride * kSize;
  parameters.out =
      static_cast<std::byte*>(parameters.out) + row * parameters.out_token_stride * kSize;
  parameters.indices += row * parameters.indices_stride;
  if (parameters.lengths != nullptr) parameters.lengths += row;
  parameters.lse += row * parameters.lse_stride;
  if (parameters.max_logits != nullptr) parameters.max_logits += row * parameters.max_logits_stride;
  return parameters;
}

std::string why_not(const SparseAttentionForward& args, const Execution&) {
  if (args.q.dtype != DType::bf16 && args.q.dtype != DType::f16)
    return sentence(refusal::takes_dtypes, "bf16 and f16");
  if (choose(args).kernel == nullptr) return refusal::too_little_shared;
  return {};
}

void run(const SparseAttentionForward& args, const Execution& execution) {
  const DeviceGuard guard(args.q.device);
  const Choice choice = choose(args);
  ForwardParameters parameters = forward_parameters(args, choice.heads);
  parameters.stages = choice.stages;
  parameters.q_aligned = has_aligned_rows(args.q);
  parameters.kv_aligned = has_aligned_rows(args.kv);
  parameters.out_aligned = has_aligned_pairs(args.out);
  // One launch, but for more blocks than it may have.
  const std::int64_t most_rows = kMaxBlocks / parameters.head_groups;
  for (std::int64_t row = 0; row < parameters.tokens; row += most_rows) {
    const std::int64_t rows = std::min(most_rows, parameters.tokens - row);
    launch(choice.kernel,
           {.blocks = rows * parameters.head_groups,
            .threads = choice.threads,
            .shared_bytes = choice.shared_bytes,
            .stream = execution.stream},
           rows_from(parameters, row));
  }
}

}  // namespace

const winnow::Kernel<SparseAttentionForward> forward_general = {"general", why_not, no_workspace,
                                                                run};

}  // namespace winnow::cuda
