// SPDX-License-Identifier: Apache-2.0
// Conditions of graphs, which kernels set.
#include <map>
#include <mutex>

#include "emulator/runtime/device.h"
#include "emulator/runtime/errors.h"
#include "emulator/runtime/graph.h"

namespace winnow::emulator {
namespace {

/// Condition of each handle; they are few and stay for ever.
struct Conditions {
  std::mutex mutex;
  std::map<cudaGraphConditionalHandle, std::shared_ptr<Condition>> all;
};

Conditions& conditions() {
  static auto* const one = new Conditions;
  return *one;
}

/// cudaGraphSetConditional(handle, value) of device code.
void set_condition(const std::vector<std::uint64_t>& arguments) {
  Conditions& known = conditions();
  const std::lock_guard lock(known.mutex);
  const auto found = arguments.size() < 2 ? known.all.end() : known.all.find(arguments[0]);
  if (found == known.all.end()) {
    throw KernelError("cudaGraphSetConditional was called with a handle that is none");
  }
  found->second->value = static_cast<unsigned>(arguments[1]);
}

}  // namespace

std::shared_ptr<Condition> find_condition(cudaGraphConditionalHandle handle) {
  Conditions& known = conditions();
  const std::lock_guard lock(known.mutex);
  const auto found = known.all.find(handle);
  require(found != known.all.end());
  return found->second;
}

}  // namespace winnow::emulator

using namespace winnow::emulator;

cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle* handle, cudaGraph_t graph,
                                             unsigned at_launch, unsigned flags) {
  return call([&] {
    require(handle != nullptr && (flags & ~unsigned{cudaGraphCondAssignDefault}) == 0);
    const auto condition = std::make_shared<Condition>();
    condition->at_launch = at_launch;
    condition->is_reset = (flags & cudaGraphCondAssignDefault) != 0;
    graph_of(graph).conditions.push_back(condition);
    {
      const LockedGpu gpu;
      gpu->device_calls["cudaGraphSetConditional"] = set_condition;
    }
    Conditions& known = conditions();
    const std::lock_guard lock(known.mutex);
    constexpr cudaGraphConditionalHandle kFirst = 0x636f6e64'00000001;  // not a likely number
    *handle = kFirst + known.all.size();
    known.all.emplace(*handle, condition);
  });
}
