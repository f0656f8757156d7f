// SPDX-License-Identifier: Apache-2.0
// The value projection and its gradients: three matrix products for each head.
// clang-format off
//   forward  out_v [tokens, head_dim] = out [tokens, v_dim]        w_v [head_dim, v_dim]^T
//   d_out          [tokens, v_dim]    = d_out_v [tokens, head_dim] w_v
//   d_w_v          [head_dim, v_dim]  = d_out_v^T                  out,  summed over tokens
// clang-format on
// The kernels are our own and not a library's, because a row's bits must not depend on the number
// of rows, and nothing may be set up during a graph's capture.
//
// 16-bit types: a block of 8 warps computes 128 x 128 of c, a warp 64 x 32 of it, with 32 of k at a
// time through four stages of cp.async; operands have the same layout in shared memory as in device
// memory. Limits: the rate of mma.sync, then shared memory (1.5 cycles a product). f32: 64 x 64 of
// c by fused multiply-adds, 4 x 4 a thread.
#include <algorithm>
#include <type_traits>

#include "backend_operators.h"
#include "core/refusals.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/runtime.h"
#include "cuda/common/tile_product.cuh"
#include "cuda/value_projection/kernels.h"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // 16-bit elements of a 16-byte copy

// ---- The products that both kernels compute.

/// A matrix for each head; one of its dimensions has stride 1.
struct Operand {
  const void* data;
  std::int64_t head_stride;
  std::int64_t stride;  // of the other dimension
  bool has_unit_k;      // K-major: the dimension with stride 1 is k
  bool aligned;         // rows begin at 16-byte boundaries and are whole 16-byte pieces
};

/// c[m, n] = sum_k a[m, k] b[k, n] for each head; `adds`: it is added to c.
struct Product {
  Operand a, b;
  std::int64_t m, n, k, heads;
  void* c = nullptr;
  std::int64_t c_head_stride = 0;
  std::int64_t c_stride = 0;
  bool c_aligned = false;  // pairs of elements are aligned to the pair
  bool adds = false;
};

struct Corner {
  std::int64_t head, m, n;
};

/// The tiles of a head are consecutive, so that its matrices stay in L2.
template <int kTile>
__device__ Corner corner_of(const Product& product, std::int64_t tile) {
  const std::int64_t rows = (product.m + kTile - 1) / kTile;
  const std::int64_t columns = (product.n + kTile - 1) / kTile;
  return {tile / (rows * columns), tile % rows * kTile, tile / rows % columns * kTile};
}

template <int kTile>
__host__ __device__ std::int64_t tile_count(const Product& product) {
  return (product.m + kTile - 1) / kTile * ((product.n + kTile - 1) / kTile) * product.heads;
}

// ---- 16-bit types, on tensor cores.

constexpr int kTile = 128;  // of m and n
constexpr int kTileK = 32;
constexpr int kStages = 4;
constexpr int kWarpM = 64;
constexpr int kWarpN = 32;

/// One operand's part of a stage, in the layout of device memory: [kTile, kTileK] where k has
/// stride 1, else [kTileK, kTile]; rows are padded.
template <bool kUnitK>
struct TileShape {
  static constexpr int kRows = kUnitK ? kTile : kTileK;
  static constexpr int kColumns = kUnitK ? kTileK : kTile;
  static constexpr int kStride = kColumns + kRowPadding;
  static constexpr int kElements = kRows * kStride;
};

template <class T, bool kUnitKA, bool kUnitKB>
struct SharedStorage {
  alignas(16) T a[kStages][TileShape<kUnitKA>::kElements];
  alignas(16) T b[kStages][TileShape<kUnitKB>::kElements];
};

/// Copies the tile whose corner is (row, column) of a matrix of rows x columns, with zeros past its
/// end.
template <class T, bool kUnitK>
__device__ void copy_tile(T* tile, const T* matrix, const Operand& operand, std::int64_t row,
                          std::int64_t rows, std::int64_t column, std::int64_t columns) {
  using Shape = TileShape<kUnitK>;
  constexpr int kPieces = Shape::kColumns / kVector;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < Shape::kRows * kPieces; i += kThreads) {
    const std::int64_t from_row = row + i / kPieces;
    const std::int64_t from_column = column + i % kPieces * kVector;
    T* const to = tile + i / kPieces * Shape::kStride + i % kPieces * kVector;
    const T* const from = matrix + from_row * operand.stride + from_column;
    const bool has_row = from_row < rows;
    if (operand.aligned && has_row && from_column < columns) {
      copy_16_bytes_async(to, from);
    } else {
      *reinterpret_cast<uint4*>(to) = uint4{};
      if (!operand.aligned && has_row) {
        for (int e = 0; e < kVector; ++e) {
          if (from_column + e < columns) to[e] = from[e];
        }
      }
    }
  }
}

