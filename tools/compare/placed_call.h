// SPDX-License-Identifier: Apache-2.0
// PlacedCall: a dumped call with memory of its own, on a device, of all of its rows or of some.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/arguments.h"
#include "harness/memory.h"
#include "tools/compare/dumped_call.h"

namespace winnow::dump {

/// What outputs hold, by name, in logical order; integers too.
using Outputs = std::map<std::string, std::vector<double>, std::less<>>;

struct Placement {
  Device device{};
  harness::Rows rows{};  // query rows of the call, in order; empty: all
  bool as_f64 = false;   // for the oracle: all but integers, keys of fp8 times their scale
};

/// The dimension of a tensor in which its query rows stand: the second, if it has a batch.
std::size_t row_axis(const FormatField& field, const harness::Shape& shape);

/// Values of a tensor, or those of some of its query rows.
std::vector<double> values_of(const harness::Buffer& buffer);
std::vector<double> values_of_rows(const FormatField& field, const harness::Buffer& buffer,
                                   const harness::Rows& rows);

/// The tensors of a call: inputs with the values of the file, outputs with poison, or with 0 where
/// the call adds to them.
class PlacedTensors {
 public:
  PlacedTensors(const DumpedCall& call, const Placement& placement);

  const harness::Buffer& find(std::string_view name) const { return buffers_.find(name); }
  /// Takes the place of what had the name.
  harness::Buffer& put(std::string_view name, DType dtype, const harness::Shape& shape,
                       const std::vector<double>& values);
  bool canaries_intact() const { return buffers_.canaries_intact(); }
  Outputs outputs() const;

  template <Arguments Args>
  Args arguments() const {
    return call_.arguments<Args>(
        [this](const FormatField& field) { return find(field.name).tensor(); });
  }

 private:
  void add_input(const FormatField& field, const harness::Buffer& source);
  void add_output(const FormatField& field, const TypeAndShape& output);

  const DumpedCall& call_;
  Placement placement_;
  harness::NamedBuffers buffers_;
};

}  // namespace winnow::dump
