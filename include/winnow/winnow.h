// SPDX-License-Identifier: Apache-2.0
// All of winnow.
//
// For every argument struct there is the op itself, and two questions about it by overload.
//
// workspace_bytes(args, execution): the memory that the call takes. Pass that much in Execution, or
// let the call take it.
//
// why_not(args, execution): empty if the call can run as asked, else a sentence that says why not.
//
// All three throw Error(invalid_argument) for a call that is not legal anywhere.
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

/// "0.1.0"
const char* version();

}  // namespace winnow