/// Out is T, then c is overwritten, or float, then c is added to.
template <class T, class Out, bool kUnitKA, bool kUnitKB>
__global__ void __launch_bounds__(kThreads, 2)
    multiply_kernel(const __grid_constant__ Product product) {
  using Storage = SharedStorage<T, kUnitKA, kUnitKB>;
  constexpr int kBlocksM = kWarpM / 16;
  constexpr int kBlocksN = kWarpN / 16;
  extern __shared__ __align__(16) unsigned char memory[];
  Storage& shared = *reinterpret_cast<Storage*>(memory);

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_m = warp % (kTile / kWarpM) * kWarpM;
  const int warp_n = warp / (kTile / kWarpM) * kWarpN;
  const std::int64_t steps = (product.k + kTileK - 1) / kTileK;

  for (std::int64_t tile = blockIdx.x; tile < tile_count<kTile>(product); tile += gridDim.x) {
    const Corner corner = corner_of<kTile>(product, tile);
    const T* const a = static_cast<const T*>(product.a.data) + corner.head * product.a.head_stride;
    const T* const b = static_cast<const T*>(product.b.data) + corner.head * product.b.head_stride;

    // Every step commits a group, an empty one past the end, so that the number of pending groups
    // tells which steps have landed.
    const auto start = [&](std::int64_t step) {
      if (step < steps) {
        const std::int64_t k = step * kTileK;
        T* const a_tile = shared.a[step % kStages];
        T* const b_tile = shared.b[step % kStages];
        if constexpr (kUnitKA) {
          copy_tile<T, true>(a_tile, a, product.a, corner.m, product.m, k, product.k);
        } else {
          copy_tile<T, false>(a_tile, a, product.a, k, product.k, corner.m, product.m);
        }
        if constexpr (kUnitKB) {
          copy_tile<T, true>(b_tile, b, product.b, corner.n, product.n, k, product.k);
        } else {
          copy_tile<T, false>(b_tile, b, product.b, k, product.k, corner.n, product.n);
        }
      }
      commit_copies();
    };

    float c[kBlocksM][kBlocksN * 2][4] = {};
    for (int step = 0; step < kStages - 1; ++step) start(step);
    for (std::int64_t step = 0; step < steps; ++step) {
      // This step's tiles are there for all; all are done with the previous step, whose stage the
      // next copies overwrite.
      wait_for_copies<kStages - 2>();
      __syncthreads();
      start(step + kStages - 1);
      const T* const a_tile = shared.a[step % kStages];
      const T* const b_tile = shared.b[step % kStages];
#pragma unroll
      for (int k = 0; k < kTileK; k += 16) {
        std::uint32_t b_fragments[kBlocksN][4];
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
          load_block<false, kUnitKB>(b_fragments[j], b_tile, TileShape<kUnitKB>::kStride,
                                     warp_n + j * 16, k, lane);
        }
#pragma unroll
        for (int i = 0; i < kBlocksM; ++i) {
          std::uint32_t a_fragments[4];
          load_block<true, kUnitKA>(a_fragments, a_tile, TileShape<kUnitKA>::kStride,
                                    warp_m + i * 16, k, lane);
#pragma unroll
          for (int j = 0; j < kBlocksN; ++j) {
            multiply_add<T>(c[i][j * 2], a_fragments, b_fragments[j][0], b_fragments[j][1]);
            multiply_add<T>(c[i][j * 2 + 1], a_fragments, b_fragments[j][2], b_fragments[j][3]);
          }
        }
      }
    }

    Out* const c_head = static_cast<Out*>(product.c) + corner.head * product.c_head_stride;
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::int64_t row = corner.m + warp_m + i * 16 + r * 8 + lane / 4;
        if (row >= product.m) continue;
        Out* const c_row = c_head + row * product.c_stride;
#pragma unroll
        for (int j = 0; j < kBlocksN * 2; ++j) {
          const std::int64_t column = corner.n + warp_n + j * 8 + lane % 4 * 2;
          const float first = c[i][j][r * 2];
          const float second = c[i][j][r * 2 + 1];
          if constexpr (std::is_same_v<Out, float>) {
            if (column < product.n) c_row[column] += first;
            if (column + 1 < product.n) c_row[column + 1] += second;
          } else if (column + 1 < product.n) {
            store_pair(c_row + column, first, second, product.c_aligned);
          } else if (column < product.n) {
            c_row[column] = from_float<T>(first);
          }
        }
      }
    }
    wait_for_copies<0>();
    __syncthreads();  // the next tile's copies overwrite this one's stages
  }
}

