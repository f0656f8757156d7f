// SPDX-License-Identifier: Apache-2.0
// Memory of CUDA devices for the harness; a build without CUDA gets functions that refuse.
#pragma once

#include <cstddef>
#include <cstdint>

namespace winnow::harness {

void* allocate_on_cuda(std::int32_t device, std::size_t bytes);
void free_on_cuda(std::int32_t device, void* memory) noexcept;

/// Between host and device memory in any combination. Waits for all work of the device before and
/// for the copy after.
void copy_with_cuda(std::int32_t device, void* to, const void* from, std::size_t bytes);

/// Memory of the device that is in use, by any process, once its work is done.
std::size_t bytes_in_use_on_cuda(std::int32_t device);

}  // namespace winnow::harness
