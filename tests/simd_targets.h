// SPDX-License-Identifier: Apache-2.0
// The SIMD targets of the cpu backend, to run tests on each of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <hwy/targets.h>

#include "winnow/execution.h"

namespace winnow::tests {

/// While it lives, the cpu backend runs on one target instead of the machine's best. Highway is a
/// shared library, so that what is set here is what libwinnow asks; `reaches_the_backend` makes
/// sure of it.
class OnSimdTarget {
 public:
  explicit OnSimdTarget(std::int64_t target) : target_(target) {
    hwy::SetSupportedTargetsForTest(target);
  }
  OnSimdTarget(const OnSimdTarget&) = delete;
  OnSimdTarget& operator=(const OnSimdTarget&) = delete;
  ~OnSimdTarget() { hwy::SetSupportedTargetsForTest(0); }

  /// The backend names the target that it takes.
  bool reaches_the_backend() const {
    return describe(Backend::cpu).starts_with(std::string(hwy::TargetName(target_)) + " ");
  }

 private:
  std::int64_t target_;
};

/// Those that this machine has and the cpu backend was compiled for, best first.
inline std::vector<std::int64_t> simd_targets() {
  std::vector<std::int64_t> usable;
  for (std::int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    const std::int64_t target = left & -left;
    if (OnSimdTarget(target).reaches_the_backend()) usable.push_back(target);
  }
  return usable;
}

}  // namespace winnow::tests
