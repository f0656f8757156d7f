// SPDX-License-Identifier: Apache-2.0
// The value projection and its gradients on Hopper, bf16 and f16: three matrix products for each
// head, see Kind. Forward and d_out are computed transposed, with tokens as the columns: then all
// three fill items of 128 x 256 for every head_dim that is a multiple of 128.
//
// clang-format off
//   warpgroup 0      one thread has TMA copy 64 of k at a time, 128 rows of a and 256 columns of b,
//                    into a ring of stages
//   warpgroups 1, 2  products of 64 rows each, 64 x 256 x 16, both operands in shared memory; then c,
//                    rounded and transposed through shared memory, goes out by TMA, while the
//                    producer loads the next item (d_w: from registers, once for all tokens)
//
//   barriers of a stage   full   its operands have landed
//                         free   the consumers of the cluster have used it
// clang-format on
//
// Thread blocks are persistent. Two blocks that need the same columns of b are a cluster: each
// loads half of them for both, which takes a third off what is read from L2. A result depends on
// its row and column alone, since every sum runs over k in the same order; d_w adds tokens in their
// order.
//
// Shared memory: four stages of 48 KiB and 32 KiB of c. Registers: 128 of c. The limit is device
// memory, which moves every operand and result once, before the tensor cores.
#include <algorithm>
#include <cstdint>
#include <string>

#include "core/refusals.h"
#include "cuda/common/runtime.h"
#include "cuda/common/tensor_map.h"
#include "cuda/value_projection/kernels.h"
#include "cuda/value_projection/sm90/consumer.cuh"
#include "cuda/value_projection/sm90/parts.cuh"
#include "cuda/value_projection/sm90/producer.cuh"

