// SPDX-License-Identifier: Apache-2.0
// Which backend has which operator: the functions from which the backends make their lists of
// kernels. One that is not declared here is an operator that the backend does not have.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

#include "backend.h"

/// Each is the specification of its operator: plain loops in double.
namespace winnow::reference {

void run(const KeyWindows& args, const Execution& execution);
void run(const WindowIndices& args, const Execution& execution);
void run(const IndexTopkForward& args, const Execution& execution);
void run(const IndexTopkBackward& args, const Execution& execution);
void run(const SparseAttentionForward& args, const Execution& execution);
void run(const SparseAttentionBackward& args, const Execution& execution);
void run(const ValueProjectionForward& args, const Execution& execution);
void run(const ValueProjectionBackward& args, const Execution& execution);
void run(const IndexTarget& args, const Execution& execution);
void run(const IndexLoss& args, const Execution& execution);
void run(const DenseIndexLossForward& args, const Execution& execution);
void run(const DenseIndexLossBackward& args, const Execution& execution);
void run(const QuantizeFp8& args, const Execution& execution);

/// Bytes that one task of the op works in; the op runs as many tasks at once as fit into the
/// workspace limit.
inline std::size_t scratch_bytes(const KeyWindows&, const Execution&) { return 0; }
inline std::size_t scratch_bytes(const WindowIndices&, const Execution&) { return 0; }
std::size_t scratch_bytes(const IndexTopkForward& args, const Execution& execution);
std::size_t scratch_bytes(const IndexTopkBackward& args, const Execution& execution);
std::size_t scratch_bytes(const SparseAttentionForward& args, const Execution& execution);
std::size_t scratch_bytes(const SparseAttentionBackward& args, const Execution& execution);
std::size_t scratch_bytes(const ValueProjectionForward& args, const Execution& execution);
std::size_t scratch_bytes(const ValueProjectionBackward& args, const Execution& execution);
std::size_t scratch_bytes(const IndexTarget& args, const Execution& execution);
std::size_t scratch_bytes(const IndexLoss& args, const Execution& execution);
std::size_t scratch_bytes(const DenseIndexLossForward& args, const Execution& execution);
std::size_t scratch_bytes(const DenseIndexLossBackward& args, const Execution& execution);
std::size_t scratch_bytes(const QuantizeFp8& args, const Execution& execution);

}  // namespace winnow::reference

