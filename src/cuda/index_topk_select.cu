// SPDX-License-Identifier: Apache-2.0
// The selection of index_topk, exact on every input.
//
// What is selected depends on the scores alone, not on the order in which threads come: a bound
// splits a row's keys, and equal scores at the bound go by key.
//   whole rows  have a slot for each of their keys, and are to stand in their order. A warp takes
//               one.
//   Others take a thread block each, with candidates in its registers, in the order of their keys:
//   short rows  are candidates, all of their keys.
//   long rows   have more. Keys spread over the row tell a score that is likely below the bound. A
//               pass over the row marks what reaches it, one bit a key; those are the candidates.
//   Where that does not do, histograms of the whole row find the bound: with more slots than
//   registers, where the guess has left fewer candidates than slots or more than registers, and
//   where too many scores are close to the bound or infinite.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/index_topk/bound.cuh"
#include "cuda/index_topk/kernels.h"

namespace winnow::cuda::index_topk {
namespace {

constexpr int kBlockKeys = 32 * 4;  // that a warp looks at together, four neighbours a lane
// Blocks of keys whose marks are in shared memory at a time: few enough for the scores of all rows
// that are selected from at a time to be in the L2 cache still when those that are marked are read
// again.
constexpr int kMarkedBlocks = 128;
constexpr int kSample = 4;  // fours of a row that each thread looks at first
constexpr int kSampleKeys = kSample * 4 * kThreads;

struct Outputs {
  std::int32_t* indices;
  std::int32_t* lengths;  // or null
  float* scores;          // or null
  float* scratch;         // [blocks, topk]: scores to sort by where there is no output for them
  std::int64_t indices_row, scores_row;
  int topk;
  bool by_score;
};

/// Stands for a key outside of the window: never selected.
__device__ float no_score() { return __uint_as_float(0x7fff'ffffu); }

__device__ bool can_be_selected(float score) { return score > -INFINITY; }

__device__ void spread(float4 four, float (&scores)[4]) {
  scores[0] = four.x;
  scores[1] = four.y;
  scores[2] = four.z;
  scores[3] = four.w;
}

struct Row {
  const float* scores;  // of key `first` and behind
  int first;            // a multiple of 4
  int begin, end;       // the window
  __device__ std::uint32_t count() const { return static_cast<std::uint32_t>(end - first); }
  /// Whether the key first + i is in the window.
  __device__ bool sees(std::uint32_t i) const {
    return static_cast<int>(i) >= begin - first && i < count();
  }
  /// Of the key first + i; NaN if it cannot be selected.
  __device__ float score(std::uint32_t i) const {
    const float score = sees(i) ? scores[i] : no_score();
    return can_be_selected(score) ? score : no_score();
  }
  /// Four neighbours from first + i on, without those outside of the window; i is a multiple of 4.
  __device__ float4 in_window(float4 four, std::uint32_t i) const {
    if (i > 0 && i + 4 <= count()) return four;
    if (!sees(i)) four.x = no_score();
    if (!sees(i + 1)) four.y = no_score();
    if (!sees(i + 2)) four.z = no_score();
    if (!sees(i + 3)) four.w = no_score();
    return four;
  }
  /// Fours from the places that `place(b)` gives, to be looked at through `in_window`, when all
  /// loads are on their way.
  template <int kCount, class Place>
  __device__ void load(float4 (&fours)[kCount], Place place) const {
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
      const std::uint32_t i = place(b);
      fours[b] = i < count() ? __ldcg(reinterpret_cast<const float4*>(scores + i)) : float4{};
    }
  }
};

/// values[first], ..., values[count - 1] = value, by a number of threads, in fours where they are
/// aligned.
template <class T>
__device__ void fill(T* values, int first, int count, T value, int thread, int threads) {
  constexpr int kFour = 4;
  struct alignas(kFour * sizeof(T)) Four {
    T of[kFour];
  };
  const auto address = reinterpret_cast<std::uintptr_t>(values + first) / sizeof(T);
  const int head = min(static_cast<int>((kFour - address % kFour) % kFour), count - first);
  for (int i = first + thread; i < first + head; i += threads) values[i] = value;
  first += head;
  const int behind_fours = first + (count - first) / kFour * kFour;
  for (int i = first + thread * kFour; i < behind_fours; i += threads * kFour) {
    *reinterpret_cast<Four*>(values + i) = {value, value, value, value};
  }
  for (int i = behind_fours + thread; i < count; i += threads) values[i] = value;
}

struct Slots {
  std::int32_t* indices;
  float* scores;  // or null
  int topk;

  __device__ void set(int slot, int key, float score) const {
    indices[slot] = key;
    if (scores != nullptr) scores[slot] = score + 0.0f;  // -0 is 0
  }
  /// Four neighbours.
  __device__ void set_four(int slot, int key, const float (&of)[4]) const {
    const auto is_aligned = [&](const auto* values) {
      return reinterpret_cast<std::uintptr_t>(values + slot) % 16 == 0;
    };
    if (!is_aligned(indices) || (scores != nullptr && !is_aligned(scores))) {
#pragma unroll
      for (int j = 0; j < 4; ++j) set(slot + j, key + j, of[j]);
      return;
    }
    *reinterpret_cast<int4*>(indices + slot) = {key, key + 1, key + 2, key + 3};
    if (scores == nullptr) return;
    *reinterpret_cast<float4*>(scores + slot) = {of[0] + 0.0f, of[1] + 0.0f, of[2] + 0.0f,
                                                 of[3] + 0.0f};
  }
  /// By all threads of a block, or of a warp.
  __device__ void clear_from(int slot, int thread, int threads) const {
    fill(indices, slot, topk, -1, thread, threads);
    if (scores != nullptr) fill(scores, slot, topk, -INFINITY, thread, threads);
  }
};

/// What can be selected of a row that has a slot for each of its keys, by a warp; returns how many.
__device__ int select_whole(const Row& row, const Slots& slots) {
  constexpr int kLoads = 4;
  const std::uint32_t own = threadIdx.x % 32 * 4;
  int written = 0;
  for (std::uint32_t base = 0; base < row.count(); base += kLoads * kBlockKeys) {
    float4 fours[kLoads];
    row.load(fours, [&](int b) { return base + b * kBlockKeys + own; });
#pragma unroll
    for (int b = 0; b < kLoads; ++b) {
      const std::uint32_t place = base + b * kBlockKeys + own;
      float scores[4];
      spread(row.in_window(fours[b], place), scores);
      std::uint32_t selected = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) selected += can_be_selected(scores[j]) ? 1 : 0;
      const int key = row.first + static_cast<int>(place);
      if (__all_sync(kAllLanes, selected == 4)) {
        slots.set_four(written + static_cast<int>(own), key, scores);
        written += kBlockKeys;
        continue;
      }
      const Prefix prefix = warp_prefix_sum(selected);
      int slot = written + static_cast<int>(prefix.before);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (can_be_selected(scores[j])) slots.set(slot++, key + j, scores[j]);
      }
      written += static_cast<int>(prefix.all);
    }
  }
  return written;
}

/// What a block keeps of the row that it selects from.
template <int kEach>
struct RowStorage {
  static constexpr std::uint32_t kMost = kEach * kThreads;  // candidates
  SharedStorage bound;
  uint4 marks[kMarkedBlocks];   // of keys: bit i of word j is that of key 4 i + j of a block
  std::uint32_t places[kMost];  // of candidates, in the row
  float scores[kMost];
  std::uint32_t before[kEach * kWarps];  // slots before those of 32 neighbouring candidates
};

/// The range of all threads' scores. NaN are none.
template <int kCount>
__device__ Range range_of_scores(SharedStorage& shared, const float (&scores)[kCount]) {
  float low = INFINITY;
  float high = -INFINITY;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    low = fminf(low, scores[i]);
    high = fmaxf(high, scores[i]);
  }
  return range_of(shared, high > -INFINITY ? Range{image_of(low), image_of(high)} : kNothing);
}

