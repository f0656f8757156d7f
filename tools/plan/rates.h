// SPDX-License-Identifier: Apache-2.0
// DeviceRates: what was measured of a device, from a JSON file such as h200.json.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace winnow::plan {

/// Where a measured figure comes from.
struct Origin {
  std::string device;
  std::string date;  // "2026-11-15"
  std::string command;
};

struct Figure {
  double value;
  Origin origin;
};

/// How fast a call runs on the geometry of a model.
struct CallRate {
  std::string call;   // the function's name
  std::string model;  // the case's name
  double keys;        // that a query can reach, on average
  double teraflops;
  Origin origin;
};

struct DeviceRates {
  std::string name;
  double memory_bytes;
  double cache_bytes;     // of the L2 cache
  Figure memory_rate;     // bytes that a plain copy reads and writes per second
  Figure matrix_product;  // FLOP/s of the device's own matrix product
  std::vector<CallRate> calls;

  /// The date of the newest call rate.
  std::string_view date() const;
  /// The most keys that a query of any measured call could reach.
  double most_keys() const;
};

/// The calls that a file must rate for glm-5.2, and may rate for other models.
std::span<const std::string_view> rated_calls();

/// Reads the text of a rates file. Throws std::invalid_argument, which begins with `file` and names
/// the key, where one is missing or holds something wrong.
DeviceRates parse_rates(std::string_view text, std::string_view file);
/// The text that parse_rates reads.
std::string rates_text(const DeviceRates& rates);

DeviceRates read_rates(const std::string& file);
/// The text of h200.json, compiled in.
std::string_view h200_text();
/// The compiled rates of a GPU. Throws std::invalid_argument where there are none.
const DeviceRates& find_gpu(std::string_view name);

/// FLOP/s of a call on the geometry of a model, where a query reaches so many keys. Between
/// measurements of the model it is interpolated over the logarithm of the keys. Beyond them it
/// follows the curve of glm-5.2, scaled to meet them, and beyond that curve it stays constant.
double call_rate(const DeviceRates& rates, std::string_view call, std::string_view model,
                 double keys);

}  // namespace winnow::plan