// ---- f32, by fused multiply-adds.

constexpr int kTileF32 = 64;  // of m and n
constexpr int kTileKF32 = 16;
constexpr int kOwn = 4;  // rows and columns of c that a thread has

__global__ void __launch_bounds__(kThreads)
    multiply_f32_kernel(const __grid_constant__ Product product) {
  alignas(16) __shared__ float a_tile[kTileKF32][kTileF32 + 4];
  alignas(16) __shared__ float b_tile[kTileKF32][kTileF32 + 4];
  const int thread = static_cast<int>(threadIdx.x);
  const int own_m = thread / (kTileF32 / kOwn) * kOwn;
  const int own_n = thread % (kTileF32 / kOwn) * kOwn;

  const auto copy = [&](float(&tile)[kTileKF32][kTileF32 + 4], const float* matrix,
                        const Operand& operand, std::int64_t outer, std::int64_t outer_end,
                        std::int64_t k) {
    for (int i = thread; i < kTileKF32 * kTileF32; i += kThreads) {
      // Neighbouring threads read neighbouring addresses.
      const int tile_k = operand.has_unit_k ? i % kTileKF32 : i / kTileF32;
      const int tile_outer = operand.has_unit_k ? i / kTileKF32 : i % kTileF32;
      const std::int64_t from_k = k + tile_k;
      const std::int64_t from_outer = outer + tile_outer;
      float value = 0;
      if (from_k < product.k && from_outer < outer_end) {
        value = operand.has_unit_k ? matrix[from_outer * operand.stride + from_k]
                                   : matrix[from_k * operand.stride + from_outer];
      }
      tile[tile_k][tile_outer] = value;
    }
  };

  for (std::int64_t tile = blockIdx.x; tile < tile_count<kTileF32>(product); tile += gridDim.x) {
    const Corner corner = corner_of<kTileF32>(product, tile);
    const float* const a =
        static_cast<const float*>(product.a.data) + corner.head * product.a.head_stride;
    const float* const b =
        static_cast<const float*>(product.b.data) + corner.head * product.b.head_stride;
    float c[kOwn][kOwn] = {};
    for (std::int64_t k = 0; k < product.k; k += kTileKF32) {
      copy(a_tile, a, product.a, corner.m, product.m, k);
      copy(b_tile, b, product.b, corner.n, product.n, k);
      __syncthreads();  // the tiles are there
#pragma unroll
      for (int i = 0; i < kTileKF32; ++i) {
        const float4 a4 = *reinterpret_cast<const float4*>(&a_tile[i][own_m]);
        const float4 b4 = *reinterpret_cast<const float4*>(&b_tile[i][own_n]);
        const float a_values[kOwn] = {a4.x, a4.y, a4.z, a4.w};
        const float b_values[kOwn] = {b4.x, b4.y, b4.z, b4.w};
#pragma unroll
        for (int m = 0; m < kOwn; ++m) {
#pragma unroll
          for (int n = 0; n < kOwn; ++n) c[m][n] = fmaf(a_values[m], b_values[n], c[m][n]);
        }
      }
      __syncthreads();  // the tiles have been used
    }
    float* const c_head = static_cast<float*>(product.c) + corner.head * product.c_head_stride;
    for (int m = 0; m < kOwn; ++m) {
      const std::int64_t row = corner.m + own_m + m;
      for (int n = 0; n < kOwn; ++n) {
        const std::int64_t column = corner.n + own_n + n;
        if (row >= product.m || column >= product.n) continue;
        float& element = c_head[row * product.c_stride + column];
        element = product.adds ? element + c[m][n] : c[m][n];
      }
    }
  }
}

// ---- The launchers.

/// The operand of a tensor [tokens, heads, x] if `by_tokens`, else [heads, rows, x].
Operand operand(const Tensor& tensor, bool by_tokens, bool has_unit_k) {
  const std::int64_t columns = tensor.shape[2];
  return {.data = tensor.data,
          .head_stride = tensor.stride[by_tokens ? 1 : 0],
          .stride = tensor.stride[by_tokens ? 0 : 1],
          .has_unit_k = has_unit_k,
          .aligned = has_aligned_rows(tensor) && columns % kVector == 0};
}

