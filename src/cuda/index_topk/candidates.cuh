// SPDX-License-Identifier: Apache-2.0
// The candidates of a long row: the keys that reach a score which is guessed from its sample. A
// thread block reads the row once, piece by piece.
#pragma once

#include <cstdint>

#include <cuda_pipeline.h>

#include "cuda/index_topk/bound.cuh"
#include "cuda/index_topk/row.cuh"
#include "cuda/index_topk/sample.cuh"

namespace winnow::cuda::index_topk {

inline constexpr int kOwnKeys = 8;  // neighbours that a thread takes of a piece of a row
inline constexpr int kPieceKeys = kOwnKeys * kThreads;
inline constexpr int kPieces = 2;  // underway at a time

/// Pieces of a row.
struct Pieces {
  alignas(16) float scores[kPieces][kPieceKeys];
};

/// Two counts of at most kPieceKeys, as one number, so that one sum adds both.
struct Counts {
  std::uint32_t packed;
  __device__ void add(bool is_above, bool is_equal) {
    packed += (is_above ? 1u : 0u) + (is_equal ? 1u << 16 : 0u);
  }
  __device__ std::uint32_t above() const { return packed & 0xffffu; }
  __device__ std::uint32_t equal() const { return packed >> 16; }
};

/// The shared memory of a block that selects from one row.
template <int kEach>
struct RowStorage {
  static constexpr std::uint32_t kMost = kEach * kThreads;  // candidates
  SharedStorage bound;
  Pieces pieces;
  std::uint32_t warp_counts[2][kWarps];
  std::uint32_t places[kMost];  // of candidates, in the row
  alignas(16) float scores[kMost];
  std::uint32_t before[kEach * kWarps];  // slots before those of 32 neighbouring candidates
};

/// Reads a row's scores piece by piece, each warp its own part of a piece, with the next pieces
/// underway in shared memory.
class RowReader {
 public:
  __device__ RowReader(Pieces& pieces, const Row& row)
      : own_(pieces.scores[0] + threadIdx.x / 32 * kWarpKeys), row_(row) {
    __pipeline_wait_prior(0);  // for what another reader left underway
#pragma unroll
    for (std::uint32_t piece = 0; piece < kPieces; ++piece) request(piece);
  }
  __device__ std::uint32_t pieces() const { return (row_.count() + kPieceKeys - 1) / kPieceKeys; }
  /// The place of this lane's first score of a piece.
  __device__ static std::uint32_t place(std::uint32_t piece) {
    return piece * kPieceKeys + threadIdx.x * kOwnKeys;
  }
  /// The lane's scores of a piece, which are neighbours; pieces are taken in their order.
  __device__ void take(std::uint32_t piece, float (&scores)[kOwnKeys]) const {
    __pipeline_wait_prior(kPieces - 1);
    __syncwarp();
    const auto* const fours = reinterpret_cast<const float4*>(stage(piece)) + threadIdx.x % 32 * 2;
#pragma unroll
    for (int i = 0; i < kOwnKeys / 4; ++i) {
      float4 four = fours[i];
      // The first and the last piece may reach beyond the window.
      if (piece == 0 || piece + 1 == pieces()) four = row_.in_window(four, place(piece) + i * 4);
      scores[i * 4] = four.x;
      scores[i * 4 + 1] = four.y;
      scores[i * 4 + 2] = four.z;
      scores[i * 4 + 3] = four.w;
    }
    __syncwarp();
    request(piece + kPieces);
  }

 private:
  static constexpr std::uint32_t kWarpKeys = 32 * kOwnKeys;

  __device__ float* stage(std::uint32_t piece) const { return own_ + piece % kPieces * kPieceKeys; }
  __device__ void request(std::uint32_t piece) const {
    const std::uint32_t warp = threadIdx.x / 32;
#pragma unroll
    for (std::uint32_t i = threadIdx.x % 32 * 4; i < kWarpKeys; i += 32 * 4) {
      const std::uint32_t place = piece * kPieceKeys + warp * kWarpKeys + i;
      if (place < row_.count())
        __pipeline_memcpy_async(stage(piece) + i, row_.scores + place, sizeof(float4));
    }
    __pipeline_commit();
  }

  float* own_;
  Row row_;
};

/// Candidates of a row, which are in shared memory.
struct Candidates {
  std::uint32_t count;  // more than kMost if there are too many
  std::uint32_t above;  // the guess; of those where not all equal ones are candidates
  Bound guess;
};

/// Makes the keys above the guess, and the first `equal` of those equal to it, candidates. kEqual:
/// not all equal ones are.
template <bool kEqual, int kEach>
__device__ Candidates collect(RowStorage<kEach>& shared, const RowReader& reader, Bound guess) {
  const std::uint32_t warp = threadIdx.x / 32;
  std::uint32_t count = 0;
  std::uint32_t equal_left = guess.equal;
  for (std::uint32_t piece = 0; piece < reader.pieces(); ++piece) {
    float scores[kOwnKeys];
    reader.take(piece, scores);
    Counts own{};
#pragma unroll
    for (const float score : scores)
      own.add(kEqual ? score > guess.least : score >= guess.least,
              kEqual && equal_left > 0 && score == guess.least);
    // A warp's counts stand beside those of the piece before, which others may still read.
    const Prefix lanes = warp_prefix_sum(own.packed);
    std::uint32_t* const of_warps = shared.warp_counts[piece % 2];
    if (threadIdx.x % 32 == 0) of_warps[warp] = lanes.all;
    __syncthreads();
    Counts before{lanes.before};
    Counts all{};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before.packed += of_warps[w];
      all.packed += of_warps[w];
    }
    const std::uint32_t end = count + all.above() + min(all.equal(), equal_left);
    if (end > shared.kMost) return {shared.kMost + 1, 0, guess};
    if (lanes.all != 0) {
      std::uint32_t to = count + before.above() + min(before.equal(), equal_left);
      std::uint32_t own_equal = equal_left - min(before.equal(), equal_left);
#pragma unroll
      for (int i = 0; i < kOwnKeys; ++i) {
        bool is_candidate = scores[i] >= guess.least;
        if (kEqual && scores[i] == guess.least) {
          is_candidate = own_equal > 0;
          own_equal -= is_candidate ? 1 : 0;
        }
        if (!is_candidate) continue;
        shared.places[to] = RowReader::place(piece) + i;
        shared.scores[to++] = scores[i];
      }
    }
    count = end;
    equal_left -= min(all.equal(), equal_left);
  }
  __syncthreads();
  return {count, kEqual ? count - (guess.equal - equal_left) : count, guess};
}

/// The same where equal scores count. It is a function of its own, because few rows need it and it
/// would take registers from the others.
template <int kEach>
__device__ __noinline__ Candidates collect_some_equal(RowStorage<kEach>& shared, RowReader reader,
                                                      Bound guess) {
  return collect<true>(shared, reader, guess);
}

/// Makes the keys that are likely selected candidates. The row's scores are underway while the
/// sample is examined.
template <int kEach>
__device__ Candidates collect_likely(RowStorage<kEach>& shared, const Row& row,
                                     const SampleValues& sample, const Guess& guess) {
  const RowReader reader(shared.pieces, row);
  const Bound likely = likely_bound(shared.bound, sample, guess);
  return likely.equal == kAllEqual ? collect<false>(shared, reader, likely)
                                   : collect_some_equal(shared, reader, likely);
}

}  // namespace winnow::cuda::index_topk
