// SPDX-License-Identifier: Apache-2.0
// Scores of index_topk for every shape and type, from compute capability 8.0 on; and replay, which
// is the same for keys from a list.
//
// A block holds a tile of 128 keys in shared memory, 128 elements of each at a time, and walks over
// the rows of a group, one row against 128 keys. bf16, f16 and e4m3 (as f16, which represents all
// of its values) use the tensor cores, 16 heads and 16 keys a warp; f32 uses fp32 arithmetic, one
// key and eight heads a thread. A group's rows reuse the tile where rows have at most 128 elements.
#include <cstdint>
#include <type_traits>

#include <cuda_fp8.h>

#include "cuda/common/mma.cuh"
#include "cuda/index_topk/kernels.h"

namespace winnow::cuda::index_topk {
namespace {

constexpr int kSlice = 128;  // elements of a key in shared memory at a time
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kHeadsAtOnce = 16;
static_assert(kWarps * 16 == kTileKeys);

/// The type of elements in shared memory and in the products.
template <class T>
using Operand = std::conditional_t<std::is_same_v<T, __nv_fp8_e4m3>, __half, T>;

template <class T>
__device__ Operand<T> operand(T x) {
  if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {
    return static_cast<__half>(x);
  } else {
    return x;
  }
}

/// f32 rows are padded by four banks, so that neighbouring keys do not conflict.
template <class T>
constexpr int kRowElements = kSlice + (std::is_same_v<T, float> ? 4 : kRowPadding);

template <class T>
struct SharedStorage {
  Operand<T> keys[kTileKeys][kRowElements<T>];
  Operand<T> query[kHeadsAtOnce][kRowElements<T>];
  float weights[kHeadsAtOnce];
};

// The keys of one tile: key(i) for i < kTileKeys, negative where there is none.
struct Neighbours {
  std::int64_t first;
  int keys;
  __device__ std::int64_t key(int i) const { return first + i < keys ? first + i : -1; }
};
struct Listed {
  const std::int32_t* indices;  // of the tile's slots
  int slots;                    // valid ones, from the tile's first on
  int begin, end;
  __device__ std::int64_t key(int i) const {
    if (i >= slots) return -1;
    const std::int32_t key = indices[i];
    return key >= begin && key < end ? key : -1;
  }
};

/// Scores one query row after another against the keys of a tile.
template <class T, class Keys>
class TileScores {
 public:
  __device__ TileScores(const ScoreInputs& inputs, SharedStorage<T>& shared, Keys keys)
      : inputs_(inputs), shared_(shared), keys_(keys) {}

  /// Calls store(i, score) for every i of the tile: the score of key(i), or anything where there is
  /// no key.
  template <class Store>
  __device__ void row(std::int64_t t, Store store) {
    float sums[2][2] = {};
    for (int head = 0; head < inputs_.heads; head += kHeadsAtOnce) {
      Products products{};
      for (int slice = 0; slice < inputs_.dim; slice += kSlice) {
        load(t, head, slice);
        add(products, min(kSlice, inputs_.dim - slice));
      }
      sum_heads(products, inputs_.heads - head, sums);
    }
    finish(sums, store);
  }

 private:
  // Tensor cores: lane 4g + c has heads g and g + 8, and keys 2c, 2c + 1, 2c + 8 and 2c + 9 of the
  // warp's 16. f32: a thread has key threadIdx.x % 128 and eight of the 16 heads.
  static constexpr bool kTensorCores = !std::is_same_v<T, float>;
  struct TensorProducts {
    float of[2][4];
  };
  struct PlainProducts {
    float of[kHeadsAtOnce / 2];
  };
  using Products = std::conditional_t<kTensorCores, TensorProducts, PlainProducts>;

  __device__ void load(std::int64_t t, int head, int slice) {
    const int width = min(kSlice, inputs_.dim - slice);
    const int padded = (width + 15) / 16 * 16;
    __syncthreads();
    if (slice != loaded_) {
      const T* const k = static_cast<const T*>(inputs_.k);
      for (int i = threadIdx.x; i < kTileKeys * padded; i += kThreads) {
        const int row = i / padded;
        const int d = i % padded;
        const std::int64_t key = keys_.key(row);
        const bool is_there = key >= 0 && d < width;
        shared_.keys[row][d] =
            is_there ? operand(k[key * inputs_.k_stride + slice + d]) : Operand<T>(0.0f);
      }
      loaded_ = slice;
    }
    const T* const q = static_cast<const T*>(inputs_.q) + t * inputs_.q_token_stride;
    for (int i = threadIdx.x; i < kHeadsAtOnce * padded; i += kThreads) {
      const int row = i / padded;
      const int d = i % padded;
      const bool is_there = head + row < inputs_.heads && d < width;
      shared_.query[row][d] = is_there
                                  ? operand(q[(head + row) * inputs_.q_head_stride + slice + d])
                                  : Operand<T>(0.0f);
    }
    if (threadIdx.x < kHeadsAtOnce) {
      const int h = head + static_cast<int>(threadIdx.x);
      shared_.weights[threadIdx.x] =
          h < inputs_.heads ? inputs_.weights[t * inputs_.weights_stride + h] : 0.0f;
    }
    __syncthreads();
  }

