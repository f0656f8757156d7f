// SPDX-License-Identifier: Apache-2.0
// Includes the whole public API.
//
// For every argument struct there is the op itself and an overload of two queries.
//
// workspace_bytes(args, execution): the workspace that the call needs. Pass that much in Execution,
// or let the call allocate it.
//
// why_not(args, execution): empty if the call can run as requested, else the reason why not.
//
// All three throw Error(invalid_argument) for a call that is invalid on every backend.
#pragma once

#include "winnow/error.h"
#include "winnow/execution.h"
#include "winnow/index_loss.h"
#include "winnow/index_topk.h"
#include "winnow/key_windows.h"
#include "winnow/parallel.h"
#include "winnow/quantize_fp8.h"
#include "winnow/sparse_attention.h"
#include "winnow/tensor.h"
#include "winnow/thd_batch.h"
#include "winnow/value_projection.h"
#include "winnow/window_indices.h"

namespace winnow {

/// The version of the library, such as "0.1.0".
const char* version();

}  // namespace winnow