template <int kCount>
__device__ void count_scores(SharedStorage& shared, const EvenBins& bins,
                             const float (&scores)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (can_be_selected(scores[i])) atomicAdd(&shared.bins[bins.bin(scores[i])], 1u);
  }
}

/// A score that more than topk keys of a row reach, as far as some of them can tell; NaN if they
/// cannot.
__device__ float likely_least(SharedStorage& shared, const Row& row, int topk) {
  // Runs of 16 keys, 64 bytes, at equal distances, in 2^32nds of a run; four lanes have one. More
  // of them for very long rows.
  constexpr std::uint32_t kKeysOfRound = 65536;
  const std::uint32_t rounds = (row.count() + kKeysOfRound - 1) / kKeysOfRound;
  const std::uint32_t runs = rounds * kSample * kThreads / 4;
  const std::uint64_t distance = (std::uint64_t{row.count() / 16} << 32) / runs;
  EvenBins bins;
  for (std::uint32_t round = 0; round < rounds; ++round) {
    const auto place = [&](int b) {
      const std::uint32_t number = (round * kSample + b) * kThreads + threadIdx.x;
      return static_cast<std::uint32_t>(number / 4 * distance >> 32) * 16 + number % 4 * 4;
    };
    float4 loaded[kSample];
    row.load(loaded, place);
    float scores[kSample * 4];
#pragma unroll
    for (int b = 0; b < kSample; ++b) {
      const float4 four = row.in_window(loaded[b], place(b));
      scores[4 * b] = four.x;
      scores[4 * b + 1] = four.y;
      scores[4 * b + 2] = four.z;
      scores[4 * b + 3] = four.w;
    }
    if (round == 0) {
      clear_bins(shared);
      const Range range = range_of_scores(shared, scores);
      bins = EvenBins(range);
      if (range.low >= range.high || !bins.work()) return no_score();
    }
    count_scores(shared, bins, scores);
  }
  __syncthreads();
  // Four standard deviations more than their share.
  const float share = static_cast<float>(topk) * static_cast<float>(rounds * kSampleKeys) /
                      static_cast<float>(row.count());
  const auto wanted = static_cast<std::uint32_t>(share + 4 * sqrtf(share)) + 8;
  const WantedBin found = find_bin(shared, wanted);
  return found.all < wanted ? no_score() : bins.lowest(found.bin);
}

