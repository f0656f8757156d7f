// SPDX-License-Identifier: Apache-2.0
// Gradients of keys, to which many query rows add: the fp32 rows in which they are summed, and a
// way to sum them in the same order in every run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/common/row_slots.cuh"
#include "cuda/common/runtime.h"
#include "winnow/tensor.h"

namespace winnow::cuda {

/// The order of a row's columns while it is summed. In fragment order the values that a lane holds
/// of 16 columns of an accumulator (hopper/wgmma.cuh) are neighbours, so that it can add them by
/// one instruction; such rows have a multiple of 16 columns and begin at 16-byte boundaries.
enum class ColumnOrder : std::int32_t { natural, fragments };

/// Where column d stands in fragment order: of every 16 columns, lane c of a quad holds 2c, 2c + 1,
/// 2c + 8 and 2c + 9.
__host__ __device__ constexpr std::int64_t fragment_place(std::int64_t d) {
  return d / 16 * 16 + d % 8 / 2 * 4 + d / 8 % 2 * 2 + d % 2;
}

/// The rows in which key gradients are summed: the caller's tensor, or an fp32 copy behind a tensor
/// of bf16 or f16.
struct KeySums {
  float* data;  // [keys, dim]
  std::int64_t stride;
  std::int64_t keys, dim;
  ColumnOrder order = ColumnOrder::natural;
};

/// Where a kernel leaves what its slots give to their keys.
enum class KeyGradient : std::int32_t {
  none,
  added,      // to the sums of the keys, by atomics
  stored,     // as terms of slots
  stored_too  // added to the terms of earlier heads
};

/// Bytes of the copy, which comes on top of the workspace limit.
std::size_t key_copy_bytes(const Tensor& d_keys);
/// Zeros the copy, or puts the columns of the caller's tensor into the order of the sums.
KeySums begin_key_sums(const Tensor& d_keys, Workspace& workspace, cudaStream_t stream,
                       ColumnOrder order = ColumnOrder::natural);
/// Rounds the copy to the caller's tensor, or puts the columns of that tensor back.
void finish_key_sums(const KeySums& sums, const Tensor& d_keys, cudaStream_t stream);

// ---- Deterministic sums. What a slot gives to its key is a row of `dim` floats, a term. The terms
// of some query rows are written down and sorted by key; each key's terms are added to its sum one
// after another, by rows and by slots within a row. So the bits do not depend on how the work is
// cut.

/// The work in pieces of `rows` query rows and `slots` slots of each.
struct TermPlan {
  std::int64_t rows = 0;  // 0: no plan
  std::int64_t slots = 0;
  std::size_t term_bytes = 0;   // of float [rows, slots, dim]
  std::size_t order_bytes = 0;  // for the sort
};
/// The largest pieces whose two workspace slices fit into `limit` bytes, or the smallest pieces if
/// none fit. The device is current.
TermPlan plan_terms(std::int64_t tokens, std::int64_t slots, std::int64_t keys, std::int64_t dim,
                    std::size_t limit);

struct TermMemory {
  float* terms = nullptr;
  std::byte* order = nullptr;
};
TermMemory take_terms(const TermPlan& plan, Workspace& workspace);

/// What a call that adds to the gradients of keys works in.
struct KeySumPlan {
  TermPlan terms;     // where the sums are deterministic
  std::size_t bytes;  // of workspace, the copy of `d_keys` among them
};
/// `indices`: [tokens, slots].
KeySumPlan plan_key_sums(const Tensor& indices, const Tensor& keys, const Tensor& d_keys,
                         const Execution& execution);

/// Adds the terms [rows, slots.slots, dim] of a piece to the sums of their keys.
void add_in_order(const TermPlan& plan, const TermMemory& memory, const SlotLists& slots,
                  std::int64_t rows, const KeySums& sums, cudaStream_t stream);

}  // namespace winnow::cuda
