// SPDX-License-Identifier: Apache-2.0
// The list of cases: four models at full size and small, then one awkward thing each.
#include "harness/cases.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include <fmt/format.h>

namespace winnow::harness {
namespace {

std::vector<Case> models() {
  return {
      {.name = "glm-5.2",
       .tokens = 4096,
       .rows = 8192,
       .documents = 1,
       .heads = 64,
       .qk_dim = 576,
       .v_dim = 512,
       .topk = 2048,
       .index_heads = 32,
       .index_dim = 128,
       .head_dim = 256,
       .scale = 0.0625F,
       .extras = false,
       .full = true},
      {.name = "deepseek-v3.2",
       .tokens = 4096,
       .rows = 8192,
       .documents = 1,
       .heads = 128,
       .qk_dim = 576,
       .v_dim = 512,
       .topk = 2048,
       .index_heads = 64,
       .index_dim = 128,
       .head_dim = 128,
       .scale = 0.13523F,
       .extras = false,
       .full = true},
      {.name = "deepseek-v4-flash",
       .tokens = 4096,
       .rows = 8192,
       .documents = 1,
       .heads = 64,
       .qk_dim = 512,
       .v_dim = 512,
       .topk = 128 + 512,
       .index_heads = 64,
       .index_dim = 128,
       .head_dim = 0,
       .ratio = 4,
       .window = 128,
       .scale = 0,
       .sink = true,
       .extras = false,
       .full = true},
      {.name = "deepseek-v4-pro",
       .tokens = 4096,
       .rows = 8192,
       .documents = 1,
       .heads = 128,
       .qk_dim = 512,
       .v_dim = 512,
       .topk = 128 + 1024,
       .index_heads = 64,
       .index_dim = 128,
       .head_dim = 0,
       .ratio = 4,
       .window = 128,
       .scale = 0,
       .sink = true,
       .extras = false,
       .full = true},
      {.name = "glm-5.2-small"},
      {.name = "deepseek-v3.2-small", .heads = 8, .index_heads = 8, .head_dim = 16, .scale = 0.3F},
      {.name = "deepseek-v4-flash-small",
       .rows = 96,
       .qk_dim = 64,
       .topk = 8 + 8,
       .head_dim = 0,
       .ratio = 4,
       .window = 8,
       .scale = 0,
       .sink = true},
      {.name = "deepseek-v4-pro-small",
       .rows = 96,
       .heads = 8,
       .qk_dim = 64,
       .topk = 8 + 12,
       .index_heads = 8,
       .head_dim = 0,
       .ratio = 4,
       .window = 8,
       .scale = 0,
       .sink = true,
       .padded = true},
  };
}

std::vector<Case> awkward_shapes() {
  return {
      {.name = "no-tokens", .tokens = 0},
      {.name = "one-token", .tokens = 1},
      {.name = "no-keys", .tokens = 5, .rows = 0, .documents = 1},
      {.name = "one-key", .tokens = 5, .rows = 1, .documents = 1},
      {.name = "one-head", .heads = 1, .index_heads = 1},
      {.name = "three-heads", .heads = 3, .index_heads = 3},
      {.name = "24-heads", .heads = 24, .index_heads = 24, .sink = true},
      {.name = "96-heads", .tokens = 20, .heads = 96, .index_heads = 96},
      {.name = "topk-1", .topk = 1},
      {.name = "topk-odd", .topk = 13},
      {.name = "topk-over-keys", .topk = 200},
      {.name = "narrow-values", .v_dim = 8},
      {.name = "widest-rows",
       .tokens = 9,
       .qk_dim = 1024,
       .v_dim = 1024,
       .index_dim = 256,
       .scale = 0},
      {.name = "glm-5.2-widths",
       .tokens = 12,
       .qk_dim = 576,
       .v_dim = 512,
       .topk = 40,
       .index_heads = 32,
       .index_dim = 128,
       .slots = Slots::shuffled,
       .holes = true,
       .lengths = true},
      {.name = "24-wide-heads",
       .tokens = 8,
       .heads = 24,
       .qk_dim = 576,
       .v_dim = 512,
       .topk = 40,
       .sink = true},
      {.name = "17-wide-heads", .tokens = 6, .heads = 17, .qk_dim = 576, .v_dim = 512, .topk = 40},
      {.name = "33-wide-heads", .tokens = 6, .heads = 33, .qk_dim = 512, .v_dim = 512, .topk = 40},
      {.name = "96-wide-heads",
       .tokens = 6,
       .rows = 200,
       .heads = 96,
       .qk_dim = 512,
       .v_dim = 512,
       .topk = 140,
       .sink = true,
       .holes = true},
      {.name = "128-wide-heads",
       .tokens = 6,
       .rows = 200,
       .heads = 128,
       .qk_dim = 576,
       .v_dim = 512,
       .topk = 140,
       .lengths = true},
      {.name = "40-wider-heads", .tokens = 8, .heads = 40, .qk_dim = 584, .v_dim = 512, .topk = 40},
      {.name = "deepseek-v4-widths",
       .tokens = 12,
       .rows = 96,
       .qk_dim = 512,
       .v_dim = 512,
       .topk = 8 + 24,
       .index_heads = 64,
       .index_dim = 128,
       .head_dim = 0,
       .ratio = 4,
       .window = 8,
       .scale = 0,
       .sink = true,
       .holes = true},
      {.name = "batch",
       .tokens = 7,
       .rows = 20,
       .documents = 2,
       .batch = 3,
       .sink = true,
       .lengths = true},
      {.name = "many-documents",
       .tokens = 200,
       .rows = 200,
       .documents = 40,
       .ratio = 2,
       .lengths = true},
      {.name = "many-rows",
       .tokens = 70000,
       .rows = 70000,
       .documents = 1000,
       .heads = 2,
       .qk_dim = 16,
       .v_dim = 8,
       .topk = 4,
       .index_heads = 2,
       .index_dim = 8,
       .head_dim = 8,
       .slow = true},
  };
}

std::vector<Case> awkward_contents() {
  return {
      {.name = "shuffled", .slots = Slots::shuffled, .lengths = true},
      {.name = "neighbours", .slots = Slots::neighbours},
      {.name = "repeats", .slots = Slots::with_repeats},
      {.name = "holes", .sink = true, .slots = Slots::shuffled, .holes = true, .lengths = true},
      {.name = "holes-of-pools",
       .rows = 96,
       .qk_dim = 64,
       .topk = 8 + 12,
       .ratio = 4,
       .window = 8,
       .scale = 0,
       .sink = true,
       .slots = Slots::shuffled,
       .holes = true,
       .lengths = true},
      {.name = "no-valid-slot", .sink = true, .no_valid_slot = true},
      {.name = "empty-rows", .sink = true, .empty_rows = true},
      {.name = "padded", .tokens = 64, .documents = 6, .padded = true},
      {.name = "padded-pools",
       .tokens = 128,
       .rows = 128,
       .documents = 6,
       .topk = 6 + 10,
       .ratio = 3,
       .window = 6,
       .padded = true},
      {.name = "extreme-sinks", .sink = true, .empty_rows = true, .extreme_sinks = true},
      {.name = "ties", .exact_scores = true},
      {.name = "nan-keys", .nan_keys = true},
      {.name = "strided", .sink = true, .lengths = true, .row_padding = 8},
      {.name = "misaligned", .sink = true, .lengths = true, .row_padding = 3},
      {.name = "fp16", .sink = true, .dtype = DType::f16},
      {.name = "fp32", .sink = true, .dtype = DType::f32},
      {.name = "fp32-holes",
       .dtype = DType::f32,
       .slots = Slots::shuffled,
       .holes = true,
       .lengths = true},
  };
}

std::vector<Case> all_cases() {
  std::vector<Case> all = models();
  for (const auto& group : {awkward_shapes(), awkward_contents()})
    all.insert(all.end(), group.begin(), group.end());
  return all;
}

}  // namespace

float Case::attention_scale() const {
  return scale != 0 ? scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(qk_dim)));
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = all_cases();
  return all;
}

const Case& find_case(std::string_view name) {
  const auto found = std::find_if(cases().begin(), cases().end(),
                                  [&](const Case& each) { return each.name == name; });
  if (found != cases().end()) return *found;
  std::string names;
  for (const Case& each : cases()) names += (names.empty() ? "" : ", ") + each.name;
  throw std::invalid_argument(fmt::format("no case {}: the cases are {}", name, names));
}

}  // namespace winnow::harness