/// A bit for each lane and each of its four scores: whether it reaches `least`.
__device__ uint4 reaching(float4 four, float least) {
  return {__ballot_sync(kAllLanes, four.x >= least), __ballot_sync(kAllLanes, four.y >= least),
          __ballot_sync(kAllLanes, four.z >= least), __ballot_sync(kAllLanes, four.w >= least)};
}

/// Marks keys that reach `least`, of `blocks` blocks from `first` on.
__device__ void mark(uint4* marks, const Row& row, float least, std::uint32_t first,
                     std::uint32_t blocks) {
  constexpr int kLoads = 8;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t warp = threadIdx.x / 32;
  const auto* const fours = reinterpret_cast<const float4*>(row.scores + first * kBlockKeys) + lane;
  // The first and the last block may reach beyond the window. Loads without a condition are on
  // their way together: the last of the others is marked more than once.
  for (std::uint32_t block = 1 + warp; block < blocks - 1; block += kLoads * kWarps) {
    const auto number = [&](int b) { return min(block + b * kWarps, blocks - 2); };
    float4 loaded[kLoads];
#pragma unroll
    for (int b = 0; b < kLoads; ++b) loaded[b] = __ldcg(fours + number(b) * 32);
#pragma unroll
    for (int b = 0; b < kLoads; ++b) {
      const uint4 own = reaching(loaded[b], least);
      if (lane == 0) marks[number(b)] = own;
    }
  }
  if (warp < 2) {
    const std::uint32_t block = warp == 0 ? 0 : blocks - 1;
    const std::uint32_t place = (first + block) * kBlockKeys + lane * 4;
    float4 loaded[1];
    row.load(loaded, [&](int) { return place; });
    const uint4 own = reaching(row.in_window(loaded[0], place), least);
    if (lane == 0) marks[block] = own;
  }
}

/// All keys that reach `least` become candidates; returns how many they are, or more than kMost if
/// there are more.
template <int kEach>
__device__ std::uint32_t collect(RowStorage<kEach>& shared, const Row& row, float least) {
  std::uint32_t count = 0;
  const std::uint32_t all_blocks = (row.count() + kBlockKeys - 1) / kBlockKeys;
  for (std::uint32_t first = 0; first < all_blocks; first += kMarkedBlocks) {
    const std::uint32_t blocks = min(all_blocks - first, std::uint32_t{kMarkedBlocks});
    mark(shared.marks, row, least, first, blocks);
    __syncthreads();
    // Neighbouring blocks for each thread.
    const std::uint32_t each = (blocks + kThreads - 1) / kThreads;
    const std::uint32_t own = min(threadIdx.x * each, blocks);
    const std::uint32_t behind = min(own + each, blocks);
    std::uint32_t of_thread = 0;
    for (std::uint32_t block = own; block < behind; ++block) {
      const uint4 marks = shared.marks[block];
      of_thread += __popc(marks.x) + __popc(marks.y) + __popc(marks.z) + __popc(marks.w);
    }
    const Prefix prefix = prefix_sum(shared.bound, of_thread);
    if (count + prefix.all > shared.kMost) return shared.kMost + 1;
    std::uint32_t to = count + prefix.before;
    for (std::uint32_t block = own; block < behind; ++block) {
      const uint4 marks = shared.marks[block];
      for (unsigned lanes = marks.x | marks.y | marks.z | marks.w; lanes != 0; lanes &= lanes - 1) {
        const int lane = __ffs(static_cast<int>(lanes)) - 1;
        const std::uint32_t place = (first + block) * kBlockKeys + lane * 4;
        if (marks.x >> lane & 1) shared.places[to++] = place;
        if (marks.y >> lane & 1) shared.places[to++] = place + 1;
        if (marks.z >> lane & 1) shared.places[to++] = place + 2;
        if (marks.w >> lane & 1) shared.places[to++] = place + 3;
      }
    }
    __syncthreads();
    for (std::uint32_t i = count + threadIdx.x; i < count + prefix.all; i += kThreads)
      shared.scores[i] = __ldcg(row.scores + shared.places[i]);
    count += prefix.all;
  }
  __syncthreads();
  return count;
}

