// SPDX-License-Identifier: Apache-2.0
// The operators of the cpu backend, by overload: fp32 vector code, compiled for every SIMD target.
#pragma once

#include <cstddef>
#include <string>

#include "winnow/winnow.h"

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

}  // namespace winnow::cpu
