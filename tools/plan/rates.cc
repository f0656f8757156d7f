// SPDX-License-Identifier: Apache-2.0
// Reads and writes rates files, and interpolates between the rates.
#include "tools/plan/rates.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

namespace winnow::plan {
namespace {

using Json = nlohmann::ordered_json;

/// The model for which every call is measured: others follow its curves.
constexpr std::string_view kAnchor = "glm-5.2";

constexpr std::array<std::string_view, 7> kRatedCalls{
    "index_topk_forward",       "index_topk_backward",       "index_target",
    "sparse_attention_forward", "sparse_attention_backward", "value_projection_forward",
    "value_projection_backward"};

/// A value of the file, and what refusals call it: "h200.json/calls/3/keys".
struct Value {
  const Json& json;
  std::string where;

  [[noreturn]] void refuse(std::string_view reason) const {
    throw std::invalid_argument(fmt::format("{}: {}", where, reason));
  }
  Value operator[](const char* key) const {
    const auto found = json.find(key);
    if (found == json.end()) refuse(fmt::format("the key '{}' is missing", key));
    return {*found, fmt::format("{}/{}", where, key)};
  }
  std::string text() const {
    if (!json.is_string()) refuse("must be a string");
    return json.get<std::string>();
  }
  double number(double more_than = 0) const {
    const double value = json.is_number() ? json.get<double>() : NAN;
    if (!(value > more_than)) refuse(fmt::format("must be a number of more than {}", more_than));
    return value;
  }
  Origin origin() const {
    return {(*this)["device"].text(), (*this)["date"].text(), (*this)["command"].text()};
  }
  Figure figure() const { return {(*this)["value"].number(), origin()}; }
};

std::vector<CallRate> curve(const DeviceRates& rates, std::string_view call,
                            std::string_view model) {
  std::vector<CallRate> points;
  for (const CallRate& each : rates.calls)
    if (each.call == call && each.model == model) points.push_back(each);
  std::sort(points.begin(), points.end(),
            [](const CallRate& a, const CallRate& b) { return a.keys < b.keys; });
  return points;
}

/// Constant outside of the points.
double interpolated(const std::vector<CallRate>& points, double keys) {
  const auto above = std::find_if(points.begin(), points.end(),
                                  [&](const CallRate& point) { return point.keys >= keys; });
  if (above == points.begin()) return points.front().teraflops;
  if (above == points.end()) return points.back().teraflops;
  const CallRate& below = *(above - 1);
  const double share = std::log(keys / below.keys) / std::log(above->keys / below.keys);
  return std::lerp(below.teraflops, above->teraflops, share);
}

/// Whole numbers are written without a fraction.
Json number(double value) {
  return value == std::floor(value) && value < 1e18 ? Json(static_cast<std::int64_t>(value))
                                                    : Json(value);
}

Json with_origin(Json json, const Origin& origin) {
  json.update({{"device", origin.device}, {"date", origin.date}, {"command", origin.command}});
  return json;
}

std::string line(const Figure& figure) {
  return with_origin({{"value", number(figure.value)}}, figure.origin).dump();
}

}  // namespace

std::string_view DeviceRates::date() const {
  return std::max_element(
             calls.begin(), calls.end(),
             [](const auto& a, const auto& b) { return a.origin.date < b.origin.date; })
      ->origin.date;
}

double DeviceRates::most_keys() const {
  return std::max_element(calls.begin(), calls.end(),
                          [](const auto& a, const auto& b) { return a.keys < b.keys; })
      ->keys;
}

std::span<const std::string_view> rated_calls() { return kRatedCalls; }

DeviceRates parse_rates(std::string_view text, std::string_view file) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::parse_error& error) {
    throw std::invalid_argument(fmt::format("{}: is not JSON: wrong at byte {}", file, error.byte));
  }
  const Value all{json, std::string(file)};
  DeviceRates rates{.name = all["name"].text(),
                    .memory_bytes = all["memory_bytes"].number(),
                    .cache_bytes = all["cache_bytes"].number(-1),
                    .memory_rate = all["memory_rate"].figure(),
                    .matrix_product = all["matrix_product"].figure(),
                    .calls = {}};
  const Value calls = all["calls"];
  if (!calls.json.is_array()) calls.refuse("must be an array");
  for (std::size_t i = 0; i < calls.json.size(); ++i) {
    const Value each{calls.json[i], fmt::format("{}/{}", calls.where, i)};
    rates.calls.push_back({.call = each["call"].text(),
                           .model = each["model"].text(),
                           .keys = each["keys"].number(),
                           .teraflops = each["teraflops"].number(),
                           .origin = each.origin()});
  }
  for (const std::string_view call : kRatedCalls)
    if (curve(rates, call, kAnchor).empty())
      calls.refuse(fmt::format("{} of {} is missing", call, kAnchor));
  return rates;
}

std::string rates_text(const DeviceRates& rates) {
  std::vector<std::string> calls;
  for (const CallRate& each : rates.calls)
    calls.push_back(with_origin({{"call", each.call},
                                 {"model", each.model},
                                 {"keys", number(each.keys)},
                                 {"teraflops", number(each.teraflops)}},
                                each.origin)
                        .dump());
  return fmt::format(
      "{{\n\"name\": {},\n\"memory_bytes\": {},\n\"cache_bytes\": {},\n\"memory_rate\": {},\n"
      "\"matrix_product\": {},\n\"calls\": [\n{}\n]\n}}\n",
      Json(rates.name).dump(), number(rates.memory_bytes).dump(), number(rates.cache_bytes).dump(),
      line(rates.memory_rate), line(rates.matrix_product), fmt::join(calls, ",\n"));
}

DeviceRates read_rates(const std::string& file) {
  std::ifstream stream(file);
  if (!stream || std::filesystem::is_directory(file))
    throw std::runtime_error(fmt::format("cannot read '{}'", file));
  try {
    return parse_rates(std::string(std::istreambuf_iterator(stream), {}), file);
  } catch (const std::invalid_argument& error) {
    // That would be a wrong word of the command line.
    throw std::runtime_error(error.what());
  }
}

const DeviceRates& find_gpu(std::string_view name) {
  static const DeviceRates h200 = parse_rates(h200_text(), "h200.json");
  if (name == h200.name) return h200;
  throw std::invalid_argument(fmt::format("no GPU '{}': measured was {}", name, h200.name));
}

double call_rate(const DeviceRates& rates, std::string_view call, std::string_view model,
                 double keys) {
  const std::vector<CallRate> anchor = curve(rates, call, kAnchor);
  const std::vector<CallRate> own = curve(rates, call, model);
  if (own.empty()) return 1e12 * interpolated(anchor, keys);
  const double nearest = std::clamp(keys, own.front().keys, own.back().keys);
  return 1e12 * interpolated(own, nearest) * interpolated(anchor, keys) /
         interpolated(anchor, nearest);
}

}  // namespace winnow::plan