  __device__ void add(Products& products, int width) {
    if constexpr (kTensorCores) {
      const int lane = threadIdx.x % 32;
      const int first_key = static_cast<int>(threadIdx.x) / 32 * 16;
      for (int d = 0; d < width; d += 16) {
        const BlockOffset a_at = rows_first(lane);
        const BlockOffset b_at = columns_first(lane);
        std::uint32_t a[4];
        std::uint32_t b[4];
        load_fragments(a, &shared_.query[a_at.row][d + a_at.column]);
        load_fragments(b, &shared_.keys[first_key + b_at.row][d + b_at.column]);
        multiply_add<Operand<T>>(products.of[0], a, b[0], b[1]);
        multiply_add<Operand<T>>(products.of[1], a, b[2], b[3]);
      }
    } else {
      const float* const key = shared_.keys[threadIdx.x % kTileKeys];
      const int first_head = static_cast<int>(threadIdx.x) / kTileKeys * (kHeadsAtOnce / 2);
      for (int d = 0; d < width; d += 4) {
        const float4 x = *reinterpret_cast<const float4*>(key + d);
#pragma unroll
        for (int h = 0; h < kHeadsAtOnce / 2; ++h) {
          const float4 y = *reinterpret_cast<const float4*>(&shared_.query[first_head + h][d]);
          float& sum = products.of[h];
          sum = fmaf(x.x, y.x, sum);
          sum = fmaf(x.y, y.y, sum);
          sum = fmaf(x.z, y.z, sum);
          sum = fmaf(x.w, y.w, sum);
        }
      }
    }
  }

  __device__ float scale(int i) const {
    if (inputs_.k_scale == nullptr) return 1.0f;
    const std::int64_t key = keys_.key(i);
    return key < 0 ? 1.0f : inputs_.k_scale[key];
  }

  /// The first of a lane's two neighbouring keys in product `pair`, counted in the tile.
  __device__ static int tensor_key(int pair) {
    return static_cast<int>(threadIdx.x) / 32 * 16 + pair * 8 +
           static_cast<int>(threadIdx.x) % 4 * 2;
  }

  /// Adds weight * max(product, 0) of the first `heads` rows. The rows after them are left out,
  /// because their zeros times an infinite key are NaN.
  __device__ void sum_heads(const Products& products, int heads, float (&sums)[2][2]) {
    if constexpr (kTensorCores) {
      const int g = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float factor = scale(tensor_key(pair) + j);
          const float low = positive_part(products.of[pair][j] * factor);
          const float high = positive_part(products.of[pair][j + 2] * factor);
          if (g < heads) sums[pair][j] = fmaf(shared_.weights[g], low, sums[pair][j]);
          if (g + 8 < heads) sums[pair][j] = fmaf(shared_.weights[g + 8], high, sums[pair][j]);
        }
      }
    } else {
      const int first_head = static_cast<int>(threadIdx.x) / kTileKeys * (kHeadsAtOnce / 2);
#pragma unroll
      for (int h = 0; h < kHeadsAtOnce / 2; ++h) {
        if (first_head + h >= heads) break;
        sums[0][0] =
            fmaf(shared_.weights[first_head + h], positive_part(products.of[h]), sums[0][0]);
      }
    }
  }

