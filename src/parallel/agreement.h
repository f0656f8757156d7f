// SPDX-License-Identifier: Apache-2.0
// What the ranks of a collective must agree on, and the checks of its arguments on one rank.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "winnow/tensor.h"

namespace winnow::parallel {

enum class CallKind : std::uint64_t { all_gather, reduce_scatter };

/// What one rank asks for, in a form that ranks send each other. The same on all ranks, or none of
/// them may go on.
struct Signature {
  std::uint64_t number = 0;  // of the collective, since the communicator was made
  CallKind kind = CallKind::all_gather;
  std::uint64_t dtype = 0;
  std::uint64_t rows = 0;  // of all ranks together
  std::uint64_t width = 0;
  std::uint64_t split = 0;    // a hash of how many rows each rank has
  std::uint64_t history = 0;  // of the communicator
  bool operator==(const Signature&) const = default;
};

/// A collective with arguments that are legal on this rank.
struct Collective {
  Signature signature;
  std::int64_t row_bytes = 0;
  std::vector<std::int64_t> rows;   // of each rank
  std::vector<std::int64_t> first;  // the first row of each rank in the whole
  std::int64_t total = 0;           // rows of all ranks
  std::int64_t own = 0;             // rows of this rank

  /// What goes to or comes from other ranks.
  std::int64_t foreign_bytes() const { return (total - own) * row_bytes; }
};

/// Throws Error(invalid_argument) for what is not legal whatever the other ranks do: shard is
/// [rows[rank], width], whole [sum of rows, width], both contiguous, of one type and device.
Collective checked_collective(CallKind kind, const Tensor& shard, const Tensor& whole,
                              std::span<const std::int64_t> rows, int rank, int size,
                              std::uint64_t number, std::uint64_t history);

/// Throws Error(communication), with the same text on every rank, if a rank asks for something else
/// than rank 0 does.
void check_agreement(std::span<const Signature> of_ranks);

std::string_view name(CallKind kind);

/// A number that says little about x, for hashes.
std::uint64_t mixed(std::uint64_t x);

}  // namespace winnow::parallel
