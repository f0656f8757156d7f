// SPDX-License-Identifier: Apache-2.0
// Times of CUDA devices in a build without CUDA.
#include "harness/device_product.h"
#include "winnow/error.h"

namespace winnow::harness {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported, "work on a CUDA device: this harness was built without CUDA");
}

}  // namespace

std::optional<double> device_product_rate(Device) { return std::nullopt; }
void flush_device_cache(Device) { refuse(); }
double time_on_device(Device, const std::function<void()>&) { refuse(); }

}  // namespace winnow::harness
