// SPDX-License-Identifier: Apache-2.0
// value_magnitudes: sum_j p_j |v_j|, the unit in which an element of attention's output may be off.
#pragma once

#include <cstdint>
#include <vector>

#include "winnow/sparse_attention.h"

namespace winnow::harness {

/// log(exp(lse) + exp(sink)): over keys and sink together.
double log_of_sum(double lse, double sink);

/// One for each element of out, of a call in double on the host whose lse has been computed. Only
/// every `head_step`-th head is measured; the others get infinity, a unit in which no error counts.
std::vector<double> value_magnitudes(const SparseAttentionForward& args,
                                     std::int64_t head_step = 1);

}  // namespace winnow::harness
