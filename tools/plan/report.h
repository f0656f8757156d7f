// SPDX-License-Identifier: Apache-2.0
// Plans as text on stdout and as JSON.
#pragma once

#include <vector>

#include <nlohmann/json.hpp>

#include "tools/plan/step_plan.h"

namespace winnow::plan {

/// Prints the plan call by call.
void print_plan(const PlanRequest& request);
/// Prints one line for each plan; all requests have the same model, device and network.
void print_table(const std::vector<PlanRequest>& requests);
nlohmann::ordered_json json_of(const PlanRequest& request);

}  // namespace winnow::plan
