// SPDX-License-Identifier: Apache-2.0
// Memory of CUDA devices in a build without CUDA.
#include "harness/device_memory.h"
#include "winnow/error.h"

namespace winnow::harness {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported,
              "memory of a CUDA device: this harness was built without CUDA");
}

}  // namespace

void* allocate_on_cuda(std::int32_t, std::size_t) { refuse(); }
void free_on_cuda(std::int32_t, void*) noexcept {}
void copy_with_cuda(std::int32_t, void*, const void*, std::size_t) { refuse(); }
std::size_t bytes_in_use_on_cuda(std::int32_t) { refuse(); }

}  // namespace winnow::harness
