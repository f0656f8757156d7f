// SPDX-License-Identifier: Apache-2.0
// What producer and consumers of value_projection's products share on sm_90: sizes, shared memory,
// the list of items.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/tensor_copy.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "cuda/value_projection/sm90/instructions.cuh"

namespace winnow::cuda::value_projection::sm90 {

inline constexpr int kM = 128;  // rows of an item, 64 for each consumer warpgroup
inline constexpr int kN = 256;  // columns of an item
inline constexpr int kK = 64;   // summed at a time
inline constexpr int kStages = 4;
inline constexpr int kTileBytes = 64 * kTileRowBytes;
inline constexpr int kWarpgroup = 128;
inline constexpr int kThreads = 3 * kWarpgroup;
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;

/// The three products of a head, c[m, n] = sum_k a[m, k] b[k, n].
enum class Kind {
  forward,  // out_v^T = w_v out^T           m: head_dim, n: tokens, k: v_dim
  d_out,    // d_out^T = w_v^T d_out_v^T     m: v_dim, n: tokens, k: head_dim
  d_w       // d_w_v = d_out_v^T out         m: head_dim, n: v_dim, k: tokens
};
template <Kind kKind>
inline constexpr bool kAMnMajor = kKind != Kind::forward;
template <Kind kKind>
inline constexpr bool kBMnMajor = kKind == Kind::d_w;

/// One product of all heads. a and b are [heads, m or n, k] where they are K-major, else
/// [heads, k, m or n]; c is [heads, n, m], that of d_w [parts * heads, m, n].
struct Product {
  CUtensorMap a, b, c;
  bool adds = false;  // to c: d_w that is f32
  int m_groups = 0;   // items of clusters along m
  int n_groups = 0;   // and along n
  int parts = 1;      // of k, of part_steps each: more than one where d_w has few items
  int heads = 0;
  int steps = 0;  // kK of k each
  int part_steps = 0;
  int first_block = 0;  // of those that compute this product
  // The distance from one of a cluster's items to its next, digit by digit as Items counts.
  int m_stride = 0, n_stride = 0, part_stride = 0, head_stride = 0;
};

struct SharedStorage {
  /// Rows of c^T that a consumer warpgroup stores at a time.
  static constexpr int kStoreRows = kN / 2;

  std::byte a[kStages][kM / 64 * kTileBytes];
  std::byte b[kStages][kN / 64 * kTileBytes];
  std::byte c[2][kStoreRows * kTileRowBytes];  // of each consumer warpgroup
  Barrier full[kStages];
  Barrier free[kStages];

  /// One thread calls this before the blocks of the cluster meet.
  __device__ void init_barriers() {
    constexpr int kConsumerWarps = 2 * kWarpgroup / 32;
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      free[i].init(2 * kConsumerWarps);
    }
    fence_barrier_init();
  }
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);

/// Two blocks that compute neighbouring items: along m, then both need the same columns of b, or
/// along n, then both need the same rows of a. Each copies half of those for both.
enum class Pair { along_m, along_n };

/// The items of a thread block. A cluster takes every clusters-th pair of items. Those of a head
/// are consecutive, and among them those that read the same part of b, so that all but one find it
/// in L2.
template <Pair kPair>
struct Items {
  const Product& product;
  const int rank = block_rank();  // of this block in its cluster
  int m_group, n_group, part, head;

  __device__ explicit Items(const Product& product) : product(product) {
    int number = (static_cast<int>(blockIdx.x) - product.first_block) / 2;
    m_group = number % product.m_groups;
    number /= product.m_groups;
    n_group = number % product.n_groups;
    number /= product.n_groups;
    part = number % product.parts;
    head = number / product.parts;
  }
  __device__ bool done() const { return head >= product.heads; }
  __device__ void next() {
    const auto add = [](int& digit, int stride, int base, bool carry) {
      digit += stride + carry;
      const bool wraps = digit >= base;
      if (wraps) digit -= base;
      return wraps;
    };
    const bool next_n = add(m_group, product.m_stride, product.m_groups, false);
    const bool next_part = add(n_group, product.n_stride, product.n_groups, next_n);
    const bool next_head = add(part, product.part_stride, product.parts, next_part);
    head += product.head_stride + next_head;
  }

  __device__ int m() const { return (kPair == Pair::along_m ? m_group * 2 + rank : m_group) * kM; }
  __device__ int n() const { return (kPair == Pair::along_n ? n_group * 2 + rank : n_group) * kN; }
  __device__ int first_step() const { return part * product.part_steps; }
  __device__ int end_step() const { return min((part + 1) * product.part_steps, product.steps); }
  __device__ int step_count() const { return end_step() - first_step(); }
};

}  // namespace winnow::cuda::value_projection::sm90
