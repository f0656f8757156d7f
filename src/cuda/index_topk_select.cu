// SPDX-License-Identifier: Apache-2.0
// The selection of index_topk: exact, from one pass over a row's scores.
//
// What is selected depends on the scores alone, not on the order in which threads come: a bound
// splits a row's keys, and equal scores at the bound go by key.
//   whole rows  have a slot for each of their keys. A warp takes one.
//   Others take a thread block each:
//   short rows  have all their scores in registers.
//   long rows   keep candidates in shared memory. Keys spread over the row tell a score that is
//               likely below the bound; what reaches it is taken. When there is no room for more,
//               the bound of those that are there drops the others, and from then on only keys
//               above it are taken. If too few were taken, all keys are looked at again. In the end
//               a bit for each selected key, counted in the order of keys, says where its slot is.
//   long rows with more slots than shared memory has room for read the scores several times.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/index_topk/bound.cuh"
#include "cuda/index_topk/kernels.h"
#include "cuda/mma.cuh"

namespace winnow::cuda::index_topk {
namespace {

constexpr int kBlocksAtOnce = 4;          // with the usual topk
constexpr int kBlockKeys = kThreads * 4;  // of which each thread has four neighbours
constexpr int kHeld = 4;                  // blocks of keys that fit into registers
constexpr int kShortKeys = kHeld * kBlockKeys;
constexpr int kAtOnce = 2;             // blocks of a long row that are looked at together
constexpr int kRoom = 3 * kBlockKeys;  // for candidates beside topk of them
constexpr int kMaxKept = 16384;        // the most topk with candidates in shared memory

struct Outputs {
  std::int32_t* indices;
  std::int32_t* lengths;  // or null
  float* scores;          // or null
  float* scratch;         // [blocks, topk]: scores to sort by where there is no output for them
  std::int64_t indices_row, scores_row;
  int topk;
  bool by_score;
};

__device__ void spread(uint4 four, std::uint32_t (&words)[4]) {
  words[0] = four.x;
  words[1] = four.y;
  words[2] = four.z;
  words[3] = four.w;
}

struct Row {
  const std::uint32_t* images;  // of key `first` and behind
  int first;                    // a multiple of 4
  int begin, end;               // the window
  __device__ std::uint32_t count() const { return static_cast<std::uint32_t>(end - first); }
  /// Whether the key first + i is in the window.
  __device__ bool sees(std::uint32_t i) const {
    return static_cast<int>(i) >= begin - first && i < count();
  }
  /// Four neighbours from first + i on, with 0 for those outside of the window; i is a multiple of
  /// 4.
  __device__ uint4 in_window(uint4 four, std::uint32_t i) const {
    if (i > 0 && i + 4 <= count()) return four;
    if (!sees(i)) four.x = 0;
    if (!sees(i + 1)) four.y = 0;
    if (!sees(i + 2)) four.z = 0;
    if (!sees(i + 3)) four.w = 0;
    return four;
  }
  /// Fours from the places that `place(b)` gives. All loads are on their way before the first is
  /// used.
  template <int kCount, class Place>
  __device__ void load(uint4 (&fours)[kCount], Place place) const {
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
      const std::uint32_t i = place(b);
      fours[b] = i < count() ? __ldcs(reinterpret_cast<const uint4*>(images + i)) : uint4{};
    }
#pragma unroll
    for (int b = 0; b < kCount; ++b) fours[b] = in_window(fours[b], place(b));
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

