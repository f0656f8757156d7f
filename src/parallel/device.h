// SPDX-License-Identifier: Apache-2.0
// What context parallel asks of a CUDA device. A build without CUDA gets functions that throw
// Error(unsupported).
#pragma once

#include <cstddef>
#include <span>

#include "parallel/rows.h"
#include "winnow/execution.h"
#include "winnow/tensor.h"

namespace winnow::parallel {

// All of them in the order of the stream.
void* allocate_on_device(Device device, std::size_t bytes, const Execution& execution);
void free_on_device(Device device, void* memory, const Execution& execution) noexcept;
void copy_rows_on_device(const Tensor& from, const Tensor& to, std::span<const Run> runs,
                         std::int64_t rows, const Execution& execution);

// These wait for the copy.
void download(Device device, void* host, const void* memory, std::size_t bytes,
              const Execution& execution);
void upload(Device device, void* memory, const void* host, std::size_t bytes,
            const Execution& execution);

}  // namespace winnow::parallel