namespace winnow::cuda::value_projection {
namespace {

using namespace sm90;

template <class T, class Out, Kind kKind, Pair kPair>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    value_projection_kernel(const __grid_constant__ Product product) {
  extern __shared__ __align__(1024) std::byte memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  if (threadIdx.x == 0) {
    prefetch(product.a);
    prefetch(product.b);
    constexpr int kConsumerWarps = 2 * kWarpgroup / 32;
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(1);
      shared.free[i].init(2 * kConsumerWarps);
    }
    fence_barrier_init();
  }
  sync_cluster();  // the barriers of both blocks are initialised
  if (threadIdx.x < kWarpgroup) {
    shrink_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce<kKind, kPair>(product, shared);
  } else {
    grow_registers<kConsumerRegisters>();
    consume<T, Out, kKind, kPair>(product, shared);
  }
  __syncwarp();
  sync_cluster();  // until here the other block writes to this one's shared memory
}

/// A view of [tokens, heads, x] as [heads, tokens, x].
Tensor by_head(Tensor tensor) {
  std::swap(tensor.shape[0], tensor.shape[1]);
  std::swap(tensor.stride[0], tensor.stride[1]);
  return tensor;
}

int groups_of(std::int64_t size, std::int64_t group) {
  return static_cast<int>((size + group - 1) / group);
}

/// What a product multiplies. All tensors have heads first; a and b are as in Product.
struct Factors {
  Tensor a, b;
  std::int64_t m, n, k;
};

/// Of d_w, see Product.
struct Summation {
  int parts = 1;
  bool adds = false;
};

template <class T, class Out, Kind kKind, Pair kPair>
void multiply_with(const Factors& factors, const Tensor& c, const Summation& summation,
                   cudaStream_t stream) {
  constexpr bool kAlongM = kPair == Pair::along_m;
  constexpr bool kByTokens = kKind != Kind::d_w;
  // Boxes of a K-major operand hold all rows that a block copies, others 64 of k.
  constexpr std::uint32_t kBoxA = kAMnMajor<kKind> ? 64 : kAlongM ? kM : kM / 2;
  constexpr std::uint32_t kBoxB = kBMnMajor<kKind> ? 64 : kAlongM ? kN / 2 : kN;
  constexpr std::uint32_t kBoxC = kByTokens ? SharedStorage::kStoreRows : 64;
  Product product{.a = make_tensor_map(factors.a, {1, kBoxA, 64}),
                  .b = make_tensor_map(factors.b, {1, kBoxB, 64}),
                  .c = make_tensor_map(c, {1, kBoxC, kTileRowBytes / sizeof(Out)}),
                  .adds = summation.adds,
                  .m_groups = groups_of(factors.m, kAlongM ? kM * 2 : kM),
                  .n_groups = groups_of(factors.n, kAlongM ? kN : kN * 2),
                  .parts = summation.parts,
                  .heads = static_cast<int>(factors.a.shape[0]),
                  .steps = groups_of(factors.k, kK)};
  product.part_steps = groups_of(product.steps, product.parts);
  const std::int64_t pairs =
      std::int64_t{product.heads} * product.parts * product.n_groups * product.m_groups;
  const std::int64_t clusters =
      std::min<std::int64_t>(pairs, device_properties(c.device).multiprocessors / 2);
  auto stride = static_cast<int>(clusters);
  product.m_stride = stride % product.m_groups;
  stride /= product.m_groups;
  product.n_stride = stride % product.n_groups;
  stride /= product.n_groups;
  product.part_stride = stride % product.parts;
  product.head_stride = stride / product.parts;
  launch(value_projection_kernel<T, Out, kKind, kPair>,
         {.blocks = clusters * 2,
          .threads = kThreads,
          .shared_bytes = sizeof(SharedStorage),
          .stream = stream},
         product);
}

template <class T, class Out, Kind kKind>
void multiply(const Factors& factors, const Tensor& c, const Summation& summation,
              cudaStream_t stream) {
  if (groups_of(factors.m, kM) % 2 == 0) {
    multiply_with<T, Out, kKind, Pair::along_m>(factors, c, summation, stream);
  } else {
    multiply_with<T, Out, kKind, Pair::along_n>(factors, c, summation, stream);
  }
}

template <class T>
void forward(const ValueProjectionForward& args, cudaStream_t stream) {
  if (args.out.shape[0] == 0) return;
  multiply<T, T, Kind::forward>({.a = args.w_v,
                                 .b = by_head(args.out),
                                 .m = args.w_v.shape[1],
                                 .n = args.out.shape[0],
                                 .k = args.w_v.shape[2]},
                                by_head(args.out_v), {}, stream);
}

/// Ranges of tokens that d_w sums apart, of at least 512, so that few heads occupy the device too.
int part_count(const ValueProjectionBackward& args) {
  constexpr int kMinSteps = 8;
  const std::int64_t items =
      args.w_v.shape[0] * groups_of(args.w_v.shape[1], kM) * groups_of(args.w_v.shape[2], kN);
  const std::int64_t wanted = device_properties(args.out.device).multiprocessors / items;
  const std::int64_t steps = groups_of(args.out.shape[0], kK);
  return static_cast<int>(std::max<std::int64_t>(1, std::min(wanted, steps / kMinSteps)));
}

std::size_t bytes_of_parts(const ValueProjectionBackward& args) {
  const int parts = part_count(args);
  const std::int64_t elements = args.w_v.shape[0] * args.w_v.shape[1] * args.w_v.shape[2];
  return parts == 1 ? 0 : static_cast<std::size_t>(parts * elements) * sizeof(float);
}

std::size_t workspace_bytes(const ValueProjectionBackward& args, const Execution&) {
  return Workspace::bytes({bytes_of_parts(args)});
}

template <class Out>
void sum_parts(const Tensor& sums, int parts, const Tensor& d_w_v, cudaStream_t stream) {
  const Parts all = {.data = static_cast<const float*>(sums.data),
                     .count = parts,
                     .heads = d_w_v.shape[0],
                     .rows = d_w_v.shape[1],
                     .columns = d_w_v.shape[2],
                     .d_w = d_w_v.data,
                     .head_stride = d_w_v.stride[0],
                     .row_stride = d_w_v.stride[1]};
  launch(sum_parts_kernel<Out>,
         {.blocks = blocks_for(all.elements(), kPartThreads * kPartColumns),
          .threads = kPartThreads,
          .stream = stream},
         all);
}

template <class T>
void compute_d_w(const ValueProjectionBackward& args, const Execution& execution) {
  // Without tokens nothing is read, but TMA takes no tensor without elements.
  const bool has_tokens = args.out.shape[0] > 0;
  const Factors factors{.a = has_tokens ? by_head(args.d_out_v) : args.w_v,
                        .b = has_tokens ? by_head(args.out) : args.w_v,
                        .m = args.w_v.shape[1],
                        .n = args.w_v.shape[2],
                        .k = args.out.shape[0]};
  const cudaStream_t stream = execution.stream;
  const bool adds = args.d_w_v.dtype == DType::f32;
  const int parts = part_count(args);
  if (parts > 1) {
    Workspace workspace(execution, workspace_bytes(args, execution));
    const Tensor sums = tensor(workspace.take<std::byte>(bytes_of_parts(args)), DType::f32,
                               {parts * args.w_v.shape[0], factors.m, factors.n}, args.w_v.device);
    multiply<T, float, Kind::d_w>(factors, sums, {.parts = parts}, stream);
    if (adds) {
      sum_parts<float>(sums, parts, args.d_w_v, stream);
    } else {
      sum_parts<T>(sums, parts, args.d_w_v, stream);
    }
  } else if (adds) {
    multiply<T, float, Kind::d_w>(factors, args.d_w_v, {.adds = true}, stream);
  } else {
    multiply<T, T, Kind::d_w>(factors, args.d_w_v, {}, stream);
  }
}

template <class T>
void backward(const ValueProjectionBackward& args, const Execution& execution) {
  if (args.out.shape[0] > 0) {
    multiply<T, T, Kind::d_out>({.a = args.w_v,
                                 .b = by_head(args.d_out_v),
                                 .m = args.w_v.shape[2],
                                 .n = args.out.shape[0],
                                 .k = args.w_v.shape[1]},
                                by_head(args.d_out), {}, execution.stream);
  }
  compute_d_w<T>(args, execution);
}

bool can_be_copied(const Tensor& tensor) {
  return tensor.shape[0] == 0 || can_have_tensor_map(tensor);
}

/// Why not, whatever the strides are.
std::string why_not_type(const Tensor& out) {
  if (std::string reason = needs_sm90(out.device); !reason.empty()) return reason;
  if (out.dtype != DType::bf16 && out.dtype != DType::f16)
    return sentence(refusal::takes_dtypes, "bf16 and f16");
  return {};
}

std::string why_not(const ValueProjectionForward& args, const Execution&) {
  if (std::string reason = why_not_type(args.out); !reason.empty()) return reason;
  if (!can_be_copied(args.out) || !can_be_copied(args.w_v) || !can_be_copied(args.out_v))
    return sentence(refusal::takes_dense_rows, "out, w_v and out_v");
  return {};
}

std::string why_not(const ValueProjectionBackward& args, const Execution& execution) {
  if (std::string reason = why_not_type(args.out); !reason.empty()) return reason;
  for (const Tensor& tensor : {args.out, args.w_v, args.d_out_v, args.d_out, args.d_w_v}) {
    if (!can_be_copied(tensor))
      return sentence(refusal::takes_dense_rows, "out, w_v, d_out_v, d_out and d_w_v");
  }
  return over_limit(workspace_bytes(args, execution), execution);
}

void run(const ValueProjectionForward& args, const Execution& execution) {
  const DeviceGuard guard(args.out.device);
  if (args.out.dtype == DType::bf16) {
    forward<__nv_bfloat16>(args, execution.stream);
  } else {
    forward<__half>(args, execution.stream);
  }
}

void run(const ValueProjectionBackward& args, const Execution& execution) {
  const DeviceGuard guard(args.out.device);
  if (args.out.dtype == DType::bf16) {
    backward<__nv_bfloat16>(args, execution);
  } else {
    backward<__half>(args, execution);
  }
}

}  // namespace

const Kernel<ValueProjectionForward> forward_sm90 = {"sm90", why_not, no_workspace, run};
const Kernel<ValueProjectionBackward> backward_sm90 = {"sm90", why_not, workspace_bytes, run};

}  // namespace winnow::cuda::value_projection
