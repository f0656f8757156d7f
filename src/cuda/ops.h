// SPDX-License-Identifier: Apache-2.0
// The operators of the cuda backend, by overload. An op with several kernels has a pair of run and
// why_not for each; backend.cc puts them in order.
#pragma once

#include <cstddef>
#include <string>

#include "winnow/winnow.h"

namespace winnow::cuda {

// Everything is enqueued on the stream of the Execution; nothing waits. A workspace, if given, has
// at least workspace_bytes.
void run(const KeyWindows& args, const Execution& execution);
void run(const WindowIndices& args, const Execution& execution);
void run(const ValueProjectionForward& args, const Execution& execution);
void run(const ValueProjectionBackward& args, const Execution& execution);
void run(const IndexTopkBackward& args, const Execution& execution);
void run(const IndexTarget& args, const Execution& execution);
void run(const IndexLoss& args, const Execution& execution);
void run(const DenseIndexLossForward& args, const Execution& execution);
void run(const DenseIndexLossBackward& args, const Execution& execution);
void run(const QuantizeFp8& args, const Execution& execution);

std::size_t workspace_bytes(const KeyWindows& args, const Execution& execution);
std::size_t workspace_bytes(const WindowIndices& args, const Execution& execution);
inline std::size_t workspace_bytes(const SparseAttentionForward&, const Execution&) { return 0; }
inline std::size_t workspace_bytes(const ValueProjectionForward&, const Execution&) { return 0; }
inline std::size_t workspace_bytes(const ValueProjectionBackward&, const Execution&) { return 0; }
std::size_t workspace_bytes(const IndexTopkBackward& args, const Execution& execution);
inline std::size_t workspace_bytes(const IndexTarget&, const Execution&) { return 0; }
inline std::size_t workspace_bytes(const IndexLoss&, const Execution&) { return 0; }
std::size_t workspace_bytes(const DenseIndexLossForward& args, const Execution& execution);
std::size_t workspace_bytes(const DenseIndexLossBackward& args, const Execution& execution);
inline std::size_t workspace_bytes(const QuantizeFp8&, const Execution&) { return 0; }

std::string why_not(const KeyWindows& args, const Execution& execution);
std::string why_not(const WindowIndices& args, const Execution& execution);
std::string why_not(const ValueProjectionForward& args, const Execution& execution);
std::string why_not(const ValueProjectionBackward& args, const Execution& execution);
std::string why_not(const IndexTopkBackward& args, const Execution& execution);
std::string why_not(const IndexTarget& args, const Execution& execution);
std::string why_not(const IndexLoss& args, const Execution& execution);
std::string why_not(const DenseIndexLossForward& args, const Execution& execution);
std::string why_not(const DenseIndexLossBackward& args, const Execution& execution);
inline std::string why_not(const QuantizeFp8&, const Execution&) { return {}; }

// Indexer top-k, forward: Hopper's own instructions for rows of 128 elements; any shape and type,
// and replay.
void run_sm90(const IndexTopkForward& args, const Execution& execution);
void run_general(const IndexTopkForward& args, const Execution& execution);
std::size_t workspace_bytes_sm90(const IndexTopkForward& args, const Execution& execution);
std::size_t workspace_bytes_general(const IndexTopkForward& args, const Execution& execution);
std::string why_not_sm90(const IndexTopkForward& args, const Execution& execution);
std::string why_not_general(const IndexTopkForward& args, const Execution& execution);

// Sparse attention, forward: Hopper's own instructions for the widths of the models; tensor cores
// for rows of up to 256 elements, and for any shape in bf16 and f16; fp32 arithmetic for f32.
void run_sm90(const SparseAttentionForward& args, const Execution& execution);
void run_narrow(const SparseAttentionForward& args, const Execution& execution);
void run_general(const SparseAttentionForward& args, const Execution& execution);
void run_f32(const SparseAttentionForward& args, const Execution& execution);
std::string why_not_sm90(const SparseAttentionForward& args, const Execution& execution);
std::string why_not_narrow(const SparseAttentionForward& args, const Execution& execution);
std::string why_not_general(const SparseAttentionForward& args, const Execution& execution);
std::string why_not_f32(const SparseAttentionForward& args, const Execution& execution);

// Sparse attention, backward: Hopper's own instructions likewise; any shape and type, and sums in
// order.
void run_sm90(const SparseAttentionBackward& args, const Execution& execution);
void run_general(const SparseAttentionBackward& args, const Execution& execution);
std::size_t workspace_bytes_sm90(const SparseAttentionBackward& args, const Execution& execution);
std::size_t workspace_bytes_general(const SparseAttentionBackward& args,
                                    const Execution& execution);
std::string why_not_sm90(const SparseAttentionBackward& args, const Execution& execution);
std::string why_not_general(const SparseAttentionBackward& args, const Execution& execution);

}  // namespace winnow::cuda