  __device__ void set(int slot, int key, std::uint32_t image) const {
    indices[slot] = key;
    if (scores != nullptr) scores[slot] = score_of(image);
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
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int written = 0;
  for (int base = row.begin; base < row.end; base += kLoads * 32) {
    std::uint32_t images[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int key = base + i * 32 + lane;
      images[i] = key < row.end ? row.images[key - row.first] : 0;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const unsigned lanes = __ballot_sync(kAllLanes, images[i] != 0);
      const int slot = written + __popc(lanes & ((1u << lane) - 1));
      if (images[i] != 0) slots.set(slot, base + i * 32 + lane, images[i]);
      written += __popc(lanes);
    }
  }
  return written;
}

/// Selects from a row of up to kShortKeys keys; returns how many.
__device__ int select_short(SharedStorage& shared, const Row& row, const Slots& slots) {
  std::uint32_t images[kHeld][4];
  uint4 fours[kHeld];
  row.load(fours, [](int b) { return b * kBlockKeys + threadIdx.x * 4; });
#pragma unroll
  for (int b = 0; b < kHeld; ++b) spread(fours[b], images[b]);
  const auto blocks = static_cast<int>((row.count() + kBlockKeys - 1) / kBlockKeys);
  const auto each = [&](auto use) {
#pragma unroll
    for (int b = 0; b < kHeld; ++b) {
      if (b >= blocks) break;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (images[b][j] != 0) use(images[b][j], b * kBlockKeys + threadIdx.x * 4 + j);
      }
    }
  };
  const auto topk = static_cast<std::uint32_t>(slots.topk);
  const Bound bound = static_cast<std::uint32_t>(row.end - row.begin) > topk
                          ? find_bound<Kind::scores>(shared, topk, each)
                          : kNoBound;
  // Two blocks at a time: how many are before, in the halves of a word.
  int written = 0;
#pragma unroll
  for (int b = 0; b < kHeld; b += 2) {
    if (b >= blocks) break;
    std::uint32_t own = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t i = (b + half) * kBlockKeys + threadIdx.x * 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        std::uint32_t& image = images[b + half][j];
        if (image == 0 || !bound.keeps(image, i + j)) {
          image = 0;
        } else {
          own += 1u << (16 * half);
        }
      }
    }
    const Prefix prefix = prefix_sum(shared, own);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int slot = written + static_cast<int>(prefix.before >> (16 * half) & 0xffff);
      const int key = row.first + (b + half) * kBlockKeys + static_cast<int>(threadIdx.x) * 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (images[b + half][j] != 0) slots.set(slot++, key + j, images[b + half][j]);
      }
      written += static_cast<int>(prefix.all >> (16 * half) & 0xffff);
    }
  }
  return written;
}

/// Writes the slots of all candidates that pass the bound, in the order of keys; returns how many
/// there are. `each(f)` calls f(image, place) for the candidates of a thread.
template <class Each>
__device__ int write_slots(SharedStorage& shared, const Row& row, const Slots& slots, Bound bound,
                           Each each) {
  // A slot is counted in two steps: before its group of words, and within.
  constexpr int kGroupWords = kMapWords / kBins;
  constexpr int kOwnGroups = kBins / kThreads;
  int written = 0;
  for (std::uint32_t first = 0; first < row.count(); first += kMapKeys) {
    const auto each_kept = [&](auto use) {
      each([&](std::uint32_t image, std::uint32_t place) {
        const std::uint32_t at = place - first;
        if (at < kMapKeys && image != 0 && bound.keeps(image, place)) use(image, at);
      });
    };
    __syncthreads();
    for (int i = threadIdx.x; i < kMapWords; i += kThreads) shared.map[i] = 0;
    __syncthreads();
    each_kept(
        [&](std::uint32_t, std::uint32_t at) { atomicOr(&shared.map[at / 32], 1u << (at % 32)); });
    __syncthreads();
    std::uint32_t of_group[kOwnGroups];
    std::uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kOwnGroups; ++i) {
      const int group = static_cast<int>(threadIdx.x) * kOwnGroups + i;
      of_group[i] = 0;
#pragma unroll
      for (int j = 0; j < kGroupWords; ++j) {
        of_group[i] += __popc(shared.map[group * kGroupWords + j]);
      }
      sum += of_group[i];
    }
    const Prefix prefix = prefix_sum(shared, sum);
    std::uint32_t before = written + prefix.before;
#pragma unroll
    for (int i = 0; i < kOwnGroups; ++i) {
      shared.bins[threadIdx.x * kOwnGroups + i] = before;
      before += of_group[i];
    }
    __syncthreads();
    each_kept([&](std::uint32_t image, std::uint32_t at) {
      const std::uint32_t word = at / 32;
      std::uint32_t slot = shared.bins[word / kGroupWords];
      for (std::uint32_t i = word / kGroupWords * kGroupWords; i < word; ++i) {
        slot += __popc(shared.map[i]);
      }
      slot += __popc(shared.map[word] & ((1u << (at % 32)) - 1));
      slots.set(static_cast<int>(slot), row.first + static_cast<int>(first + at), image);
    });
    written += static_cast<int>(prefix.all);
  }
  return written;
}

/// Candidates in shared memory, as images and as places in the row.
struct Candidates {
  std::uint32_t* images;
  std::uint32_t* places;

  template <class Use>
  __device__ void each(std::uint32_t count, Use use) const {
    for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) use(images[i], places[i]);
  }
};

