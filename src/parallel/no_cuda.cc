// SPDX-License-Identifier: Apache-2.0
// Stubs for NCCL and CUDA devices in a build without CUDA.
#include <fmt/format.h>

#include "core/memory_errors.h"
#include "core/refusals.h"
#include "parallel/device.h"
#include "winnow/error.h"
#include "winnow/parallel.h"

namespace winnow {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported,
              fmt::format(refusal::part_not_built, "context parallel", "CUDA"));
}

}  // namespace

namespace parallel {

void* allocate_on_device(Device, std::size_t, const Execution&) { refuse(); }
void free_on_device(Device, void*, const Execution&) noexcept {}
void copy_rows_on_device(const Tensor&, const Tensor&, std::span<const Run>, std::int64_t,
                         const Execution&) {
  refuse();
}
void download(Device, void*, const void*, std::size_t, const Execution&) { refuse(); }
void upload(Device, void*, const void*, std::size_t, const Execution&) { refuse(); }

}  // namespace parallel

std::unique_ptr<Communicator> nccl_communicator(ncclComm*, std::chrono::milliseconds) {
  return with_memory_errors("nccl_communicator", [&]() -> std::unique_ptr<Communicator> {
    throw Error(ErrorCode::unsupported,
                fmt::format(refusal::part_not_built, "nccl_communicator", "CUDA"));
  });
}

}  // namespace winnow
