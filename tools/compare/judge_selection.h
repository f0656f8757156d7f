// SPDX-License-Identifier: Apache-2.0
// The selection of index_topk, judged by scores: of nearly equal keys either may be taken.
#pragma once

#include "tools/compare/judge.h"

namespace winnow::dump {

/// The largest sum_h |w_h| sum_d |q_hd k_d| of each row's window, once for each slot, of an
/// oracle's tensors in double.
std::vector<double> score_units(const PlacedTensors& oracle);

/// Of a call that selects. Its slots must be in order and its scores those of the reference for the
/// same keys; the scores of its keys, in falling order, must be those of the reference's own
/// choice.
Judge selection_judge(const DumpedCall& call, const harness::Rows& rows);

}  // namespace winnow::dump
