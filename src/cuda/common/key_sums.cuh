// SPDX-License-Identifier: Apache-2.0
// Gradients of keys, to which many query rows add: the fp32 rows in which they are summed, and a
// way to add them up in the same order in every run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/common/row_slots.cuh"
#include "cuda/common/runtime.h"
#include "winnow/tensor.h"

namespace winnow::cuda {

/// The caller's tensor, to which is added, or a copy behind one of bf16 or f16.
struct KeySums {
  float* data;  // [keys, dim]
  std::int64_t stride;
  std::int64_t keys, dim;
};

/// Of the copy. It comes on top of the workspace limit.
std::size_t key_copy_bytes(const Tensor& d_keys);
/// Zeros the copy, if there is one.
KeySums begin_key_sums(const Tensor& d_keys, Workspace& workspace, cudaStream_t stream);
/// Rounds the copy, if there is one, to the caller's tensor.
void finish_key_sums(const KeySums& sums, const Tensor& d_keys, cudaStream_t stream);

// ---- Sums in order. What every slot gives to its key is a row of `dim` floats, a term. The terms
// of some query rows are made, sorted by key, and each key's are added, by slots within rows, one
// after another to its sum: whatever the pieces are, the bits are the same.

/// Pieces of `rows` query rows and `slots` slots of each.
struct TermPlan {
  std::int64_t rows = 0;  // 0: no plan
  std::int64_t slots = 0;
  std::size_t term_bytes = 0;   // of float [rows, slots, dim]
  std::size_t order_bytes = 0;  // for the sort
};
/// The largest pieces for which both slices of a workspace have room in `limit` bytes; if there are
/// none, the smallest. The device is current.
TermPlan plan_terms(std::int64_t tokens, std::int64_t slots, std::int64_t keys, std::int64_t dim,
                    std::size_t limit);

struct TermMemory {
  float* terms = nullptr;
  std::byte* order = nullptr;
};
TermMemory take_terms(const TermPlan& plan, Workspace& workspace);

/// Adds terms [rows, slots.slots, dim] of a piece to the sums of their keys.
void add_in_order(const TermPlan& plan, const TermMemory& memory, const SlotLists& slots,
                  std::int64_t rows, const KeySums& sums, cudaStream_t stream);

}  // namespace winnow::cuda
