// SPDX-License-Identifier: Apache-2.0
// locate: where an output differs from what it should be, first and most.
#pragma once

#include <span>

#include "tools/compare/judge.h"

namespace winnow::dump {

/// The names of a tensor's dimensions: those of its field, and one more where it has a batch.
std::vector<std::string_view> dimension_names(const FormatField& field, std::size_t rank);

/// Sets `most` and `first` of a finding, whose limit decides what is first; `rows` says which rows
/// of the call those of the tensor are (empty: the same).
void locate(const FormatField& field, const harness::Shape& shape, const harness::Rows& rows,
            std::span<const double> actual, std::span<const double> expected,
            std::span<const double> units, Finding& finding);

}  // namespace winnow::dump
