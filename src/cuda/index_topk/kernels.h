// SPDX-License-Identifier: Apache-2.0
// The steps of index_topk: scores of a chunk, by one of three kernels; the selection from them; and
// replay, which scores given keys.
#pragma once

#include <string>

#include "cuda/index_topk/plan.cuh"
#include "cuda/index_topk/scores.cuh"

namespace winnow::cuda::index_topk {

std::string why_not_hopper(const IndexTopkForward& args);
int rows_per_group_hopper(const IndexTopkForward& args);
void scores_hopper(const IndexTopkForward& args, const Plan& plan, int chunk,
                   const Execution& execution);

/// Any shape, all types: on tensor cores, f32 by fp32 arithmetic.
inline constexpr int kRowsPerGroupGeneral = 8;
void scores_general(const IndexTopkForward& args, const Plan& plan, int chunk,
                    const Execution& execution);
void replay(const IndexTopkForward& args, const Execution& execution);

/// Scores that `select` needs beside the outputs, in elements.
std::int64_t select_scratch(const IndexTopkForward& args);
/// The topk of a chunk's rows.
void select(const IndexTopkForward& args, const Plan& plan, int chunk, float* scratch,
            const Execution& execution);

}  // namespace winnow::cuda::index_topk
