// SPDX-License-Identifier: Apache-2.0
// The steps of index_topk: rows that need no scores; scores of a chunk, by one of two kernels;
// the selection from them; and replay, which scores given keys.
#pragma once

#include <functional>
#include <string>

#include "cuda/index_topk/plan.cuh"
#include "cuda/index_topk/scores.cuh"

namespace winnow::cuda::index_topk {

/// Launches a step for a chunk. What does not depend on the chunk has been done: there may be many.
using ForChunk = std::function<void(int chunk)>;

std::string why_not_scores_sm90(const IndexTopkForward& args);
int rows_per_group_sm90(const IndexTopkForward& args);
ForChunk scores_sm90(const IndexTopkForward& args, const Plan& plan, const Execution& execution);

/// Any shape, all types: on tensor cores, f32 by fp32 arithmetic.
inline constexpr int kRowsPerGroupGeneral = 8;
ForChunk scores_general(const IndexTopkForward& args, const Plan& plan, const Execution& execution);
void replay(const IndexTopkForward& args, const Execution& execution);

/// Whether some rows may get their slots without scores.
bool has_whole_windows(const IndexTopkForward& args);
/// Gives rows their whole window where all of it has slots and no score can be NaN or infinite.
/// `done` is set to whether a row has got it. `magnitudes` [keys] is scratch.
void take_whole_windows(const IndexTopkForward& args, const Plan& plan, float* magnitudes,
                        std::uint8_t* done, const Execution& execution);

/// Scores that `select` needs beside the outputs, in elements.
std::int64_t select_scratch(const IndexTopkForward& args);
/// The topk of a chunk's rows.
ForChunk select(const IndexTopkForward& args, const Plan& plan, float* scratch,
                const Execution& execution);

}  // namespace winnow::cuda::index_topk
