// SPDX-License-Identifier: Apache-2.0
// quantize_fp8: its memory, its calls and its check.
#pragma once

#include <cstdint>
#include <vector>

#include "harness/buffers.h"
#include "harness/calls.h"
#include "harness/compare.h"

namespace winnow::harness {

struct QuantizeFp8Work {
  QuantizeFp8Work(const Case& c, const Placement& placement, std::uint64_t seed);
  std::vector<Call> calls() const;

  Buffers buffers;
  Buffer &keys, &key_values, &key_scale;         // [index keys, index_dim]
  Buffer &queries, &query_values, &query_scale;  // [tokens, index_heads, index_dim]
  QuantizeFp8 of_keys, of_queries;
};

std::vector<Report> check_quantize_fp8(const Case& c, const Execution& execution,
                                       std::uint64_t seed);

}  // namespace winnow::harness
