// SPDX-License-Identifier: Apache-2.0
// value_projection: its memory, its calls and its check.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/buffers.h"
#include "harness/calls.h"
#include "harness/compare.h"

namespace winnow::harness {

struct ValueProjectionWork {
  ValueProjectionWork(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Call> calls() const;

  double forward_flops, backward_flops;
  Buffers buffers;
  Buffer &out, &w_v, &out_v, &d_out_v, &d_out, &d_w_v, &d_w_v_rounded;
  ValueProjectionForward forward;
  ValueProjectionBackward backward;          // d_w_v is f32, added to
  ValueProjectionBackward backward_rounded;  // d_w_v has the type of w_v; absent for f32
};

std::vector<Report> check_value_projection(const Case& c, const Execution& execution,
                                           std::uint64_t seed);

}  // namespace winnow::harness