/// Selects from `count` candidates, up to kEach for each thread, of which number i has the score
/// that `score(i)` gives and is at `place(i)`; returns how many, or -1 if scores are too close for
/// this.
template <int kEach, int kMostEach, class Score, class Place>
__device__ int select_from(RowStorage<kMostEach>& shared, const Row& row, const Slots& slots,
                           std::uint32_t count, Score score, Place place) {
  if (count == 0) return 0;
  const auto number = [](int n) { return static_cast<std::uint32_t>(n * kThreads + threadIdx.x); };
  float scores[kEach];
  // Loads without a condition are on their way together.
#pragma unroll
  for (int n = 0; n < kEach; ++n) scores[n] = score(min(number(n), count - 1));
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    if (number(n) >= count || !can_be_selected(scores[n])) scores[n] = no_score();
  }
  float least = -INFINITY;
  std::uint32_t last = 0;  // of those that equal it
  if (count > slots.topk) {
    clear_bins(shared.bound);
    const Range range = range_of_scores(shared.bound, scores);
    const EvenBins bins(range);
    if (range.low >= range.high || !bins.work()) return -1;
    count_scores(shared.bound, bins, scores);
    __syncthreads();
    const WantedBin found = find_bin(shared.bound, slots.topk);
    if (found.all > slots.topk) {
      if (found.of_bin > kFew) return -1;
#pragma unroll
      for (int n = 0; n < kEach; ++n) {
        if (can_be_selected(scores[n]) && bins.bin(scores[n]) == found.bin)
          add_few(shared.bound, image_of(scores[n]), number(n));
      }
      const Bound bound = bound_of_few(shared.bound, found.of_bin, slots.topk - found.above);
      least = score_of(bound.image);
      last = bound.last;
    }
  }
  // How many are before those of a warp.
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t* const before = shared.before + threadIdx.x / 32;
  std::uint32_t kept = 0;  // a bit for each
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const bool is_kept = scores[n] > least || (scores[n] == least && number(n) <= last);
    const unsigned lanes = __ballot_sync(kAllLanes, is_kept);
    if (is_kept) kept |= 1u << n;
    if (lane == 0) before[n * kWarps] = __popc(lanes);
  }
  __syncthreads();
  static_assert(kEach * kWarps <= kThreads && kEach <= 32);
  const bool has_sum = threadIdx.x < kEach * kWarps;
  const Prefix prefix = prefix_sum(shared.bound, has_sum ? shared.before[threadIdx.x] : 0);
  if (has_sum) shared.before[threadIdx.x] = prefix.before;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const bool is_kept = kept >> n & 1;
    const unsigned lanes = __ballot_sync(kAllLanes, is_kept);
    const std::uint32_t slot = before[n * kWarps] + __popc(lanes & ((1u << lane) - 1));
    if (is_kept)
      slots.set(static_cast<int>(slot), row.first + static_cast<int>(place(number(n))), scores[n]);
  }
  return static_cast<int>(prefix.all);
}

