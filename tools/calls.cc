// SPDX-License-Identifier: Apache-2.0
// The calls of each op on the harness's workloads.
#include "tools/calls.h"

#include <stdexcept>

#include "harness/workloads.h"

namespace winnow::tools {
namespace {

using harness::Placement;

std::vector<Call> list(const harness::KeyWindowsWork& work) {
  return {call("key_windows", work.args)};
}
std::vector<Call> list(const harness::WindowIndicesWork& work) {
  return {call("window_indices", work.args)};
}
std::vector<Call> list(const harness::IndexTopkWork& work) {
  return {call("index_topk_forward", work.forward, work.forward_flops),
          call("index_topk_backward", work.backward, work.backward_flops)};
}
std::vector<Call> list(const harness::SparseAttentionWork& work) {
  return {call("sparse_attention_forward", work.forward, work.forward_flops),
          call("sparse_attention_backward", work.backward, work.backward_flops)};
}
std::vector<Call> list(const harness::ValueProjectionWork& work) {
  return {call("value_projection_forward", work.forward, work.forward_flops),
          call("value_projection_backward", work.backward, work.backward_flops)};
}
std::vector<Call> list(const harness::IndexTargetWork& work) {
  return {call("index_target", work.args, work.flops)};
}
std::vector<Call> list(const harness::IndexLossWork& work) {
  return {call("index_loss", work.args)};
}
std::vector<Call> list(const harness::DenseIndexLossWork& work) {
  return {call("dense_index_loss_forward", work.forward, work.forward_flops),
          call("dense_index_loss_backward", work.backward, work.backward_flops)};
}
std::vector<Call> list(const harness::QuantizeFp8Work& work) {
  return {call("quantize_fp8", work.of_queries)};
}

template <class Work>
Calls make(const harness::Case& c, Device device, std::uint64_t seed) {
  auto work = std::make_shared<const Work>(c, Placement{.device = device}, seed);
  return {work, list(*work)};
}

/// Selection in the working type and in fp8.
Calls make_index_topk(const harness::Case& c, Device device, std::uint64_t seed) {
  using Work = harness::IndexTopkWork;
  const Placement placement{.device = device};
  struct Both {
    Work plain, fp8;
  };
  const std::shared_ptr<const Both> both(
      new Both{.plain = Work(c, placement, seed), .fp8 = Work(c, placement, seed, true)});
  Calls calls{both, list(both->plain)};
  calls.list.push_back(call("index_topk_forward, fp8", both->fp8.forward, both->fp8.forward_flops));
  return calls;
}

struct Maker {
  std::string_view op;
  Calls (*make)(const harness::Case&, Device, std::uint64_t);
};

constexpr Maker kMakers[] = {
    {"key_windows", make<harness::KeyWindowsWork>},
    {"window_indices", make<harness::WindowIndicesWork>},
    {"index_topk", make_index_topk},
    {"sparse_attention", make<harness::SparseAttentionWork>},
    {"value_projection", make<harness::ValueProjectionWork>},
    {"index_target", make<harness::IndexTargetWork>},
    {"index_loss", make<harness::IndexLossWork>},
    {"dense_index_loss", make<harness::DenseIndexLossWork>},
    {"quantize_fp8", make<harness::QuantizeFp8Work>},
};

}  // namespace

Calls calls_of(std::string_view op, const harness::Case& c, Device device, std::uint64_t seed) {
  for (const Maker& maker : kMakers)
    if (maker.op == op) return maker.make(c, device, seed);
  throw std::logic_error("an operator without calls");
}

}  // namespace winnow::tools
