// SPDX-License-Identifier: Apache-2.0
// Copies that end some time after they were started: cp.async of single threads, and TMA.
//
// A copy of cp.async lands when it is waited for or at any time before; one by TMA happens at any
// time, in any order. What reads too early, or writes too early what is still to be copied, shows.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "emulator/lanes.h"
#include "emulator/mbarrier.h"
#include "emulator/proxies.h"
#include "emulator/tensor_map.h"

namespace winnow::emulator {
namespace {

// ---- cp.async

/// cp.async.{ca,cg}.shared.global [to], [from], bytes[, bytes that are read; the rest are zeros]
Outcome start_copy(Warp& warp, const Instruction& i, LaneMask mask) {
  Warp::Copy copy;
  copy.mask = mask;
  copy.bytes = static_cast<int>(i.operands[2].value);
  for_lanes(mask, [&](int lane) {
    const std::uint64_t to = warp.address(i.operands[0], lane);
    const std::uint64_t from = warp.address(i.operands[1], lane);
    const auto bytes = static_cast<std::size_t>(copy.bytes);
    const std::size_t read =
        i.count > 3 ? std::min<std::size_t>(warp.read<std::uint32_t>(i.operands[3], lane), bytes)
                    : bytes;
    warp.check_alignment(to, bytes, lane);
    warp.shared(to, bytes, lane);
    if (read > 0) {
      warp.check_alignment(from, bytes, lane);
      warp.generic(from, read, lane);
    }
    copy.target[lane] = static_cast<std::uint32_t>(to);
    copy.source[lane] = from;
    copy.source_bytes[lane] = static_cast<std::uint8_t>(read);
    copy.group[lane] = warp.copy_group[lane];
  });
  copy.instruction = &i;
  copy.due = warp.block.grid.random_due();
  warp.copies.push_back(copy);
  return Outcome::done;
}

Outcome commit_copies(Warp& warp, const Instruction&, LaneMask mask) {
  for_lanes(mask, [&](int lane) { ++warp.copy_group[lane]; });
  return Outcome::done;
}

/// Waits for all groups but the last ones.
Outcome wait_for_groups(Warp& warp, const Instruction& i, LaneMask mask) {
  const auto pending = static_cast<std::uint32_t>(i.operands[0].value);
  std::array<std::uint32_t, kLanes> before{};
  for_lanes(mask,
            [&](int lane) { before[lane] = std::max(warp.copy_group[lane], pending) - pending; });
  warp.land(mask, before);
  return Outcome::done;
}

Outcome wait_for_all(Warp& warp, const Instruction&, LaneMask mask) {
  std::array<std::uint32_t, kLanes> before;
  before.fill(~0u);
  warp.land(mask, before);
  return Outcome::done;
}

/// cp.async.mbarrier.arrive.noinc [mbarrier]: arrives once the lane's copies have landed.
Outcome arrive_after_copies(Warp& warp, const Instruction& i, LaneMask mask) {
  Warp::Copy arrival;
  arrival.mask = mask;
  for_lanes(mask, [&](int lane) {
    arrival.target[lane] = static_cast<std::uint32_t>(warp.address(i.operands[0], lane));
    arrival.group[lane] = warp.copy_group[lane];
  });
  arrival.due = warp.block.grid.random_due();
  warp.copies.push_back(arrival);
  return Outcome::done;
}

void land_lane(const Warp& warp, const Warp::Copy& copy, int lane) {
  if (copy.bytes == 0) {
    change_mbarrier(warp, copy.target[lane], lane, [](Mbarrier& barrier) { barrier.arrive(1); });
    return;
  }
  std::byte* const to = warp.shared(copy.target[lane], static_cast<std::size_t>(copy.bytes), lane);
  note_write(warp, *copy.instruction, to);
  std::memset(to, 0, static_cast<std::size_t>(copy.bytes));
  std::memcpy(to, reinterpret_cast<const void*>(copy.source[lane]), copy.source_bytes[lane]);
}

// ---- TMA

/// A box of a tensor, as an instruction names it: [map, {coordinates}].
struct Box {
  TensorMap map;
  std::array<std::int32_t, 5> corner{};
};

Box read_box(Warp& warp, const Operand* operands, int rank, int lane) {
  Box box;
  const std::uint64_t at = warp.address(operands[0], lane);
  if (at % 64 != 0) warp.fail("a tensor map that is not aligned to 64 bytes", lane);
  std::memcpy(&box.map, warp.generic(at, sizeof box.map, lane), sizeof box.map);
  if (box.map.magic != TensorMap::kMagic) warp.fail("no tensor map", lane);
  if (static_cast<int>(box.map.rank) != rank) warp.fail("a tensor map of another rank", lane);
  for (int d = 0; d < rank; ++d) {
    box.corner[d] = static_cast<std::int32_t>(warp.read<std::uint32_t>(operands[1 + d], lane));
  }
  return box;
}

int box_bytes(const TensorMap& map) {
  int bytes = static_cast<int>(map.element_bytes);
  for (unsigned d = 0; d < map.rank; ++d) bytes *= static_cast<int>(map.box[d]);
  return bytes;
}

/// Calls f with the place in shared memory of each row of a box, the place in the tensor (null
/// outside of it) and the elements of that row that are inside, [first, last).
template <class F>
void for_rows(const Box& box, std::uint32_t shared, F f) {
  const TensorMap& map = box.map;
  const std::uint32_t row_bytes = map.box[0] * map.element_bytes;
  std::array<std::uint32_t, 5> at{};
  std::uint32_t rows = 1;
  for (unsigned d = 1; d < map.rank; ++d) rows *= map.box[d];
  for (std::uint32_t row = 0; row < rows; ++row) {
    std::uint32_t rest = row;
    bool inside = true;
    std::int64_t offset = 0;
    for (unsigned d = 1; d < map.rank; ++d) {
      at[d] = rest % map.box[d];
      rest /= map.box[d];
      const std::int64_t coordinate = std::int64_t{box.corner[d]} + at[d];
      inside = inside && coordinate >= 0 && coordinate < static_cast<std::int64_t>(map.sizes[d]);
      offset += coordinate * static_cast<std::int64_t>(map.stride_bytes[d]);
    }
    const std::int64_t first = std::max<std::int64_t>(-std::int64_t{box.corner[0]}, 0);
    const std::int64_t last =
        std::min<std::int64_t>(map.box[0], static_cast<std::int64_t>(map.sizes[0]) - box.corner[0]);
    std::byte* tensor = nullptr;
    if (inside && first < last) {
      tensor = reinterpret_cast<std::byte*>(map.address) + offset +
               std::int64_t{box.corner[0]} * map.element_bytes;
    }
    f(shared + row * row_bytes, tensor, static_cast<int>(first), static_cast<int>(last));
  }
}

/// Where a byte stands in shared memory: pieces of 16 bytes by the 128-byte swizzle of addresses.
std::uint32_t swizzled(const TensorMap& map, std::uint32_t address) {
  const bool is_swizzled = map.swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  return is_swizzled ? address ^ ((address >> 3) & 0x70) : address;
}

/// cp.async.bulk.tensor [to], [map, {c}], [mbarrier][, blocks of the cluster]
Outcome start_load(Warp& warp, const Instruction& i, LaneMask mask) {
  const bool is_multicast = (i.variant & 16) != 0;
  const int rank = static_cast<int>(i.variant & 15);
  for_lanes(mask, [&](int lane) {
    const auto to = static_cast<std::uint32_t>(warp.address(i.operands[0], lane));
    const Box box = read_box(warp, i.operands + 1, rank, lane);
    const auto barrier = static_cast<std::uint32_t>(warp.address(i.operands[2 + rank], lane));
    const std::uint32_t blocks =
        is_multicast ? warp.read<std::uint16_t>(i.operands[3 + rank], lane) : 0;
    if (to % 128 != 0) warp.fail("TMA to an address that is not aligned", lane);
    warp.check_alignment(barrier, 8, lane);
    const auto bytes = static_cast<std::uint32_t>(box_bytes(box.map));
    std::vector<Block*> targets;
    for (Block* const block : warp.block.cluster) {
      const bool takes = is_multicast ? ((blocks >> block->rank) & 1) != 0 : block == &warp.block;
      if (!takes) continue;
      const std::byte* const place = block->warps[0]->shared(to, bytes, -1);
      check_reads_finished(warp, lane, *block, place, bytes);
      targets.push_back(block);
    }
    Warp* const starter = &warp;
    const Instruction* const instruction = &i;
    BulkCopy copy;
    copy.due = warp.block.grid.random_due();
    copy.complete = [=] {
      starter->current = instruction;
      for (Block* const block : targets) {
        const Warp& there = *block->warps[0];
        const std::byte* const place = there.shared(to, bytes, -1);
        check_reads_finished(*starter, lane, *block, place, bytes);
        forget_writes(*block, place, bytes);
        for_rows(box, to, [&](std::uint32_t row, const std::byte* tensor, int first, int last) {
          const auto width = static_cast<int>(box.map.element_bytes);
          const int row_elements = static_cast<int>(box.map.box[0]);
          if (tensor != nullptr) {
            starter->generic(reinterpret_cast<std::uint64_t>(tensor + first * width),
                             static_cast<std::size_t>((last - first) * width), lane);
          }
          for (int e = 0; e < row_elements; ++e) {
            const std::uint32_t at = swizzled(box.map, row + static_cast<std::uint32_t>(e * width));
            std::byte* const place = there.shared(at, static_cast<std::size_t>(width), -1);
            if (tensor != nullptr && e >= first && e < last) {
              std::memcpy(place, tensor + e * width, static_cast<std::size_t>(width));
            } else {
              std::memset(place, 0, static_cast<std::size_t>(width));
            }
          }
        });
        change_mbarrier(there, barrier, -1, [&](Mbarrier& m) { m.land(static_cast<int>(bytes)); });
      }
    };
    warp.block.grid.bulk_copies.push_back(std::move(copy));
  });
  return Outcome::done;
}

/// cp[.reduce].async.bulk.tensor [map, {c}], [from]
Outcome start_store(Warp& warp, const Instruction& i, LaneMask mask) {
  const bool adds = (i.variant & 16) != 0;
  const int rank = static_cast<int>(i.variant & 15);
  for_lanes(mask, [&](int lane) {
    const Box box = read_box(warp, i.operands, rank, lane);
    const auto from = static_cast<std::uint32_t>(warp.address(i.operands[1 + rank], lane));
    if (from % 128 != 0) warp.fail("TMA from an address that is not aligned", lane);
    if (adds && box.map.type != CU_TENSOR_MAP_DATA_TYPE_FLOAT32) {
      warp.fail("a reduction of elements that are not fp32", lane);
    }
    const auto bytes = static_cast<std::size_t>(box_bytes(box.map));
    check_writes_fenced(warp, lane, warp.shared(from, bytes, lane), bytes);
    Warp* const starter = &warp;
    BulkCopy copy;
    copy.warp = starter;
    copy.lane = lane;
    copy.group = warp.bulk_group[lane];
    const Instruction* const instruction = &i;
    copy.due = warp.block.grid.random_due();
    copy.complete = [=] {
      starter->current = instruction;
      for_rows(box, from, [&](std::uint32_t row, std::byte* tensor, int first, int last) {
        if (tensor == nullptr) return;
        const auto width = static_cast<int>(box.map.element_bytes);
        starter->generic(reinterpret_cast<std::uint64_t>(tensor + first * width),
                         static_cast<std::size_t>((last - first) * width), lane);
        for (int e = first; e < last; ++e) {
          const std::uint32_t at = swizzled(box.map, row + static_cast<std::uint32_t>(e * width));
          const std::byte* const place = starter->shared(at, static_cast<std::size_t>(width), lane);
          std::byte* const to = tensor + e * width;
          if (adds) {
            float sum, term;
            std::memcpy(&sum, to, sizeof sum);
            std::memcpy(&term, place, sizeof term);
            sum += term;
            std::memcpy(to, &sum, sizeof sum);
          } else {
            std::memcpy(to, place, static_cast<std::size_t>(width));
          }
        }
      });
    };
    warp.block.grid.bulk_copies.push_back(std::move(copy));
  });
  return Outcome::done;
}

Outcome commit_bulk(Warp& warp, const Instruction&, LaneMask mask) {
  for_lanes(mask, [&](int lane) { ++warp.bulk_group[lane]; });
  return Outcome::done;
}

/// cp.async.bulk.wait_group[.read] n
Outcome wait_for_bulk(Warp& warp, const Instruction& i, LaneMask mask) {
  const int pending = static_cast<int>(i.operands[0].value);
  GridRun& grid = warp.block.grid;
  for (std::size_t e = 0; e < grid.bulk_copies.size();) {
    const BulkCopy& copy = grid.bulk_copies[e];
    const bool is_waited_for = copy.warp == &warp && ((mask >> copy.lane) & 1) &&
                               copy.group < warp.bulk_group[copy.lane] - pending;
    if (is_waited_for) {
      grid.complete(e);
    } else {
      ++e;
    }
  }
  return Outcome::done;
}

/// mapa.shared::cluster d, address, rank
Outcome map_address(Warp& warp, const Instruction& i, LaneMask mask) {
  for_lanes(mask, [&](int lane) {
    const std::uint32_t address = warp.read<std::uint32_t>(i.operands[1], lane);
    const std::uint32_t rank = warp.read<std::uint32_t>(i.operands[2], lane);
    if (rank >= warp.block.cluster.size()) warp.fail("no such block in the cluster", lane);
    warp.write<std::uint32_t>(i.operands[0], lane, address | (rank + 1) << kRankBit);
  });
  return Outcome::done;
}

std::optional<int> rank_of(const Written& written) {
  if (written.has("2d")) return 2;
  if (written.has("3d")) return 3;
  if (written.has("4d")) return 4;
  return std::nullopt;
}

bool decode_bulk(const Written& written, Instruction& instruction) {
  Execute& execute = instruction.execute;
  if (written.has("commit_group")) execute = commit_bulk;
  if (written.has("wait_group")) execute = wait_for_bulk;
  if (written.has("prefetch")) execute = do_nothing;
  if (execute != nullptr) return true;
  const std::optional<int> rank = rank_of(written);
  if (!rank || !written.has("tensor")) return false;
  instruction.variant = *rank;
  if (written.has("bulk_group")) {
    if (written.opcode[1] == "reduce") {
      if (!written.has("add")) return false;
      instruction.variant |= 16;
    }
    execute = start_store;
  } else {
    if (written.has("multicast::cluster")) instruction.variant |= 16;
    execute = start_load;
  }
  return true;
}

}  // namespace

void Warp::land(LaneMask mask, const std::array<std::uint32_t, kLanes>& group) {
  for (Copy& copy : copies) {
    for_lanes(copy.mask & mask, [&](int lane) {
      if (copy.group[lane] >= group[lane]) return;
      land_lane(*this, copy, lane);
      copy.mask &= ~(LaneMask{1} << lane);
    });
  }
  std::erase_if(copies, [](const Copy& copy) { return copy.mask == 0; });
}

void Warp::land_first() {
  if (copies.empty()) return;
  const Copy copy = copies.front();
  copies.pop_front();
  for_lanes(copy.mask, [&](int lane) { land_lane(*this, copy, lane); });
}

bool decode_async_copy(const Written& written, Instruction& instruction) {
  const std::string_view op = written.opcode[0];
  Execute& execute = instruction.execute;
  if (op == "mapa") execute = map_address;
  if (execute != nullptr) return true;
  if (op != "cp") return false;
  if (written.has("bulk")) return decode_bulk(written, instruction);
  if (!written.has("async")) return false;
  if (written.has("commit_group")) {
    execute = commit_copies;
  } else if (written.has("wait_group")) {
    execute = wait_for_groups;
  } else if (written.has("wait_all")) {
    execute = wait_for_all;
  } else if (written.has("mbarrier")) {
    if (!written.has("noinc")) return false;
    execute = arrive_after_copies;
  } else {
    execute = start_copy;
  }
  return true;
}

}  // namespace winnow::emulator
