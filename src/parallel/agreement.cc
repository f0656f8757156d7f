// SPDX-License-Identifier: Apache-2.0
#include "parallel/agreement.h"

#include <limits>

#include "core/check.h"
#include "winnow/parallel.h"

namespace winnow::parallel {

std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
  x = (x ^ x >> 27) * 0x94d049bb133111ebU;
  return x ^ x >> 31;
}

namespace {

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
constexpr DTypes kAnyType = {DType::f32, DType::bf16,    DType::f16,
                             DType::f64, DType::f8_e4m3, DType::i32};
constexpr DTypes kSumType = {DType::f32};

/// Formats a call for errors: "reduce_scatter 3 of f32[300, 16]".
std::string describe(const Signature& signature) {
  return fmt::format("{} {} of {}[{}, {}]", name(signature.kind), signature.number,
                     winnow::name(static_cast<DType>(signature.dtype)), signature.rows,
                     signature.width);
}

void check_rows(const Check& check, const char* argument, const Tensor& tensor, std::int64_t rows) {
  if (tensor.shape[0] != rows) {
    check.fail(argument, winnow::describe(tensor), refusal::dim_differs, "rows", rows, "rows");
  }
  if (rows > 1 && tensor.stride[0] != tensor.shape[1]) {
    check.fail(argument, winnow::describe(tensor), refusal::one_of, "contiguous");
  }
}

}  // namespace

std::string_view name(CallKind kind) {
  return kind == CallKind::all_gather ? "all_gather" : "reduce_scatter";
}

Collective checked_collective(CallKind kind, const Tensor& shard, const Tensor& whole,
                              std::span<const std::int64_t> rows, int rank, int size,
                              std::uint64_t number, std::uint64_t history) {
  Check check(name(kind));
  if (rows.size() != static_cast<std::size_t>(size)) {
    check.fail("rows", fmt::format("[{}]", rows.size()), refusal::dim_differs, "ranks", size,
               "the communicator");
  }
  Collective call;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    // MPI takes the rows of all ranks, and size times the rows of one rank, as 32-bit counts.
    check.in_range(fmt::format("rows[{}]", r).c_str(), rows[r], 0, kMaxCount / size);
    call.first.push_back(call.total);
    call.total += rows[r];
    call.signature.split = mixed(call.signature.split ^ static_cast<std::uint64_t>(rows[r]));
  }
  call.rows.assign(rows.begin(), rows.end());
  call.own = rows[static_cast<std::size_t>(rank)];

  const DTypes allowed = kind == CallKind::all_gather ? kAnyType : kSumType;
  check.input("shard", shard, {"own rows", "width"}, allowed);
  check.input("whole", whole, {"rows", "width"}, {shard.dtype});
  check_rows(check, "shard", shard, call.own);
  check_rows(check, "whole", whole, call.total);
  // MPI takes the bytes of a row as a 32-bit count too.
  check.dim_in_range("width", 0, kMaxCount / element_bytes(shard.dtype));
  call.row_bytes = shard.shape[1] * element_bytes(shard.dtype);
  call.signature.number = number;
  call.signature.history = history;
  call.signature.kind = kind;
  call.signature.dtype = static_cast<std::uint64_t>(shard.dtype);
  call.signature.rows = static_cast<std::uint64_t>(call.total);
  call.signature.width = static_cast<std::uint64_t>(shard.shape[1]);
  return call;
}

void check_agreement(std::span<const Signature> of_ranks) {
  for (std::size_t r = 1; r < of_ranks.size(); ++r) {
    const Signature& first = of_ranks[0];
    const Signature& other = of_ranks[r];
    if (other == first) continue;
    Signature same_history = other;
    same_history.split = first.split;
    same_history.history = first.history;
    throw Error(ErrorCode::communication,
                same_history == first
                    ? fmt::format("{}: ranks 0 and {} do not agree on {}", describe(first), r,
                                  other.split != first.split
                                      ? "how many rows each rank has"
                                      : "which rows each rank has, or on the calls before")
                    : fmt::format("rank {} calls {}, rank 0 {}: all ranks must call the same", r,
                                  describe(other), describe(first)));
  }
}

}  // namespace winnow::parallel

namespace winnow {

void Communicator::remember(std::uint64_t what) { history_ = parallel::mixed(history_ ^ what); }

}  // namespace winnow
