// SPDX-License-Identifier: Apache-2.0
// Kernels as nodes of CUDA graphs that are made once and launched with other arguments again.
#pragma once

#include <array>
#include <source_location>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/common/runtime.h"

namespace winnow::cuda {

/// Kernels one after another, which become nodes of a graph. Where an executable of that graph is
/// given, its nodes get the kernels and arguments instead, in the same order.
class NodeChain {
 public:
  NodeChain(cudaGraph_t graph, cudaGraphExec_t executable, std::vector<cudaGraphNode_t>& nodes)
      : graph_(graph), executable_(executable), nodes_(nodes) {}

  /// Stream and PDL do not matter.
  template <class... Parameters, class... Arguments>
  void add(void (*kernel)(Parameters...), const Launch& how, Arguments&&... arguments) {
    std::tuple<Parameters...> held(std::forward<Arguments>(arguments)...);
    std::array<void*, sizeof...(Parameters)> pointers = std::apply(
        [](auto&... each) { return std::array<void*, sizeof...(Parameters)>{&each...}; }, held);
    cudaKernelNodeParams node{};
    node.func = reinterpret_cast<void*>(kernel);
    node.gridDim = dim3(static_cast<unsigned>(how.blocks));
    node.blockDim = dim3(static_cast<unsigned>(how.threads));
    node.sharedMemBytes = static_cast<unsigned>(how.shared_bytes);
    node.kernelParams = pointers.data();
    add(node, how.where);
  }
  cudaGraphNode_t last() const { return nodes_[next_ - 1]; }

 private:
  void add(const cudaKernelNodeParams& node, std::source_location where) {
    if (executable_ != nullptr) {
      cuda_check(cudaGraphExecKernelNodeSetParams(executable_, nodes_[next_], &node), where);
    } else {
      cudaGraphNode_t added = nullptr;
      const cudaGraphNode_t* const before = next_ == 0 ? nullptr : &nodes_[next_ - 1];
      cuda_check(cudaGraphAddKernelNode(&added, graph_, before, next_ == 0 ? 0 : 1, &node), where);
      nodes_.push_back(added);
    }
    ++next_;
  }

  cudaGraph_t graph_;
  cudaGraphExec_t executable_;
  std::vector<cudaGraphNode_t>& nodes_;
  std::size_t next_ = 0;
};

/// A kernel that is launched, or becomes a node where there is a chain.
template <class... Parameters>
class Step {
 public:
  Step(void (*kernel)(Parameters...), const Launch& how)
      : kernel_(kernel), how_(how), launch_(kernel, how) {}

  template <class... Arguments>
  void operator()(NodeChain* chain, Arguments&&... arguments) const {
    if (chain == nullptr)
      launch_(std::forward<Arguments>(arguments)...);
    else
      chain->add(kernel_, how_, std::forward<Arguments>(arguments)...);
  }

 private:
  void (*kernel_)(Parameters...);
  Launch how_;
  Launcher<Parameters...> launch_;
};

}  // namespace winnow::cuda
