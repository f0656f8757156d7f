// SPDX-License-Identifier: Apache-2.0
// Plans as text on stdout and as JSON.
#pragma once

#include <vector>

#include <nlohmann/json.hpp>

#include "tools/plan/step_plan.h"

namespace winnow::plan {

/// A request and the plan that it led to.
struct Planned {
  PlanRequest request;
  StepPlan step;
};

/// Prints the plan call by call.
void print_plan(const Planned& planned);
/// Prints one line for each plan; all requests have the same model, device and network.
void print_table(const std::vector<Planned>& plans);
nlohmann::ordered_json json_of(const Planned& planned);

}  // namespace winnow::plan