/// fp32 vector code, compiled for every SIMD target.
namespace winnow::cpu {

// What run works in: `workspace` of the Execution, aligned for vectors, of at least
// workspace_bytes, which is within workspace_limit wherever why_not is empty. The limit that run
// and workspace_bytes get is the caller's less Scratch::kAlignment; why_not gets the caller's.
void run(const KeyWindows& args, const Execution& execution);
void run(const WindowIndices& args, const Execution& execution);
void run(const IndexTopkForward& args, const Execution& execution);
void run(const IndexTopkBackward& args, const Execution& execution);
void run(const SparseAttentionForward& args, const Execution& execution);
void run(const SparseAttentionBackward& args, const Execution& execution);
void run(const ValueProjectionForward& args, const Execution& execution);
void run(const ValueProjectionBackward& args, const Execution& execution);
void run(const IndexTarget& args, const Execution& execution);
void run(const IndexLoss& args, const Execution& execution);
void run(const DenseIndexLossForward& args, const Execution& execution);
void run(const DenseIndexLossBackward& args, const Execution& execution);
void run(const QuantizeFp8& args, const Execution& execution);

std::size_t workspace_bytes(const KeyWindows& args, const Execution& execution);
std::size_t workspace_bytes(const WindowIndices& args, const Execution& execution);
std::size_t workspace_bytes(const IndexTopkForward& args, const Execution& execution);
std::size_t workspace_bytes(const IndexTopkBackward& args, const Execution& execution);
std::size_t workspace_bytes(const SparseAttentionForward& args, const Execution& execution);
std::size_t workspace_bytes(const SparseAttentionBackward& args, const Execution& execution);
std::size_t workspace_bytes(const ValueProjectionForward& args, const Execution& execution);
std::size_t workspace_bytes(const ValueProjectionBackward& args, const Execution& execution);
std::size_t workspace_bytes(const IndexTarget& args, const Execution& execution);
std::size_t workspace_bytes(const IndexLoss& args, const Execution& execution);
std::size_t workspace_bytes(const DenseIndexLossForward& args, const Execution& execution);
std::size_t workspace_bytes(const DenseIndexLossBackward& args, const Execution& execution);
std::size_t workspace_bytes(const QuantizeFp8& args, const Execution& execution);

std::string why_not(const KeyWindows& args, const Execution& execution);
std::string why_not(const WindowIndices& args, const Execution& execution);
std::string why_not(const IndexTopkForward& args, const Execution& execution);
std::string why_not(const IndexTopkBackward& args, const Execution& execution);
std::string why_not(const SparseAttentionForward& args, const Execution& execution);
std::string why_not(const SparseAttentionBackward& args, const Execution& execution);
std::string why_not(const ValueProjectionForward& args, const Execution& execution);
std::string why_not(const ValueProjectionBackward& args, const Execution& execution);
std::string why_not(const IndexTarget& args, const Execution& execution);
std::string why_not(const IndexLoss& args, const Execution& execution);
std::string why_not(const DenseIndexLossForward& args, const Execution& execution);
std::string why_not(const DenseIndexLossBackward& args, const Execution& execution);
std::string why_not(const QuantizeFp8& args, const Execution& execution);

// The same in products of pairs of bf16, in the same workspace: a limit does not choose between the
// two. why_not_pairs says which types and CPUs it takes; one that is not declared here is an
// operator without it.
void run_pairs(const IndexTopkForward& args, const Execution& execution);
void run_pairs(const IndexTopkBackward& args, const Execution& execution);
void run_pairs(const SparseAttentionForward& args, const Execution& execution);
void run_pairs(const SparseAttentionBackward& args, const Execution& execution);
void run_pairs(const ValueProjectionForward& args, const Execution& execution);
void run_pairs(const ValueProjectionBackward& args, const Execution& execution);
void run_pairs(const IndexTarget& args, const Execution& execution);
void run_pairs(const DenseIndexLossForward& args, const Execution& execution);
void run_pairs(const DenseIndexLossBackward& args, const Execution& execution);

std::string why_not_pairs(const IndexTopkForward& args);
std::string why_not_pairs(const IndexTopkBackward& args);
std::string why_not_pairs(const SparseAttentionForward& args);
std::string why_not_pairs(const SparseAttentionBackward& args);
std::string why_not_pairs(const ValueProjectionForward& args);
std::string why_not_pairs(const ValueProjectionBackward& args);
std::string why_not_pairs(const IndexTarget& args);
std::string why_not_pairs(const DenseIndexLossForward& args);
std::string why_not_pairs(const DenseIndexLossBackward& args);

}  // namespace winnow::cpu

/// For each operator the list of its kernels, best first. It stands in the operator's folder; the
/// last kernel takes every shape.
namespace winnow::cuda {

// Everything that a kernel runs is enqueued on the stream of the Execution; nothing waits.
Kernels<KeyWindows> kernels(std::type_identity<KeyWindows>);
Kernels<WindowIndices> kernels(std::type_identity<WindowIndices>);
Kernels<IndexTopkForward> kernels(std::type_identity<IndexTopkForward>);
Kernels<IndexTopkBackward> kernels(std::type_identity<IndexTopkBackward>);
Kernels<SparseAttentionForward> kernels(std::type_identity<SparseAttentionForward>);
Kernels<SparseAttentionBackward> kernels(std::type_identity<SparseAttentionBackward>);
Kernels<ValueProjectionForward> kernels(std::type_identity<ValueProjectionForward>);
Kernels<ValueProjectionBackward> kernels(std::type_identity<ValueProjectionBackward>);
Kernels<IndexTarget> kernels(std::type_identity<IndexTarget>);
Kernels<IndexLoss> kernels(std::type_identity<IndexLoss>);
Kernels<DenseIndexLossForward> kernels(std::type_identity<DenseIndexLossForward>);
Kernels<DenseIndexLossBackward> kernels(std::type_identity<DenseIndexLossBackward>);
Kernels<QuantizeFp8> kernels(std::type_identity<QuantizeFp8>);

}  // namespace winnow::cuda
