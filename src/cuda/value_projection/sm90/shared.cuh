// SPDX-License-Identifier: Apache-2.0
// What producer and consumers of value_projection's products share on sm_90: sizes, shared memory,
// the list of items.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/tensor_copy.cuh"
#include "cuda/value_projection/sm90/instructions.cuh"

namespace winnow::cuda::value_projection::sm90 {

inline constexpr int kM = 128;  // rows of an item, 64 for each consumer warpgroup
inline constexpr int kN = 256;  // columns of an item
inline constexpr int kK = 64;   // summed at a time
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
/// [heads, k, m or n].
struct Product {
  CUtensorMap a, b;
  CUtensorMap c{};              // [heads, n, m]; not of d_w
  void* d_w = nullptr;          // [parts, heads, m, n]
  std::int64_t d_w_stride = 0;  // of m
  std::int64_t d_w_head_stride = 0;
  std::int64_t d_w_part_stride = 0;
  bool adds = false;       // to d_w, which is f32
  std::int64_t items = 0;  // of a cluster
  int m_groups = 0;        // groups of items along m that a cluster computes together
  int n_groups = 0;
  int parts = 1;  // of k: more than one where d_w has few items
  int part_steps = 0;
  int m = 0, n = 0, steps = 0;
};

template <int kStages>
struct SharedStorage {
  /// Rows of c^T that a consumer warpgroup stores at a time.
  static constexpr int kStoreRows = kStages == 4 ? kN / 2 : kN;

  std::byte a[kStages][kM / 64 * kTileBytes];
  std::byte b[kStages][kN / 64 * kTileBytes];
  std::byte c[2][kStoreRows * kTileRowBytes];  // of each consumer warpgroup
  Barrier full[kStages];
  Barrier free[kStages];
};

/// The corner of an item, and the steps that it sums. The items of a head are consecutive, and
/// among them those that read the same part of b, so that all but one find it in L2.
struct Item {
  int m, n, part, head;
  int first_step, end_step;
};
template <int kCluster>
__device__ inline Item item_of(const Product& product, std::int64_t number, int rank) {
  const auto m_group = static_cast<int>(number % product.m_groups);
  number /= product.m_groups;
  const auto n_group = static_cast<int>(number % product.n_groups);
  number /= product.n_groups;
  const auto part = static_cast<int>(number % product.parts);
  return {.m = (m_group * kCluster + rank) * kM,
          .n = n_group * kN,
          .part = part,
          .head = static_cast<int>(number / product.parts),
          .first_step = part * product.part_steps,
          .end_step = min((part + 1) * product.part_steps, product.steps)};
}

}  // namespace winnow::cuda::value_projection::sm90
