// SPDX-License-Identifier: Apache-2.0
// Workloads by the name of their op.
#include "harness/workloads.h"

#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace winnow::harness {
namespace {

template <class Work>
Prepared prepared(const Case& c, Device device, std::uint64_t seed) {
  const auto work = std::make_shared<const Work>(c, Placement{.device = device}, seed);
  return {work, work->steps(), work->buffers.bytes()};
}

Prepared prepared_index_topk(const Case& c, Device device, std::uint64_t seed) {
  Prepared result = prepared<IndexTopkWork>(c, device, seed);
  const auto fp8 =
      std::make_shared<const IndexTopkWork>(c, Placement{.device = device}, seed, true);
  result.memory =
      std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>>(
          result.memory, fp8);
  result.steps.push_back(step("forward fp8", fp8->forward, fp8->forward_flops));
  result.bytes += fp8->buffers.bytes();
  return result;
}

struct Maker {
  std::string_view op;
  Prepared (*prepare)(const Case&, Device, std::uint64_t);
};

constexpr Maker kMakers[] = {
    {"key_windows", prepared<KeyWindowsWork>},
    {"window_indices", prepared<WindowIndicesWork>},
    {"index_topk", prepared_index_topk},
    {"sparse_attention", prepared<SparseAttentionWork>},
    {"value_projection", prepared<ValueProjectionWork>},
    {"index_target", prepared<IndexTargetWork>},
    {"index_loss", prepared<IndexLossWork>},
    {"dense_index_loss", prepared<DenseIndexLossWork>},
    {"quantize_fp8", prepared<QuantizeFp8Work>},
};

}  // namespace

Prepared prepare(std::string_view op, const Case& c, Device device, std::uint64_t seed) {
  if (const std::string reason = missing(op, c); !reason.empty())
    throw std::invalid_argument(reason);
  for (const Maker& maker : kMakers)
    if (maker.op == op) return maker.prepare(c, device, seed);
  throw std::invalid_argument(fmt::format("no op {}: the ops are {}", op, fmt::join(ops(), ", ")));
}

const std::vector<std::string_view>& ops() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> all;
    for (const Maker& maker : kMakers) all.push_back(maker.op);
    return all;
  }();
  return names;
}

std::string missing(std::string_view op, const Case& c) {
  if (op == "value_projection" && c.head_dim == 0)
    return fmt::format("case {} has no value projection", c.name);
  if (op == "window_indices" && c.window == 0 && !c.has_pools())
    return fmt::format("case {} has neither a sliding window nor pools", c.name);
  return {};
}

}  // namespace winnow::harness
