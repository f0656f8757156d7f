// SPDX-License-Identifier: Apache-2.0
// Validation of a collective: its arguments on this rank, and that all ranks make the same call.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "winnow/tensor.h"

namespace winnow::parallel {

enum class CallKind : std::uint64_t { all_gather, reduce_scatter };

/// Describes the call of one rank, in a form that ranks send each other. It must be the same on all
/// ranks before any of them may use the data.
struct Signature {
  std::uint64_t number = 0;  // counts the collectives of the communicator
  CallKind kind = CallKind::all_gather;
  std::uint64_t dtype = 0;
  std::uint64_t rows = 0;  // summed over ranks
  std::uint64_t width = 0;
  std::uint64_t split = 0;    // hash of the number of rows of each rank
  std::uint64_t history = 0;  // hash of what Communicator::remember was given
  bool operator==(const Signature&) const = default;
};

/// A collective whose arguments are valid on this rank.
struct Collective {
  Signature signature;
  std::int64_t row_bytes = 0;
  std::vector<std::int64_t> rows;   // of each rank
  std::vector<std::int64_t> first;  // the first row of each rank in the whole tensor
  std::int64_t total = 0;           // rows of all ranks
  std::int64_t own = 0;             // rows of this rank

  /// Bytes that belong to other ranks and are sent to or received from them.
  std::int64_t remote_bytes() const { return (total - own) * row_bytes; }
};

/// Checks what does not depend on the other ranks and throws Error(invalid_argument) if it is
/// wrong: shard is [rows[rank], width], whole is [sum of rows, width], both contiguous, of one type
/// and device.
Collective checked_collective(CallKind kind, const Tensor& shard, const Tensor& whole,
                              std::span<const std::int64_t> rows, int rank, int size,
                              std::uint64_t number, std::uint64_t history);

/// Throws Error(communication), with the same message on every rank, if the signatures of all ranks
/// are not equal.
void check_agreement(std::span<const Signature> of_ranks);

std::string_view name(CallKind kind);

/// The mixing function of splitmix64, for hashes.
std::uint64_t mixed(std::uint64_t x);

}  // namespace winnow::parallel