void set_result(Product& product, const Tensor& c, bool by_tokens, bool adds) {
  product.c = c.data;
  product.c_head_stride = c.stride[by_tokens ? 1 : 0];
  product.c_stride = c.stride[by_tokens ? 0 : 1];
  product.c_aligned = reinterpret_cast<std::uintptr_t>(c.data) % 4 == 0 &&
                      product.c_head_stride % 2 == 0 && product.c_stride % 2 == 0;
  product.adds = adds;
}

template <class T, class Out, bool kUnitKA, bool kUnitKB>
void multiply_with(const Product& product, cudaStream_t stream) {
  launch(multiply_kernel<T, Out, kUnitKA, kUnitKB>,
         {.blocks = std::min(tile_count<kTile>(product), kMaxBlocks),
          .threads = kThreads,
          .shared_bytes = sizeof(SharedStorage<T, kUnitKA, kUnitKB>),
          .stream = stream},
         product);
}

template <class T>
void multiply_as(const Product& product, cudaStream_t stream) {
  if (product.a.has_unit_k && product.b.has_unit_k) {
    multiply_with<T, T, true, true>(product, stream);
  } else if (product.a.has_unit_k) {
    multiply_with<T, T, true, false>(product, stream);
  } else if (product.adds) {
    multiply_with<T, float, false, false>(product, stream);
  } else {
    multiply_with<T, T, false, false>(product, stream);
  }
}

void multiply(const Product& product, DType dtype, cudaStream_t stream) {
  if (dtype == DType::bf16) return multiply_as<__nv_bfloat16>(product, stream);
  if (dtype == DType::f16) return multiply_as<__half>(product, stream);
  launch(multiply_f32_kernel,
         {.blocks = std::min(tile_count<kTileF32>(product), kMaxBlocks),
          .threads = kThreads,
          .stream = stream},
         product);
}

std::string why_not(const ValueProjectionForward& args, const Execution&) {
  return args.out.dtype == DType::f64 ? refusal::no_f64 : "";
}

std::string why_not(const ValueProjectionBackward& args, const Execution&) {
  return args.out.dtype == DType::f64 ? refusal::no_f64 : "";
}

void run(const ValueProjectionForward& args, const Execution& execution) {
  const DeviceGuard guard(args.out.device);
  Product product{.a = operand(args.out, true, true),
                  .b = operand(args.w_v, false, true),
                  .m = args.out.shape[0],
                  .n = args.w_v.shape[1],
                  .k = args.w_v.shape[2],
                  .heads = args.w_v.shape[0]};
  set_result(product, args.out_v, true, false);
  multiply(product, args.out.dtype, execution.stream);
}

void run(const ValueProjectionBackward& args, const Execution& execution) {
  const DeviceGuard guard(args.out.device);
  Product to_out{.a = operand(args.d_out_v, true, true),
                 .b = operand(args.w_v, false, false),
                 .m = args.out.shape[0],
                 .n = args.w_v.shape[2],
                 .k = args.w_v.shape[1],
                 .heads = args.w_v.shape[0]};
  set_result(to_out, args.d_out, true, false);
  multiply(to_out, args.out.dtype, execution.stream);

  Product to_w_v{.a = operand(args.d_out_v, true, false),
                 .b = operand(args.out, true, false),
                 .m = args.w_v.shape[1],
                 .n = args.w_v.shape[2],
                 .k = args.out.shape[0],
                 .heads = args.w_v.shape[0]};
  set_result(to_w_v, args.d_w_v, false, args.d_w_v.dtype == DType::f32);
  multiply(to_w_v, args.out.dtype, execution.stream);
}

}  // namespace

Kernels<ValueProjectionForward> kernels(std::type_identity<ValueProjectionForward>) {
  static const Kernel<ValueProjectionForward> kKernels[] = {
      value_projection::forward_sm90, {"general", why_not, no_workspace, run}};
  return kKernels;
}

Kernels<ValueProjectionBackward> kernels(std::type_identity<ValueProjectionBackward>) {
  static const Kernel<ValueProjectionBackward> kKernels[] = {
      value_projection::backward_sm90, {"general", why_not, no_workspace, run}};
  return kKernels;
}

}  // namespace winnow::cuda