/// Keeps what passes the bound. Candidates move down, none over one that is still to be read.
__device__ void drop(SharedStorage& shared, const Candidates& candidates, std::uint32_t count,
                     Bound bound) {
  constexpr int kEach = 4;
  if (threadIdx.x == 0) shared.count = 0;
  for (std::uint32_t first = 0; first < count; first += kEach * kThreads) {
    std::uint32_t images[kEach];
    std::uint32_t places[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const std::uint32_t i = first + j * kThreads + threadIdx.x;
      images[j] = i < count ? candidates.images[i] : 0;
      places[j] = i < count ? candidates.places[i] : 0;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (images[j] == 0 || !bound.keeps(images[j], places[j])) continue;
      const std::uint32_t to = atomicAdd(&shared.count, 1u);
      candidates.images[to] = images[j];
      candidates.places[to] = places[j];
    }
  }
  __syncthreads();
}

/// A score that more than topk keys of a long row reach, as far as a part of the keys can tell.
__device__ std::uint32_t likely_least(SharedStorage& shared, const Row& row, std::uint32_t topk) {
  // As many fours as a thread has registers for, at equal distances.
  std::uint32_t images[kHeld][4];
  const std::uint32_t fours = row.count() / 4;
  uint4 sample[kHeld];
  row.load(sample, [&](int b) {
    const std::uint64_t number = b * kThreads + threadIdx.x;
    return static_cast<std::uint32_t>(number * fours / (kHeld * kThreads)) * 4;
  });
#pragma unroll
  for (int b = 0; b < kHeld; ++b) spread(sample[b], images[b]);
  // Three standard deviations more than the part's share.
  const float share = static_cast<float>(topk) * kShortKeys / static_cast<float>(row.count());
  const auto wanted = static_cast<std::uint32_t>(share + 3 * sqrtf(share)) + 4;
  if (wanted >= kShortKeys) return kLeastImage;
  const Bound bound = find_bound<Kind::scores>(shared, wanted, [&](auto use) {
#pragma unroll
    for (int b = 0; b < kHeld; ++b) {
#pragma unroll
      for (int j = 0; j < 4; ++j) use(images[b][j], (b * kThreads + threadIdx.x) * 4 + j);
    }
  });
  return max(bound.image, kLeastImage);
}

/// The sum over the lanes before this one, and of all.
__device__ Prefix warp_prefix_sum(std::uint32_t value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::uint32_t other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  return {sum - value, __shfl_sync(kAllLanes, sum, 31)};
}

/// Takes the row's keys that reach `least` and can be among the topk into shared memory; returns
/// how many there are.
__device__ std::uint32_t collect(SharedStorage& shared, const Row& row,
                                 const Candidates& candidates, std::uint32_t topk,
                                 std::uint32_t least) {
  constexpr int kStep = kAtOnce * kBlockKeys;
  const std::uint32_t capacity = topk + kRoom;
  const std::uint32_t own = threadIdx.x * 4;
  uint4 next[kAtOnce];
  const auto load = [&](std::uint32_t first) {
    row.load(next, [&](int b) { return first + b * kBlockKeys + own; });
  };
  __syncthreads();
  if (threadIdx.x == 0) shared.count = 0;
  load(0);
  __syncthreads();
  std::uint32_t most = 0;  // candidates that there can be
  for (std::uint32_t first = 0; first < row.count(); first += kStep) {
    if (capacity - most < kStep) {
      __syncthreads();
      most = shared.count;
      __syncthreads();
      if (capacity - most < kStep) {
        const Bound bound =
            find_bound<Kind::scores>(shared, topk, [&](auto use) { candidates.each(most, use); });
        drop(shared, candidates, most, bound);
        most = topk;
        least = bound.image + 1;  // keys behind these lose against them where they are equal
      }
    }
    std::uint32_t images[kAtOnce][4];
    std::uint32_t reaching = 0;
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) {
      spread(next[b], images[b]);
#pragma unroll
      for (int j = 0; j < 4; ++j) reaching += images[b][j] >= least ? 1 : 0;
    }
    load(first + kStep);
    most += kStep;
    if (!__any_sync(kAllLanes, reaching > 0)) continue;
    const Prefix prefix = warp_prefix_sum(reaching);
    std::uint32_t to = 0;
    if (threadIdx.x % 32 == 0) to = atomicAdd(&shared.count, prefix.all);
    to = __shfl_sync(kAllLanes, to, 0) + prefix.before;
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (images[b][j] < least) continue;
        candidates.images[to] = images[b][j];
        candidates.places[to] = first + b * kBlockKeys + own + j;
        ++to;
      }
    }
  }
  __syncthreads();
  return shared.count;
}

