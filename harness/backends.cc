// SPDX-License-Identifier: Apache-2.0
// The backends that a check can run on here.
#include "harness/backends.h"

namespace winnow::harness {

std::vector<Backend> usable_backends() {
  std::vector<Backend> usable;
  for (const Backend backend : {Backend::reference, Backend::cpu, Backend::cuda})
    if (why_not(backend).empty()) usable.push_back(backend);
  return usable;
}

Device device_of(Backend backend) {
  return {backend == Backend::cuda ? DeviceKind::cuda : DeviceKind::cpu, 0};
}

}  // namespace winnow::harness
