// SPDX-License-Identifier: Apache-2.0
// The one comparison: what error a result may have, and the line that says what it has.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "winnow/tensor.h"

namespace winnow::harness {

/// One compared tensor, or a skipped call.
struct Report {
  std::string what{};
  double max = 0;    // largest |actual - expected| in units of its scale
  double rms = 0;    // ||actual - expected|| / ||expected||
  double limit = 0;  // what the judged ones of the two may be
  bool ok = true;
  bool skipped = false;
  std::string note{};    // why it was skipped, or where it went wrong
  std::string kernel{};  // that computed it; empty: no single one did
};

/// "out                            max 3.1e-3  rms 4.0e-4  limit 3.9e-3  ok"
std::string line(const Report& report);

/// How far a result may be from the oracle's.
struct Limit {
  double value;
  bool on_max;
  bool on_rms;
};

// Tolerances stand here and nowhere else. `dtype` is that of the inputs.
Limit output_limit(DType dtype);    // out, out_v
Limit lse_limit(DType dtype);       // max in units of max(1, |lse|)
Limit gradient_limit(DType dtype);  // d_q, d_kv, d_sink and all other gradients
Limit score_limit(DType dtype);     // max in units of the row's score scale
Limit target_limit(DType dtype);    // index_target
Limit loss_limit(DType dtype);      // max in units of max(1, |loss|)
Limit loss_gradient_limit();        // d_scores of index_loss, whose inputs are fp32

/// Compares element by element; NaN and infinities must sit in the same places. `scale` has a unit
/// for every element; empty: the largest |expected| is the unit of all.
Report compare(std::string what, std::span<const double> actual, std::span<const double> expected,
               const Limit& limit, std::span<const double> scale = {});

/// The same where nothing may differ.
Report compare_exactly(std::string what, std::span<const double> actual,
                       std::span<const double> expected);
Report compare_exactly(std::string what, std::span<const std::int32_t> actual,
                       std::span<const std::int32_t> expected);

// Units, one for each element. `sums`: of the magnitudes of all terms that make up an element.
/// max(1, |b|): of lse and of losses.
std::vector<double> at_least_one(std::span<const double> expected);
/// |b| + the sum: of out, whose terms may be rounded to the type of the inputs.
std::vector<double> output_units(DType dtype, std::span<const double> expected,
                                 std::span<const double> sums);
/// |b| + what fp32 may lose of the sum: of a plain product, rounded once.
std::vector<double> product_units(DType dtype, std::span<const double> expected,
                                  std::span<const double> sums);

}  // namespace winnow::harness
