// SPDX-License-Identifier: Apache-2.0
#include "emulator/model.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace winnow::emulator {
namespace {

// A100, RTX 40, H100 and RTX 50, by the tables of CUDA's programming guide.
constexpr Model kModels[] = {{"sm_80", 8, 0, 163 * 1024, 2048, 32},
                             {"sm_89", 8, 9, 99 * 1024, 1536, 24},
                             {"sm_90", 9, 0, 227 * 1024, 2048, 32},
                             {"sm_120", 12, 0, 99 * 1024, 1536, 24}};

const Model& model_of(std::string_view name) {
  const auto* const found = std::ranges::find(kModels, name, &Model::name);
  if (found != std::end(kModels)) return *found;
  std::string error = "WINNOW_EMULATOR_GPU is '";
  error.append(name).append("', but the models are");
  for (const Model& one : kModels) error.append(" ").append(one.name);
  std::fprintf(stderr, "emulated GPU: %s\n", error.c_str());
  throw std::invalid_argument(error);
}

}  // namespace

const Model& model() {
  static const Model& chosen = [&]() -> const Model& {
    const char* const name = std::getenv("WINNOW_EMULATOR_GPU");
    return model_of(name == nullptr ? "sm_90" : name);
  }();
  return chosen;
}

}  // namespace winnow::emulator
