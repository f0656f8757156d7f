// SPDX-License-Identifier: Apache-2.0
// The value projection and its gradients on Hopper, bf16 and f16: three matrix products for each
// head, see Kind. Forward and d_out are computed transposed, with tokens as the columns: then all
// three fill items of 128 x 256 for every head_dim that is a multiple of 128.
//
// clang-format off
//   warpgroup 0      one thread has TMA copy 64 of k at a time, 128 rows of a and 256 columns of b,
//                    into a ring of stages
//   warpgroups 1, 2  products of 64 rows each, 64 x 256 x 16, both operands in shared memory; then
//                    c goes out by TMA from shared memory, transposed but for d_w, while the
//                    producer loads the next item
//
//   barriers of a stage   full   its operands have landed
//                         free   the consumers of the cluster have used it
// clang-format on
//
// Thread blocks are persistent, two of them a cluster; see Pair. The two products of backward run
// side by side on parts of the device, one of which mostly reads and the other mostly writes. A
// result depends on its row and column alone, since every sum runs over k in the same order; d_w
// adds tokens in their order, or in parts that shapes and the device decide.
//
// Shared memory: four stages of 48 KiB and 32 KiB of c. Registers: 128 of c. The limits are device
// memory, which moves every operand and result once, and the tensor cores, close to each other.
#include <algorithm>
#include <cstdint>
#include <limits>
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

template <class T, Pair kPair>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    value_projection_forward_kernel(const __grid_constant__ Product product) {
  extern __shared__ __align__(1024) std::byte memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  sync_cluster();  // the barriers of both blocks are initialised
  if (threadIdx.x < kWarpgroup) {
    shrink_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce<Kind::forward, kPair>(product, shared);
  } else {
    grow_registers<kConsumerRegisters>();
    consume<T, T, Kind::forward, kPair>(product, shared);
  }
  __syncwarp();
  sync_cluster();  // until here the other block writes to this one's shared memory
}

