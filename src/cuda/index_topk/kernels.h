// SPDX-License-Identifier: Apache-2.0
// The steps of index_topk: rows that need no scores; the scores of a chunk, by one of two kernels;
// the selection from them; and replay, which scores given keys.
#pragma once

#include <functional>
#include <string>

#include "cuda/common/graph_nodes.h"
#include "cuda/index_topk/parameters.cuh"
#include "cuda/index_topk/plan.cuh"

namespace winnow::cuda::index_topk {

/// Launches a step for a chunk of the plan, as a node if there is a chain. Everything that does not
/// depend on the chunk was done before, since there may be many chunks.
using ForChunk = std::function<void(const Plan& plan, int chunk, NodeChain* chain)>;

std::string why_not_scores_sm90(const IndexTopkForward& args);
int rows_per_group_sm90(const IndexTopkForward& args);
ForChunk scores_sm90(const IndexTopkForward& args, const Execution& execution);

/// Any shape and all types, on tensor cores; f32 in fp32 arithmetic.
inline constexpr int kRowsPerGroupGeneral = 8;
ForChunk scores_general(const IndexTopkForward& args, const Execution& execution);
void replay(const IndexTopkForward& args, const Execution& execution);

/// Whether some rows may get their slots without scores.
bool has_whole_windows(const IndexTopkForward& args);
/// Gives rows their whole window where every key has a slot and no score can be NaN or infinite.
/// `done` [tokens] tells which rows were given it. `magnitudes` [keys] is scratch.
void take_whole_windows(const IndexTopkForward& args, const Plan& plan, float* magnitudes,
                        std::uint8_t* done, const Execution& execution);

/// Elements of scratch for scores that `select` needs beside the outputs.
std::int64_t select_scratch(const IndexTopkForward& args);
/// Selects the topk of a chunk's rows.
ForChunk select(const IndexTopkForward& args, float* scratch, const Execution& execution);

/// Elements of scratch that for_remaining_chunks needs.
inline constexpr int kRemainingScratch = 3;
/// Launches both steps for the chunks from `first` on of which the plan has rows. Where it does not
/// have to launch all, it changes the plan.
void for_remaining_chunks(const Plan& plan, int first, const ForChunk& scores_of,
                          const ForChunk& select_from, std::int32_t* scratch, Device device,
                          const Execution& execution);

}  // namespace winnow::cuda::index_topk
