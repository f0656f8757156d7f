// SPDX-License-Identifier: Apache-2.0
// Buffers: the memory of a case, filled; where it lives and what part of the case it holds.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "harness/arguments.h"
#include "harness/cases.h"
#include "harness/memory.h"
#include "winnow/winnow.h"

namespace winnow::harness {

/// A workload of the same case and seed holds the same numbers wherever it is placed.
struct Placement {
  Device device{};
  bool as_f64 = false;  // for the oracle: floating-point tensors are f64, of the rounded values
  Rows rows{};          // query rows of the case that are held; empty: all
  Rows live_rows{};     // query rows with an incoming gradient, others have 0; empty: all
};

/// Makes and owns the buffers of one workload.
/// Query tensors have the query rows as their first dimension and hold those of the placement, but
/// values are asked for by lines of the whole case. With a batch, rows count over all slices.
class Buffers {
 public:
  Buffers(const Case& c, const Placement& placement, std::uint64_t seed, std::int64_t batch = 0);

  bool as_f64() const { return placement_.as_f64; }

  Buffer& query_input(std::string_view name, DType dtype, const Shape& inner, const Values& values);
  Buffer& query_ints(std::string_view name, const Shape& inner,
                     const std::vector<std::int32_t>& of_case);
  Buffer& query_output(std::string_view name, DType dtype, const Shape& inner);

  Buffer& input(std::string_view name, DType dtype, const Shape& shape, const Values& values);
  Buffer& ints(std::string_view name, const std::vector<std::int32_t>& values);
  Buffer& output(std::string_view name, DType dtype, const Shape& shape);
  /// f32 that a call adds to: it starts with numbers of its own, in the oracle with 0.
  Buffer& sum(std::string_view name, const Shape& shape);
  Buffer& absent() { return named_.add({}, {}); }
  Buffer& alias(const char* name, const char* of) { return named_.alias(name, of); }
  /// The sink of the case, [heads]; absent where it has none.
  Buffer& sink(const Case& c);

  /// Values of a stream of the seed: factor * (mean + a normal number).
  Values normal(std::string_view stream, double factor = 1, double mean = 0) const;
  Values whole_numbers(std::string_view stream, std::int64_t largest) const;  // of both signs
  /// `values`, but 0 in query rows without an incoming gradient.
  Values if_live(std::int64_t lines_of_row, Values values) const;

  // As in NamedBuffers.
  const Buffer& find(std::string_view name) const { return named_.find(name); }
  template <Arguments Args>
  Args arguments() const {
    return named_.arguments<Args>();
  }
  template <Arguments Args>
  Args layer_arguments() const {
    return named_.layer_arguments<Args>();
  }
  bool canaries_intact() const { return named_.canaries_intact(); }

 private:
  Shape query_shape(const Shape& inner) const;
  Buffer& add(std::string_view name, DType dtype, const Shape& shape);

  Placement placement_;
  std::uint64_t seed_;
  std::int64_t batch_;
  std::int64_t tokens_;
  std::int64_t row_padding_;
  Rows rows_;               // of the case, over all slices of the batch
  std::vector<bool> live_;  // by row of the case
  NamedBuffers named_;
};

/// NaN in lines that no call may read, `values` in others.
Values nan_unless(std::vector<bool> readable, std::int64_t lines_each, Values values);

}  // namespace winnow::harness
