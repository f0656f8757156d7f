// SPDX-License-Identifier: Apache-2.0
// What all workloads share: where one lives, what part of its case it holds, how buffers are made.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

/// One call of a workload.
struct Step {
  std::string name;
  double flops = 0;  // 0: bound by memory
  std::function<void(const Execution&)> run;
  std::function<std::string(const Execution&)> why_not;
};

// The ops by one name, so that a call can be made from its arguments alone.
void run(const KeyWindows& args, const Execution& execution);
void run(const WindowIndices& args, const Execution& execution);
void run(const IndexTopkForward& args, const Execution& execution);
void run(const IndexTopkBackward& args, const Execution& execution);
void run(const SparseAttentionForward& args, const Execution& execution);
void run(const SparseAttentionBackward& args, const Execution& execution);
void run(const ValueProjectionForward& args, const Execution& execution);
void run(const ValueProjectionBackward& args, const Execution& execution);
void run(const IndexTarget& args, const Execution& execution);
void run(const IndexLoss& args, const Execution& execution);
void run(const DenseIndexLossForward& args, const Execution& execution);
void run(const DenseIndexLossBackward& args, const Execution& execution);
void run(const QuantizeFp8& args, const Execution& execution);

template <class Args>
Step step(std::string name, const Args& args, double flops) {
  return {std::move(name), flops, [args](const Execution& execution) { run(args, execution); },
          [args](const Execution& execution) { return why_not(args, execution); }};
}

/// Makes and owns the buffers of one workload.
/// Query tensors have the query rows as their first dimension and hold those of the placement, but
/// values are asked for by lines of the whole case. With a batch, rows count over all slices.
class Buffers {
 public:
  Buffers(const Case& c, const Placement& placement, std::uint64_t seed, std::int64_t batch = 0);
  Buffers(const Buffers&) = delete;  // workloads hold references to its buffers
  Buffers& operator=(const Buffers&) = delete;

  bool as_f64() const { return placement_.as_f64; }

  Buffer& query_input(DType dtype, const Shape& inner, const Values& values);
  Buffer& query_ints(const Shape& inner, const std::vector<std::int32_t>& of_case);
  Buffer& query_output(DType dtype, const Shape& inner);

  Buffer& input(DType dtype, const Shape& shape, const Values& values);
  Buffer& ints(const std::vector<std::int32_t>& values);
  Buffer& output(DType dtype, const Shape& shape);
  /// f32 that a call adds to: it starts with numbers of its own, in the oracle with 0.
  Buffer& sum(const Shape& shape);
  Buffer& absent();
  /// The sink of the case, [heads]; absent where it has none.
  Buffer& sink(const Case& c);

  /// Values of a stream of the seed: factor * (mean + a normal number).
  Values normal(std::string_view stream, double factor = 1, double mean = 0) const;
  Values whole_numbers(std::string_view stream, std::int64_t largest) const;  // of both signs
  /// `values`, but 0 in query rows without an incoming gradient.
  Values if_live(std::int64_t lines_of_row, Values values) const;

  std::size_t bytes() const;
  bool canaries_intact() const;

 private:
  Shape query_shape(const Shape& inner) const;
  Buffer& add(DType dtype, const Shape& shape);

  Placement placement_;
  std::uint64_t seed_;
  std::int64_t batch_;
  std::int64_t tokens_;
  std::int64_t row_padding_;
  Rows rows_;               // of the case, over all slices of the batch
  std::vector<bool> live_;  // by row of the case
  std::deque<Buffer> buffers_;
};

/// NaN in lines that no call may read, `values` in others.
Values nan_unless(std::vector<bool> readable, std::int64_t lines_each, Values values);

}  // namespace winnow::harness
