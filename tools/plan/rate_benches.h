// SPDX-License-Identifier: Apache-2.0
// The benches whose results `winnow plan` needs, and the rates file that is made of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "harness/cases.h"
#include "tools/matrix_product.h"
#include "tools/plan/rates.h"
#include "tools/timed_calls.h"
#include "winnow/execution.h"

namespace winnow::plan {

struct RateBench {
  std::string_view op;
  harness::Case c;
};
/// With `keys`, each op of each model once, with so many rows.
std::vector<RateBench> rate_benches(std::optional<std::int64_t> keys);

/// The rates that the benches gave, called by the name of `file` without its ending. Throws
/// std::runtime_error where the matrix product is unknown or the backend lacks a call.
DeviceRates measured_rates(const std::string& file, const Execution& execution,
                           const std::optional<tools::MatrixProduct>& product,
                           const std::vector<tools::Measured>& measured);

}  // namespace winnow::plan