/// The first blocks compute d_w, the others d_out.
template <class T, class Out, Pair kPair>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    value_projection_backward_kernel(const __grid_constant__ Product d_w,
                                     const __grid_constant__ Product d_out) {
  extern __shared__ __align__(1024) std::byte memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  sync_cluster();  // the barriers of both blocks are initialised
  const bool has_d_w = static_cast<int>(blockIdx.x) < d_out.first_block;
  if (threadIdx.x < kWarpgroup) {
    shrink_registers<kProducerRegisters>();
    if (threadIdx.x == 0) {
      if (has_d_w) {
        produce<Kind::d_w, kPair>(d_w, shared);
      } else {
        produce<Kind::d_out, Pair::along_m>(d_out, shared);
      }
    }
  } else {
    grow_registers<kConsumerRegisters>();
    if (has_d_w) {
      consume<T, Out, Kind::d_w, kPair>(d_w, shared);
    } else {
      consume<T, T, Kind::d_out, Pair::along_m>(d_out, shared);
    }
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

/// A product that no blocks have been given to.
template <class Out, Kind kKind, Pair kPair>
Product product_of(const Factors& factors, const Tensor& c, const Summation& summation = {}) {
  constexpr bool kAlongM = kPair == Pair::along_m;
  // Boxes of a K-major operand hold all rows that a block copies, others 64 of k.
  constexpr std::uint32_t kBoxA = kAMnMajor<kKind> ? 64 : kAlongM ? kM : kM / 2;
  constexpr std::uint32_t kBoxB = kBMnMajor<kKind> ? 64 : kAlongM ? kN / 2 : kN;
  constexpr std::uint32_t kBoxC = kKind == Kind::d_w ? 64 : SharedStorage::kStoreRows;
  const int steps = groups_of(factors.k, kK);
  return {.a = make_tensor_map(factors.a, {1, kBoxA, 64}),
          .b = make_tensor_map(factors.b, {1, kBoxB, 64}),
          .c = make_tensor_map(c, {1, kBoxC, kTileRowBytes / sizeof(Out)}),
          .adds = summation.adds,
          .m_groups = groups_of(factors.m, kAlongM ? kM * 2 : kM),
          .n_groups = groups_of(factors.n, kAlongM ? kN : kN * 2),
          .parts = summation.parts,
          .heads = static_cast<int>(factors.a.shape[0]),
          .steps = steps,
          .part_steps = groups_of(steps, summation.parts)};
}

/// Pairs of items, each of which a cluster computes.
std::int64_t pair_count(const Product& product) {
  return std::int64_t{product.heads} * product.parts * product.n_groups * product.m_groups;
}

void set_clusters(Product& product, int count) {
  product.m_stride = count % product.m_groups;
  count /= product.m_groups;
  product.n_stride = count % product.n_groups;
  count /= product.n_groups;
  product.part_stride = count % product.parts;
  product.head_stride = count / product.parts;
}

/// Clusters that can run at the same time.
int cluster_count(Device device) { return device_properties(device).multiprocessors / 2; }

Launch launch_of(int clusters, cudaStream_t stream) {
  return {.blocks = clusters * 2,
          .threads = kThreads,
          .shared_bytes = sizeof(SharedStorage),
          .stream = stream};
}

template <class T, Pair kPair>
void forward_with(const ValueProjectionForward& args, cudaStream_t stream) {
  Product product = product_of<T, Kind::forward, kPair>({.a = args.w_v,
                                                         .b = by_head(args.out),
                                                         .m = args.w_v.shape[1],
                                                         .n = args.out.shape[0],
                                                         .k = args.w_v.shape[2]},
                                                        by_head(args.out_v));
  const auto clusters =
      static_cast<int>(std::min<std::int64_t>(pair_count(product), cluster_count(args.out.device)));
  set_clusters(product, clusters);
  launch(value_projection_forward_kernel<T, kPair>, launch_of(clusters, stream), product);
}

/// Items are paired along m, as head_dim, where those come out even.
bool pairs_along_m(const Tensor& w_v) { return groups_of(w_v.shape[1], kM) % 2 == 0; }

template <class T>
void forward(const ValueProjectionForward& args, cudaStream_t stream) {
  if (args.out.shape[0] == 0) return;
  if (pairs_along_m(args.w_v)) {
    forward_with<T, Pair::along_m>(args, stream);
  } else {
    forward_with<T, Pair::along_n>(args, stream);
  }
}

/// The sums of `parts` ranges of tokens; one goes to d_w itself.
std::size_t bytes_of_parts(const ValueProjectionBackward& args, std::int64_t parts) {
  if (parts == 1) return 0;
  const std::int64_t elements = args.w_v.shape[0] * args.w_v.shape[1] * args.w_v.shape[2];
  return Workspace::bytes({static_cast<std::size_t>(parts * elements) * sizeof(float)});
}

/// Ranges of tokens that d_w sums apart, of at least 512, so that few heads occupy the device too;
/// no more than the workspace limit has room for.
int part_count(const ValueProjectionBackward& args, const Execution& execution) {
  constexpr int kMinSteps = 8;
  const std::int64_t items =
      args.w_v.shape[0] * groups_of(args.w_v.shape[1], kM) * groups_of(args.w_v.shape[2], kN);
  const std::int64_t wanted = device_properties(args.out.device).multiprocessors / items;
  const std::int64_t steps = groups_of(args.out.shape[0], kK);
  std::int64_t parts = std::max<std::int64_t>(1, std::min(wanted, steps / kMinSteps));
  while (bytes_of_parts(args, parts) > execution.workspace_limit) --parts;
  return static_cast<int>(parts);
}

std::size_t workspace_bytes(const ValueProjectionBackward& args, const Execution& execution) {
  return bytes_of_parts(args, part_count(args, execution));
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

/// How many of all clusters compute d_w, so that both products end at about the same time.
int clusters_for_d_w(const Product& d_w, const Product& d_out, int all) {
  if (pair_count(d_out) == 0) return all;
  // In steps of the slowest cluster; to store an item takes about as long as one.
  const auto duration = [](const Product& product, int clusters) {
    return (pair_count(product) + clusters - 1) / clusters * (product.part_steps + 1);
  };
  int best = 1;
  std::int64_t shortest = std::numeric_limits<std::int64_t>::max();
  for (int clusters = 1; clusters < all; ++clusters) {
    const std::int64_t time = std::max(duration(d_w, clusters), duration(d_out, all - clusters));
    if (time >= shortest) continue;
    shortest = time;
    best = clusters;
  }
  return best;
}

template <class T, class Out, Pair kPair>
void backward_with(const ValueProjectionBackward& args, const Tensor& d_w_v,
                   const Summation& summation, cudaStream_t stream) {
  // Without tokens there is no d_out, and d_w reads nothing, but TMA takes no tensor without
  // elements.
  const bool has_tokens = args.out.shape[0] > 0;
  Product d_w =
      product_of<Out, Kind::d_w, kPair>({.a = has_tokens ? by_head(args.d_out_v) : args.w_v,
                                         .b = has_tokens ? by_head(args.out) : args.w_v,
                                         .m = args.w_v.shape[1],
                                         .n = args.w_v.shape[2],
                                         .k = args.out.shape[0]},
                                        d_w_v, summation);
  Product d_out{};
  if (has_tokens) {
    d_out = product_of<T, Kind::d_out, Pair::along_m>({.a = args.w_v,
                                                       .b = by_head(args.d_out_v),
                                                       .m = args.w_v.shape[2],
                                                       .n = args.out.shape[0],
                                                       .k = args.w_v.shape[1]},
                                                      by_head(args.d_out));
  }
  const int all = cluster_count(args.out.device);
  const int clusters = clusters_for_d_w(d_w, d_out, all);
  set_clusters(d_w, clusters);
  if (has_tokens) set_clusters(d_out, all - clusters);
  d_out.first_block = clusters * 2;
  launch(value_projection_backward_kernel<T, Out, kPair>, launch_of(all, stream), d_w, d_out);
}

template <class T, class Out>
void backward_to(const ValueProjectionBackward& args, const Tensor& d_w_v,
                 const Summation& summation, cudaStream_t stream) {
  if (pairs_along_m(args.w_v)) {
    backward_with<T, Out, Pair::along_m>(args, d_w_v, summation, stream);
  } else {
    backward_with<T, Out, Pair::along_n>(args, d_w_v, summation, stream);
  }
}

template <class T>
void backward(const ValueProjectionBackward& args, const Execution& execution) {
  const cudaStream_t stream = execution.stream;
  const bool adds = args.d_w_v.dtype == DType::f32;
  const int parts = part_count(args, execution);
  if (parts > 1) {
    const Tensor& w_v = args.w_v;
    Workspace workspace(execution, workspace_bytes(args, execution));
    const Tensor sums =
        tensor(workspace.take<float>(parts * w_v.shape[0] * w_v.shape[1] * w_v.shape[2]),
               DType::f32, {parts * w_v.shape[0], w_v.shape[1], w_v.shape[2]}, w_v.device);
    backward_to<T, float>(args, sums, {.parts = parts}, stream);
    if (adds) {
      sum_parts<float>(sums, parts, args.d_w_v, stream);
    } else {
      sum_parts<T>(sums, parts, args.d_w_v, stream);
    }
  } else if (adds) {
    backward_to<T, float>(args, args.d_w_v, {.adds = true}, stream);
  } else {
    backward_to<T, T>(args, args.d_w_v, {}, stream);
  }
}

bool can_be_copied(const Tensor& tensor) {
  return tensor.shape[0] == 0 || can_have_tensor_map(tensor);
}

/// Why not, whatever the strides are. TMA writes rows in units of 16 bytes.
std::string why_not_type(const Tensor& out, const Tensor& w_v) {
  if (std::string reason = needs_sm90_and_16_bits(out); !reason.empty()) return reason;
  if (w_v.shape[1] % 8 != 0) return sentence(refusal::takes_dim_multiple, "head_dim", 8);
  return {};
}

std::string why_not(const ValueProjectionForward& args, const Execution&) {
  if (std::string reason = why_not_type(args.out, args.w_v); !reason.empty()) return reason;
  if (!can_be_copied(args.out) || !can_be_copied(args.w_v) || !can_be_copied(args.out_v))
    return sentence(refusal::takes_dense_rows, "out, w_v and out_v");
  return {};
}

std::string why_not(const ValueProjectionBackward& args, const Execution&) {
  if (std::string reason = why_not_type(args.out, args.w_v); !reason.empty()) return reason;
  for (const Tensor& tensor : {args.out, args.w_v, args.d_out_v, args.d_out, args.d_w_v}) {
    if (!can_be_copied(tensor))
      return sentence(refusal::takes_dense_rows, "out, w_v, d_out_v, d_out and d_w_v");
  }
  return {};
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
