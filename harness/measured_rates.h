// SPDX-License-Identifier: Apache-2.0
// What was measured of a GPU: its own limits, and how fast the calls run on it.
#pragma once

#include <span>
#include <string_view>

namespace winnow::harness {

struct MeasuredRate {
  std::string_view call;  // the function's name
  std::string_view geometry;
  double keys;  // that a query could reach, in the mean
  double teraflops;
};

struct Gpu {
  std::string_view name;
  std::string_view measured;  // the day
  double memory_bytes;
  double memory_rate;                   // bytes read and written a second by a plain copy
  double cache_bytes;                   // L2
  double matrix_product;                // FLOP/s, bf16
  double measured_keys;                 // the most that a query of any measurement could reach
  std::span<const MeasuredRate> rates;  // of one call and geometry by ascending keys
};

/// Throws std::invalid_argument for a GPU that was not measured.
const Gpu& find_gpu(std::string_view name);

/// FLOP/s of a call on the geometry of a model's case, where a query reaches so many keys. Between
/// measurements of the geometry it is interpolated over the logarithm of the keys; beyond them it
/// follows glm-5.2's, scaled to meet them; beyond those it stays.
double measured_rate(const Gpu& gpu, std::string_view call, std::string_view geometry, double keys);

}  // namespace winnow::harness
