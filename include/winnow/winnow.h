// SPDX-License-Identifier: Apache-2.0
// Includes the whole public API.
//
// Every operator is a function of its argument struct and an Execution. call.h has the queries
// about a call: its workspace, why it cannot run, which kernel would run it.
#pragma once

#include "winnow/call.h"
#include "winnow/error.h"
#include "winnow/execution.h"
#include "winnow/operators.h"
#include "winnow/parallel.h"
#include "winnow/tensor.h"
#include "winnow/thd_batch.h"

namespace winnow {

/// The version of the library, such as "0.1.0".
const char* version();

}  // namespace winnow
