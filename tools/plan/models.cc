// SPDX-License-Identifier: Apache-2.0
// The layers of the models whose geometry the cases have.
#include "tools/plan/models.h"

#include <numeric>
#include <stdexcept>

#include <fmt/format.h>

namespace winnow::plan {
namespace {

/// Pools of so many rows are all listed; others are selected from.
constexpr std::int32_t kListedRatio = 128;

Case without_pools(Case c) {
  c.ratio = 1;
  c.topk = c.window;
  return c;
}

Case with_listed_pools(Case c) {
  c.ratio = kListedRatio;
  return c;
}

}  // namespace

int Model::row_multiple() const {
  int multiple = 1;
  for (const LayerKind& kind : kinds) multiple = std::lcm(multiple, kind.c.ratio);
  return multiple;
}

Model find_model(std::string_view name) {
  const auto geometry = [&]() -> const Case& { return harness::find_case(name); };
  if (name == "glm-5.2")  // layers 1, 2, 3, 7, 11, ... 75 select for themselves and those behind
    return {"glm-5.2",
            {{"selecting", 21, Lists::selected, geometry()},
             {"reusing", 57, Lists::reused, geometry()}}};
  if (name == "deepseek-v3.2")
    return {"deepseek-v3.2", {{"selecting", 61, Lists::selected, geometry()}}};
  if (name == "deepseek-v4-flash")
    return {"deepseek-v4-flash",
            {{"window", 2, Lists::window, without_pools(geometry())},
             {"pools of 4", 21, Lists::selected, geometry()},
             {"pools of 128", 20, Lists::all_pools, with_listed_pools(geometry())}}};
  if (name == "deepseek-v4-pro")
    return {"deepseek-v4-pro",
            {{"pools of 4", 30, Lists::selected, geometry()},
             {"pools of 128", 31, Lists::all_pools, with_listed_pools(geometry())}}};
  throw std::invalid_argument(fmt::format(
      "no model '{}': there are glm-5.2, deepseek-v3.2, deepseek-v4-flash, deepseek-v4-pro", name));
}

}  // namespace winnow::plan