/// Selects from a long row with the candidates in shared memory; returns how many.
__device__ int select_long(SharedStorage& shared, const Row& row, const Candidates& candidates,
                           const Slots& slots) {
  const auto topk = static_cast<std::uint32_t>(slots.topk);
  const std::uint32_t least = likely_least(shared, row, topk);
  std::uint32_t count = collect(shared, row, candidates, topk, least);
  if (count < topk && least > kLeastImage) {
    count = collect(shared, row, candidates, topk, kLeastImage);
  }
  const auto each = [&](auto use) { candidates.each(count, use); };
  const Bound bound = find_bound<Kind::scores>(shared, topk, each);
  return write_slots(shared, row, slots, bound, each);
}

/// Selects from a long row for any number of slots; returns how many.
__device__ int select_many(SharedStorage& shared, const Row& row, const Slots& slots) {
  const auto image_at = [&](std::uint32_t i) { return row.sees(i) ? row.images[i] : 0; };
  const auto each = [&](auto use) {
    for (std::uint32_t i = threadIdx.x; i < row.count(); i += kThreads) use(image_at(i), i);
  };
  const auto topk = static_cast<std::uint32_t>(slots.topk);
  const Bound bound = find_bound<Kind::scores>(shared, topk, each);
  return write_slots(shared, row, slots, bound, each);
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
  Row row{plan.images_of_group(group, chunk) + t % plan.rows_per_group * plan.row_width(group),
          first, plan.window_begin(t), plan.window_end(t)};
  if (row.end <= row.begin) row.end = row.begin = first;
  // Nothing before the window is read, but for the rest of its four neighbours.
  const int skipped = (row.begin - first) / 4 * 4;
  row.images += skipped;
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

__device__ void select_row(SharedStorage& shared, const Candidates& candidates, const Plan& plan,
                           int chunk, const Outputs& outputs, std::int64_t t) {
  const Row row = row_of(plan, chunk, t);
  const Slots slots = slots_of(outputs, t);
  const int written = row.count() <= kShortKeys  ? select_short(shared, row, slots)
                      : outputs.topk <= kMaxKept ? select_long(shared, row, candidates, slots)
                                                 : select_many(shared, row, slots);
  slots.clear_from(written, static_cast<int>(threadIdx.x), kThreads);
  if (outputs.by_score) sort_by_score(slots.indices, slots.scores, written);
  if (outputs.lengths != nullptr && threadIdx.x == 0) outputs.lengths[t] = written;
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    index_topk_select_kernel(const __grid_constant__ Plan plan, int chunk,
                             const __grid_constant__ Outputs outputs) {
  extern __shared__ __align__(16) std::byte memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  auto* const behind_shared = reinterpret_cast<std::uint32_t*>(memory + sizeof(SharedStorage));
  const Candidates candidates{behind_shared, behind_shared + outputs.topk + kRoom};

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
      select_row(shared, candidates, plan, chunk, outputs, first + number * step);
    }
  }
}

std::size_t shared_bytes(std::int64_t topk) {
  const std::size_t kept = topk <= kMaxKept ? static_cast<std::size_t>(topk) + kRoom : 0;
  return sizeof(SharedStorage) + kept * 2 * sizeof(std::uint32_t);
}

std::int64_t blocks_of(const IndexTopkForward& args) {
  const DeviceProperties& device = device_properties(args.q.device);
  // Two or three blocks fit on a multiprocessor with the usual topk.
  constexpr std::int64_t kThreadsOfMultiprocessor = 2048;
  const std::int64_t each =
      std::clamp<std::int64_t>(device.shared_bytes / shared_bytes(args.indices.shape[1]), 1,
                               kThreadsOfMultiprocessor / kThreads);
  return std::min(each * device.multiprocessors, args.q.shape[0]);
}

}  // namespace

std::int64_t select_scratch(const IndexTopkForward& args) {
  if (args.order != SlotOrder::by_score || args.scores) return 0;
  return blocks_of(args) * args.indices.shape[1];
}

ForChunk select(const IndexTopkForward& args, const Plan& plan, float* scratch,
                const Execution& execution) {
  const Launcher launch(index_topk_select_kernel,
                        {.blocks = blocks_of(args),
                         .threads = kThreads,
                         .shared_bytes = shared_bytes(args.indices.shape[1]),
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

}  // namespace winnow::cuda::index_topk
