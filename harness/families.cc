// SPDX-License-Identifier: Apache-2.0
// The table of families.
#include "harness/families.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "harness/index_loss.h"
#include "harness/index_topk.h"
#include "harness/quantize_fp8.h"
#include "harness/sparse_attention.h"
#include "harness/value_projection.h"
#include "harness/windows.h"

namespace winnow::harness {
namespace {

struct Family {
  std::string_view name;                // of its operator, or of two without _forward and _backward
  const char* (*missing)(const Case&);  // what a case lacks; null: nothing
  std::vector<Report> (*check)(const Case&, const Execution&, std::uint64_t);
  Calls (*calls)(const Case&, Device, std::uint64_t);
};

const char* nothing(const Case&) { return nullptr; }

const char* projection(const Case& c) { return c.head_dim == 0 ? "no value projection" : nullptr; }

const char* window_or_pools(const Case& c) {
  return c.window == 0 && !c.has_pools() ? "neither a sliding window nor pools" : nullptr;
}

template <class Work>
Calls calls_on(const Case& c, Device device, std::uint64_t seed) {
  const auto work = std::make_shared<const Work>(c, Placement{.device = device}, seed);
  return {work, work->calls()};
}

constexpr Family kFamilies[] = {
    {"key_windows", nothing, check_key_windows, calls_on<KeyWindowsWork>},
    {"window_indices", window_or_pools, check_window_indices, calls_on<WindowIndicesWork>},
    {"index_topk", nothing, check_index_topk, calls_on<IndexTopkWorks>},
    {"sparse_attention", nothing, check_sparse_attention, calls_on<SparseAttentionWork>},
    {"value_projection", projection, check_value_projection, calls_on<ValueProjectionWork>},
    {"index_target", nothing, check_index_target, calls_on<IndexTargetWork>},
    {"index_loss", nothing, check_index_loss, calls_on<IndexLossWork>},
    {"dense_index_loss", nothing, check_dense_index_loss, calls_on<DenseIndexLossWork>},
    {"quantize_fp8", nothing, check_quantize_fp8, calls_on<QuantizeFp8Work>},
};

const Family& find_family(std::string_view op) {
  for (const Family& family : kFamilies)
    if (family.name == op) return family;
  throw std::invalid_argument(fmt::format("no op {}: the ops are {}", op, fmt::join(ops(), ", ")));
}

bool belongs(std::string_view name_of_operator, std::string_view op) {
  if (!name_of_operator.starts_with(op)) return false;
  const std::string_view rest = name_of_operator.substr(op.size());
  return rest.empty() || rest == "_forward" || rest == "_backward";
}

}  // namespace

const std::vector<std::string_view>& ops() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> all;
    for (const Family& family : kFamilies) all.push_back(family.name);
    return all;
  }();
  return names;
}

std::string missing(std::string_view op, const Case& c) {
  const char* const what = find_family(op).missing(c);
  return what == nullptr ? std::string() : fmt::format("case {} has {}", c.name, what);
}

std::vector<std::string_view> kernels_of(std::string_view op, Backend backend) {
  std::vector<std::string_view> names;
  for_each_operator([&]<class Args>(std::type_identity<Args>) {
    if (!belongs(Args::kOperator, op)) return;
    for (const std::string_view name : kernels<Args>(backend))
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  });
  return names;
}

Calls calls_of(std::string_view op, const Case& c, Device device, std::uint64_t seed) {
  return find_family(op).calls(c, device, seed);
}

std::vector<Report> check(std::string_view op, const Case& c, const Execution& execution,
                          std::uint64_t seed) {
  const Family& family = find_family(op);
  Report report;
  report.what = std::string(op);
  report.note = missing(op, c);
  if (!report.note.empty()) {
    report.skipped = true;
    return {report};
  }
  try {
    return family.check(c, execution, seed);
  } catch (const Error& error) {
    report.ok = false;
    report.note = error.what();
    return {report};
  }
}

}  // namespace winnow::harness