  template <class Store>
  __device__ void finish(float (&sums)[2][2], Store store) {
    if constexpr (kTensorCores) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float sum = sums[pair][j];
#pragma unroll
          for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
          if (threadIdx.x % 32 < 4) store(tensor_key(pair) + j, sum);
        }
      }
    } else {
      __syncthreads();  // all threads are done with the query's rows
      float* const halves = &shared_.query[0][0];
      if (threadIdx.x >= kTileKeys) halves[threadIdx.x - kTileKeys] = sums[0][0];
      __syncthreads();
      if (threadIdx.x < kTileKeys) {
        store(static_cast<int>(threadIdx.x), sums[0][0] + halves[threadIdx.x]);
      }
    }
  }

  const ScoreInputs& inputs_;
  SharedStorage<T>& shared_;
  Keys keys_;
  int loaded_ = -1;  // the first element of the keys' slice in shared memory
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    index_topk_scores_kernel(const __grid_constant__ ScoreInputs inputs,
                             const __grid_constant__ Plan plan, int chunk) {
  extern __shared__ __align__(16) std::byte memory[];
  SharedStorage<T>& shared = *reinterpret_cast<SharedStorage<T>*>(memory);
  wait_for_previous_grid();
  for (Share share(plan, chunk, blockIdx.x, gridDim.x, threadIdx.x % 32); !share.empty();
       share.next_group()) {
    const std::int64_t tiles = plan.tiles(share.group());
    float* const scores_of_rows = plan.scores_of_group(share.group(), chunk);
    const int first_key = plan.first_key[share.group()];
    for (int tile = share.first_tile_of_group(); tile < share.end_tile_of_group(); ++tile) {
      const std::int64_t first = std::int64_t{tile} * kTileKeys;
      TileScores<T, Neighbours> scores(inputs, shared, {first_key + first, plan.keys});
      for (int r = 0; r < plan.rows_per_group; ++r) {
        const std::int64_t t = share.group() * plan.rows_per_group + r;
        if (t >= plan.tokens) break;
        float* const row = scores_of_rows + r * tiles * kTileKeys;
        float* const sample =
            scores_of_rows + plan.sample_offset(tiles) + (r * tiles + tile) * kTileSample;
        scores.row(t, [&](int i, float score) {
          row[first + i] = score;
          const Sampled sampled(tile, i / 16);
          if (sampled.any() && i % 8 == sampled.row) sample[sampled.place + i % 16 / 8] = score;
        });
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    index_topk_replay_kernel(const __grid_constant__ ScoreInputs inputs,
                             const __grid_constant__ ReplayParameters replay) {
  extern __shared__ __align__(16) std::byte memory[];
  SharedStorage<T>& shared = *reinterpret_cast<SharedStorage<T>*>(memory);
  for (std::int64_t item = blockIdx.x; item < replay.tokens * replay.tiles; item += gridDim.x) {
    const std::int64_t t = item / replay.tiles;
    const int first = static_cast<int>(item % replay.tiles) * kTileKeys;
    const int length = replay.lengths == nullptr ? replay.topk : replay.lengths[t];
    const Listed keys{replay.indices + t * replay.indices_stride + first,
                      min(length, replay.topk) - first, max(replay.begin[t], 0),
                      min(replay.end[t], replay.keys)};
    float* const row = replay.scores + t * replay.scores_stride + first;
    TileScores<T, Listed> scores(inputs, shared, keys);
    scores.row(t, [&](int i, float score) {
      if (first + i < replay.topk) row[i] = keys.key(i) < 0 ? -INFINITY : score;
    });
  }
}

/// Calls `function(T{})` with the type of the elements.
template <class Function>
auto with_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::bf16:
      return function(__nv_bfloat16{});
    case DType::f16:
      return function(__half{});
    case DType::f32:
      return function(float{});
    default:
      return function(__nv_fp8_e4m3{});
  }
}

constexpr int kBlocksPerSm = 4;

}  // namespace

ForChunk scores_general(const IndexTopkForward& args, const Execution& execution) {
  return with_type(args.q.dtype, [&]<class T>(T) -> ForChunk {
    const Step launch(index_topk_scores_kernel<T>,
                      {.blocks = device_properties(args.q.device).multiprocessors * kBlocksPerSm,
                       .threads = kThreads,
                       .shared_bytes = sizeof(SharedStorage<T>),
                       .stream = execution.stream,
                       .pdl = true});
    return [=, inputs = score_inputs(args)](const Plan& plan, int chunk, NodeChain* chain) {
      launch(chain, inputs, plan, chunk);
    };
  });
}

void replay(const IndexTopkForward& args, const Execution& execution) {
  const std::int64_t topk = args.indices.shape[1];
  const ReplayParameters replay{.indices = data_of<const std::int32_t>(args.indices),
                                .lengths = data_of<const std::int32_t>(args.lengths),
                                .begin = data_of<const std::int32_t>(args.begin),
                                .end = data_of<const std::int32_t>(args.end),
                                .scores = data_of<float>(args.scores),
                                .indices_stride = args.indices.stride[0],
                                .scores_stride = args.scores.stride[0],
                                .tokens = args.q.shape[0],
                                .tiles = (topk + kTileKeys - 1) / kTileKeys,
                                .topk = static_cast<int>(topk),
                                .keys = static_cast<int>(args.k.shape[0])};
  with_type(args.q.dtype, [&]<class T>(T) {
    launch(index_topk_replay_kernel<T>,
           {.blocks = blocks_for(replay.tokens * replay.tiles, 1),
            .threads = kThreads,
            .shared_bytes = sizeof(SharedStorage<T>),
            .stream = execution.stream},
           score_inputs(args), replay);
  });
}

}  // namespace winnow::cuda::index_topk