/// Selects from a row for any number of slots and any scores; returns how many.
template <int kEach>
__device__ int select_many(RowStorage<kEach>& shared, const Row& row, const Slots& slots) {
  const auto image_at = [&](std::uint32_t i) { return image_of(row.score(i)); };
  const Bound bound = find_bound(shared.bound, slots.topk, [&](auto use) {
    for (std::uint32_t i = threadIdx.x; i < row.count(); i += kThreads) use(image_at(i), i);
  });
  int written = 0;
  for (std::uint32_t first = 0; first < row.count(); first += kThreads) {
    const std::uint32_t i = first + threadIdx.x;
    const std::uint32_t image = i < row.count() ? image_at(i) : 0;
    const bool is_kept = image != 0 && bound.keeps(image, i);
    const Prefix prefix = prefix_sum(shared.bound, is_kept ? 1 : 0);
    if (is_kept) {
      slots.set(written + static_cast<int>(prefix.before), row.first + static_cast<int>(i),
                score_of(image));
    }
    written += static_cast<int>(prefix.all);
  }
  return written;
}

/// Selects from a row; returns how many.
template <int kEach>
__device__ int select(RowStorage<kEach>& shared, const Row& row, const Slots& slots) {
  constexpr int kFewer = kEach * 3 / 4;  // as most rows have
  int written = -1;
  if (row.count() <= shared.kMost) {
    // The row may begin with up to three keys before the window.
    const std::uint32_t first = row.begin - row.first;
    written = select_from<kEach>(
        shared, row, slots, row.count() - first,
        [&](std::uint32_t i) { return row.scores[first + i]; },
        [&](std::uint32_t i) { return first + i; });
  } else if (slots.topk <= shared.kMost) {
    const float least = likely_least(shared.bound, row, slots.topk);
    const std::uint32_t count = collect(shared, row, least);
    const auto score = [&](std::uint32_t i) { return shared.scores[i]; };
    const auto place = [&](std::uint32_t i) { return shared.places[i]; };
    if (count >= slots.topk && count <= kFewer * kThreads) {
      written = select_from<kFewer>(shared, row, slots, count, score, place);
    } else if (count >= slots.topk && count <= shared.kMost) {
      written = select_from<kEach>(shared, row, slots, count, score, place);
    }
  }
  if (written < 0) written = select_many(shared, row, slots);
  return written;
}

/// Whether the first stands before the second: larger scores first, equal ones by key.
__device__ bool stands_before(float score, int key, float other_score, int other_key) {
  return score > other_score || (score == other_score && key < other_key);
}

/// Sorts by score: Batcher's merge exchange, whose comparisons for any length are those of the next
/// power of two within it.
__device__ void sort_by_score(std::int32_t* keys, float* scores, int count) {
  int top = 1;
  while (top < count) top *= 2;
  for (int p = top / 2; p > 0; p /= 2) {
    int q = top / 2;
    int r = 0;
    int d = p;
    while (true) {
      __syncthreads();
      for (int i = threadIdx.x; i + d < count; i += kThreads) {
        if ((i & p) != r || !stands_before(scores[i + d], keys[i + d], scores[i], keys[i]))
          continue;
        const float score = scores[i];
        const std::int32_t key = keys[i];
        scores[i] = scores[i + d];
        keys[i] = keys[i + d];
        scores[i + d] = score;
        keys[i + d] = key;
      }
      if (q == p) break;
      d = q - p;
      q /= 2;
      r = p;
    }
  }
  __syncthreads();
}

/// The row's scores and window.
__device__ Row row_of(const Plan& plan, int chunk, std::int64_t t) {
  const std::int64_t group = t / plan.rows_per_group;
  const int first = plan.first_key[group];
  Row row{plan.scores_of_group(group, chunk) + t % plan.rows_per_group * plan.row_width(group),
          first, plan.window_begin(t), plan.window_end(t)};
  if (row.end <= row.begin) row.end = row.begin = first;
  // Nothing before the window is read, but for the rest of its four neighbours.
  const int skipped = (row.begin - first) / 4 * 4;
  row.scores += skipped;
  row.first += skipped;
  return row;
}

__device__ Slots slots_of(const Outputs& outputs, std::int64_t t) {
  float* const scores = outputs.scores != nullptr ? outputs.scores + t * outputs.scores_row
                        : outputs.by_score
                            ? outputs.scratch + blockIdx.x * std::int64_t{outputs.topk}
                            : nullptr;
  return {outputs.indices + t * outputs.indices_row, scores, outputs.topk};
}

/// The rows of the chunk that are left to do.
struct Rows {
  std::int64_t first;
  std::int64_t behind;
};

__device__ bool is_whole(const Plan& plan, const Outputs& outputs, std::int64_t t) {
  return !outputs.by_score && plan.window_end(t) - plan.window_begin(t) <= outputs.topk;
}

