// SPDX-License-Identifier: Apache-2.0
// Fat binaries, as nvcc puts them into host objects.
#pragma once

#include <optional>
#include <string_view>

namespace winnow::emulator {

struct PtxText {
  std::string_view text;
  int capability = 0;  // of its .target: 90 for sm_90 and for sm_90a
};

/// The text for the highest compute capability that the device has; none if there is no such text,
/// or it is compressed. `wrapper` is what __cudaRegisterFatBinary is given.
std::optional<PtxText> find_ptx(const void* wrapper);

}  // namespace winnow::emulator
