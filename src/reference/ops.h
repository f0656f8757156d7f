// SPDX-License-Identifier: Apache-2.0
// The operators of the reference backend, by overload. Each is the specification of its op: plain
// loops in double.
#pragma once

#include "winnow/winnow.h"

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
