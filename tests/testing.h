// SPDX-License-Identifier: Apache-2.0
// Shared by the tests: loops over backends, tensors from vectors, comparisons as assertions.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "harness/arguments.h"
#include "harness/backends.h"
#include "harness/compare.h"
#include "harness/families.h"
#include "harness/kernel_choice.h"
#include "harness/memory.h"
#include "harness/numbers.h"
#include "harness/random.h"
#include "winnow/winnow.h"

namespace winnow::tests {

using harness::Buffer;
using harness::compare;
using harness::NamedBuffers;
using harness::Random;
using harness::Shape;

using Ints = std::vector<std::int32_t>;
using Values = std::vector<double>;

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr std::int32_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();
inline constexpr std::int32_t kMinInt32 = std::numeric_limits<std::int32_t>::min();

/// Calls body(backend) for every backend that can run here.
template <class Body>
void on_each_backend(const Body& body) {
  for (const Backend backend : harness::usable_backends()) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, std::string(name(backend)));
    body(backend);
  }
}

inline bool has_cuda() {
  const std::vector<Backend> backends = harness::usable_backends();
  return std::find(backends.begin(), backends.end(), Backend::cuda) != backends.end();
}

inline Execution on(Backend backend) { return {.backend = backend}; }
inline Execution deterministic(Execution execution) {
  execution.deterministic = true;
  return execution;
}
inline Execution on_threads(std::int32_t threads, Execution execution) {
  execution.threads = threads;
  return execution;
}

/// Calls body(execution) for every backend that can run here and, where the operators of a family
/// have several kernels there, for each of them.
template <class Body>
void on_each_kernel(std::string_view op, const Body& body) {
  on_each_backend([&](Backend backend) {
    const std::vector<std::string_view> kernels = harness::kernels_of(op, backend);
    if (kernels.size() < 2) return body(on(backend));
    for (const std::string_view kernel : kernels) {
      const ::testing::ScopedTrace trace(__FILE__, __LINE__, std::string(kernel));
      body(Execution{.backend = backend, .kernel = kernel.data()});
    }
  });
}

/// Whether the kernel that the execution asks for takes the call, if the operator has it.
template <class Args>
bool is_taken(const Args& args, const Execution& execution) {
  return why_not(args, harness::for_operator<Args>(execution)).empty();
}

/// Runs the call on the kernel that the execution asks for, or on the best one if that kernel does
/// not take it.
template <class Args>
void run_where_taken(const Args& args, Execution execution) {
  if (execution.kernel != nullptr && !is_taken(args, execution)) execution.kernel = nullptr;
  run(args, harness::for_operator<Args>(execution));
}

// ---- Values.

inline Values normals(std::int64_t count, std::uint64_t seed, std::string_view stream,
                      double factor = 1) {
  const Random random(seed, stream);
  Values values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) values[i] = factor * random.normal(i);
  return values;
}

/// Random integers in [least, most].
inline Values whole_numbers(std::int64_t count, std::uint64_t seed, std::string_view stream,
                            std::int64_t least, std::int64_t most) {
  const Random random(seed, stream);
  Values values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i)
    values[i] = static_cast<double>(least + random.below(i, most - least + 1));
  return values;
}

/// The given values, rounded to this type.
inline Values as_stored(DType dtype, Values values) {
  for (double& value : values) value = harness::rounded(dtype, value);
  return values;
}

/// values[first, first + count)
template <class T>
std::vector<T> part(const std::vector<T>& values, std::int64_t first, std::int64_t count) {
  return {values.begin() + first, values.begin() + first + count};
}

// ---- Tensors.

inline std::int64_t elements(const Shape& shape) {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product *= size;
  return product;
}

/// Without values, an absent tensor if the shape has elements.
inline Buffer floats(Device device, DType dtype, const Shape& shape, const Values& values,
                     std::int64_t row_padding = 0) {
  if (values.empty() && elements(shape) > 0) return {};
  Buffer buffer(device, dtype, shape, row_padding);
  buffer.upload(values);
  return buffer;
}

inline Buffer ints(Device device, const Shape& shape, const Ints& values,
                   std::int64_t row_padding = 0) {
  if (values.empty() && elements(shape) > 0) return {};
  Buffer buffer(device, DType::i32, shape, row_padding);
  buffer.upload(values);
  return buffer;
}

/// The accumulation type beside activations of this type.
inline DType type_of_sums(DType dtype) { return dtype == DType::f64 ? dtype : DType::f32; }

/// A gradient. Of the accumulation type it is added to, from `before` on, or from zeros without
/// values; one of `asked` that is overwritten is NaN, so that a missed element shows.
inline Buffer sum(Device device, DType dtype, DType asked, const Shape& shape, const Values& before,
                  std::int64_t row_padding = 0) {
  Buffer buffer(device, dtype == DType::f64 ? dtype : asked, shape, row_padding);
  if (buffer.tensor().dtype == type_of_sums(dtype))
    buffer.upload(before.empty() ? Values(static_cast<std::size_t>(elements(shape))) : before);
  return buffer;
}

template <class... Buffers>
void expect_canaries_intact(const Buffers&... buffers) {
  EXPECT_TRUE((buffers.canaries_intact() && ...)) << "memory around a tensor was written to";
}

// ---- Comparisons.

inline ::testing::AssertionResult ok(const harness::Report& report) {
  if (report.ok && !report.skipped) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << harness::line(report);
}

/// Expects bitwise equality, except that all NaN are equal.
inline ::testing::AssertionResult same_bits(const Values& actual, const Values& expected) {
  if (actual.size() != expected.size()) {
    return ::testing::AssertionFailure()
           << actual.size() << " elements, expected " << expected.size();
  }
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (std::isnan(actual[i]) && std::isnan(expected[i])) continue;
    if (std::bit_cast<std::uint64_t>(actual[i]) == std::bit_cast<std::uint64_t>(expected[i]))
      continue;
    return ::testing::AssertionFailure()
           << fmt::format("[{}] is {}, expected {}", i, actual[i], expected[i]);
  }
  return ::testing::AssertionSuccess();
}

inline ::testing::AssertionResult all_equal(const Values& values, double expected) {
  return same_bits(values, Values(values.size(), expected));
}

/// Whether all values are +0 or -0.
inline ::testing::AssertionResult all_zero(const Values& values) {
  for (std::size_t i = 0; i < values.size(); ++i)
    if (values[i] != 0)
      return ::testing::AssertionFailure() << fmt::format("[{}] is {}", i, values[i]);
  return ::testing::AssertionSuccess();
}

// ---- Errors.

/// The message of the Error that `call` throws; empty if it throws none.
template <class Call>
std::string refusal_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace winnow::tests
