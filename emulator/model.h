// SPDX-License-Identifier: Apache-2.0
// Which GPU is emulated: what tells one model from another.
#pragma once

#include <cstddef>
#include <string_view>

namespace winnow::emulator {

struct Model {
  std::string_view name;
  int major, minor;          // the compute capability
  std::size_t shared_bytes;  // of a block, opted in
  int resident_threads;      // of a multiprocessor
  int resident_blocks;

  int capability() const { return 10 * major + minor; }
};

/// The model that WINNOW_EMULATOR_GPU names, sm_90 without it. Throws std::invalid_argument.
const Model& model();

}  // namespace winnow::emulator
