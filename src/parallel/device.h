// SPDX-License-Identifier: Apache-2.0
// What context parallel needs from a CUDA device. In a build without CUDA these functions throw
// Error(unsupported).
#pragma once

#include <cstddef>
#include <span>

#include "parallel/rows.h"
#include "winnow/execution.h"
#include "winnow/tensor.h"

namespace winnow::parallel {

// Enqueued on execution.stream.
void* allocate_on_device(Device device, std::size_t bytes, const Execution& execution);
void free_on_device(Device device, void* memory, const Execution& execution) noexcept;
void copy_rows_on_device(const Tensor& from, const Tensor& to, std::span<const Run> runs,
                         std::int64_t rows, const Execution& execution);

// These synchronise with the stream before they return.
void download(Device device, void* host, const void* memory, std::size_t bytes,
              const Execution& execution);
void upload(Device device, void* memory, const void* host, std::size_t bytes,
            const Execution& execution);

}  // namespace winnow::parallel
