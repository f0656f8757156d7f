// SPDX-License-Identifier: Apache-2.0
// Finds the PTX in a fat binary.
#include "emulator/runtime/fat_binary.h"

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "emulator/runtime/device.h"

namespace winnow::emulator {
namespace {

// fatbinary_section.h has the wrapper; the rest is not documented.
struct Wrapper {
  std::int32_t magic;
  std::int32_t version;
  const std::byte* data;
  const void* file;
};
struct Header {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t header_bytes;
  std::uint64_t bytes;  // of all entries
};
struct Entry {
  std::uint16_t kind;
  std::uint16_t version;
  std::uint32_t header_bytes;
  std::uint64_t bytes;
  std::uint32_t compressed_bytes;  // 0 if it is not compressed
};
constexpr std::int32_t kWrapperMagic = 0x466243b1;
constexpr std::uint32_t kMagic = 0xba55ed50;
constexpr std::uint16_t kPtx = 1;

/// A rank among the texts that the device can run, 0 for others. sm_90a runs on 9.0 alone.
int rank_of(PtxText& ptx) {
  constexpr std::string_view kTarget = ".target sm_";
  const std::size_t at = ptx.text.find(kTarget);
  if (at == std::string_view::npos) return 0;
  const std::string_view rest = ptx.text.substr(at + kTarget.size());
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), ptx.capability);
  if (error != std::errc{} || ptx.capability > model().capability()) return 0;
  const bool specific = end != rest.data() + rest.size() && (*end == 'a' || *end == 'f');
  if (specific && (*end != 'a' || ptx.capability != model().capability())) return 0;
  return 2 * ptx.capability + (specific ? 1 : 0);
}

}  // namespace

std::optional<PtxText> find_ptx(const void* wrapper) {
  const auto& wrapped = *static_cast<const Wrapper*>(wrapper);
  if (wrapped.magic != kWrapperMagic) return std::nullopt;
  Header header{};
  std::memcpy(&header, wrapped.data, sizeof(header));
  if (header.magic != kMagic) return std::nullopt;
  const std::byte* next = wrapped.data + header.header_bytes;
  const std::byte* const end = next + header.bytes;
  std::optional<PtxText> best;
  int best_rank = 0;
  while (next < end) {
    Entry entry{};
    std::memcpy(&entry, next, sizeof(entry));
    const char* const begin = reinterpret_cast<const char*>(next + entry.header_bytes);
    next += entry.header_bytes + entry.bytes;
    if (entry.kind != kPtx || entry.compressed_bytes != 0) continue;
    PtxText ptx{.text = {begin, strnlen(begin, entry.bytes)}};  // it is padded with zeros
    const int rank = rank_of(ptx);
    if (rank <= best_rank) continue;
    best = ptx;
    best_rank = rank;
  }
  return best;
}

}  // namespace winnow::emulator