/// The rows that a warp can do, one after another.
__device__ void select_whole_rows(const Plan& plan, int chunk, const Outputs& outputs, Rows rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t step = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t t = rows.first + std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
       t < rows.behind; t += step) {
    if (plan.is_done(t) || !is_whole(plan, outputs, t)) continue;
    const Slots slots = slots_of(outputs, t);
    const int written = select_whole(row_of(plan, chunk, t), slots);
    slots.clear_from(written, lane, 32);
    if (outputs.lengths != nullptr && lane == 0) outputs.lengths[t] = written;
  }
}

template <int kEach>
__device__ void select_row(RowStorage<kEach>& shared, const Plan& plan, int chunk,
                           const Outputs& outputs, std::int64_t t) {
  const Slots slots = slots_of(outputs, t);
  const int written = select(shared, row_of(plan, chunk, t), slots);
  slots.clear_from(written, static_cast<int>(threadIdx.x), kThreads);
  if (outputs.by_score) sort_by_score(slots.indices, slots.scores, written);
  if (outputs.lengths != nullptr && threadIdx.x == 0) outputs.lengths[t] = written;
  __syncthreads();
}

/// kEach: the most candidates of a thread.
template <int kEach>
__global__ void __launch_bounds__(kThreads, kEach > 16 ? 2 : 4)
    index_topk_select_kernel(const __grid_constant__ Plan plan, int chunk,
                             const __grid_constant__ Outputs outputs) {
  extern __shared__ __align__(16) std::byte memory[];
  RowStorage<kEach>& shared = *reinterpret_cast<RowStorage<kEach>*>(memory);

  wait_for_launch_before();
  const std::int64_t group_rows = plan.rows_per_group;
  const Rows rows{plan.first_group[chunk] * group_rows,
                  min(plan.first_group[chunk + 1] * group_rows, plan.tokens)};
  select_whole_rows(plan, chunk, outputs, rows);
  // The block takes every gridDim.x-th of the others. All of its warps look at the next 32.
  const std::int64_t step = gridDim.x;
  for (std::int64_t first = rows.first + blockIdx.x; first < rows.behind; first += 32 * step) {
    const std::int64_t t = first + threadIdx.x % 32 * step;
    unsigned own = __ballot_sync(
        kAllLanes, t < rows.behind && !plan.is_done(t) && !is_whole(plan, outputs, t));
    for (; own != 0; own &= own - 1) {
      const int number = __ffs(static_cast<int>(own)) - 1;
      select_row(shared, plan, chunk, outputs, first + number * step);
    }
  }
}

/// Whether 4096 candidates are enough: the guess adds some to the slots.
bool has_few_slots(const IndexTopkForward& args) { return args.indices.shape[1] <= 2560; }

std::int64_t blocks_of(const IndexTopkForward& args) {
  const int at_once = has_few_slots(args) ? 4 : 2;
  return std::min<std::int64_t>(at_once * device_properties(args.q.device).multiprocessors,
                                args.q.shape[0]);
}

template <int kEach>
ForChunk launcher_for(const IndexTopkForward& args, const Plan& plan, float* scratch,
                      const Execution& execution) {
  const Launcher launch(index_topk_select_kernel<kEach>, {.blocks = blocks_of(args),
                                                          .threads = kThreads,
                                                          .shared_bytes = sizeof(RowStorage<kEach>),
                                                          .stream = execution.stream,
                                                          .early = true});
  const Outputs outputs{.indices = data_of<std::int32_t>(args.indices),
                        .lengths = data_of<std::int32_t>(args.lengths),
                        .scores = data_of<float>(args.scores),
                        .scratch = scratch,
                        .indices_row = args.indices.stride[0],
                        .scores_row = args.scores ? args.scores.stride[0] : 0,
                        .topk = static_cast<int>(args.indices.shape[1]),
                        .by_score = args.order == SlotOrder::by_score};
  return [=](int chunk) { launch(plan, chunk, outputs); };
}

}  // namespace

std::int64_t select_scratch(const IndexTopkForward& args) {
  if (args.order != SlotOrder::by_score || args.scores) return 0;
  return blocks_of(args) * args.indices.shape[1];
}

ForChunk select(const IndexTopkForward& args, const Plan& plan, float* scratch,
                const Execution& execution) {
  return has_few_slots(args) ? launcher_for<16>(args, plan, scratch, execution)
                             : launcher_for<32>(args, plan, scratch, execution);
}

}  // namespace winnow::cuda::index_topk
