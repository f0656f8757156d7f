// SPDX-License-Identifier: Apache-2.0
// The SIMD targets of the cpu backend, to run tests on each of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <hwy/targets.h>

#include "winnow/execution.h"

namespace winnow::tests {

/// While it is alive, the cpu backend runs on one target instead of the best one. Highway is a
/// shared library, so that the setting here affects libwinnow too; `reaches_the_backend` verifies
/// this.
class OnSimdTarget {
 public:
  explicit OnSimdTarget(std::int64_t target) : target_(target) {
    hwy::SetSupportedTargetsForTest(target);
  }
  OnSimdTarget(const OnSimdTarget&) = delete;
  OnSimdTarget& operator=(const OnSimdTarget&) = delete;
  ~OnSimdTarget() { hwy::SetSupportedTargetsForTest(0); }

  /// Whether the backend reports this target.
  bool reaches_the_backend() const {
    return describe(Backend::cpu).starts_with(std::string(hwy::TargetName(target_)) + " ");
  }

 private:
  std::int64_t target_;
};

/// The targets of this machine that the cpu backend was compiled for, best first.
inline std::vector<std::int64_t> simd_targets() {
  std::vector<std::int64_t> usable;
  for (std::int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    const std::int64_t target = left & -left;
    if (OnSimdTarget(target).reaches_the_backend()) usable.push_back(target);
  }
  return usable;
}

}  // namespace winnow::tests
