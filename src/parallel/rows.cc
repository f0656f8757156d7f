// SPDX-License-Identifier: Apache-2.0
#include "parallel/rows.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "core/numerics.h"
#include "core/threads.h"
#include "parallel/device.h"

namespace winnow::parallel {
namespace {

constexpr std::int64_t kRowsPerTask = 64;

template <class To>
void round_row(const float* from, To* to, std::int64_t width, To (*round)(float)) {
  for (std::int64_t i = 0; i < width; ++i) to[i] = round(from[i]);
}

void copy_row(const Tensor& from, std::int64_t from_row, const Tensor& to, std::int64_t to_row) {
  const std::int64_t width = from.shape[1];
  const auto* source = static_cast<const std::byte*>(from.data) +
                       from_row * from.stride[0] * element_bytes(from.dtype);
  auto* target = static_cast<std::byte*>(to.data) + to_row * to.stride[0] * element_bytes(to.dtype);
  if (from.dtype == to.dtype) {
    std::memcpy(target, source, static_cast<std::size_t>(width * element_bytes(from.dtype)));
    return;
  }
  assert(from.dtype == DType::f32);
  const auto* values = reinterpret_cast<const float*>(source);
  if (to.dtype == DType::bf16) {
    round_row(values, reinterpret_cast<BFloat16*>(target), width, to_bfloat16);
  } else {
    assert(to.dtype == DType::f16);
    round_row(values, reinterpret_cast<Float16*>(target), width, to_float16);
  }
}

}  // namespace

const Run& run_of(std::span<const Run> runs, std::int64_t i) {
  return *(std::upper_bound(runs.begin(), runs.end(), i,
                            [](std::int64_t row, const Run& run) { return row < run.first; }) -
           1);
}

void copy_rows(const Tensor& from, const Tensor& to, std::span<const Run> runs, std::int64_t rows,
               const Execution& execution) {
  if (rows == 0 || from.shape[1] == 0) return;
  if (from.device.kind == DeviceKind::cuda) {
    copy_rows_on_device(from, to, runs, rows, execution);
    return;
  }
  const std::int64_t tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  parallel_for(execution, tasks, 0, [&](std::int64_t task, Scratch) {
    const std::int64_t end = std::min((task + 1) * kRowsPerTask, rows);
    for (std::int64_t i = task * kRowsPerTask; i < end; ++i) {
      const Run& run = run_of(runs, i);
      copy_row(from, run.from + i - run.first, to, run.to + i - run.first);
    }
  });
}

}  // namespace winnow::parallel
