// SPDX-License-Identifier: Apache-2.0
// In a build without CUDA no CUDA device has limits.
#include "tools/plan/device_limits.h"
#include "winnow/error.h"

namespace winnow::plan {

DeviceLimits cuda_device_limits(std::int32_t) {
  throw Error(ErrorCode::unsupported, "limits of a CUDA device: this tool was built without CUDA");
}

}  // namespace winnow::plan
