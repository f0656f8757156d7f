// SPDX-License-Identifier: Apache-2.0
// Graphs: nodes in the order in which they were made, which is one that their edges allow.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <cuda_runtime_api.h>

namespace winnow::emulator {

/// What cudaGraphSetConditional sets on the device.
struct Condition {
  std::atomic<unsigned> value = 0;
  unsigned at_launch = 0;
  bool is_reset = false;  // to at_launch by every launch
};

struct Graph;

/// What a node does, which throws nothing.
struct Action {
  std::function<void()> run;
  bool is_kernel = false;
  bool on_host = false;  // a function of the host, which may take its time
};

struct Node {
  std::uint64_t id = 0;  // the same in copies of the graph
  Action action;

  // Of nodes that run their body while a condition is not zero.
  std::shared_ptr<Condition> condition;
  std::unique_ptr<Graph> body;
  cudaGraph_t body_handle = nullptr;
};

struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
  std::vector<std::shared_ptr<Condition>> conditions;  // of its handles

  Node& add(Action action);
  /// Null if there is none, here or in a body.
  Node* find(std::uint64_t id) const;
  /// Whether a node is a function of the host, here or in a body.
  bool on_host() const;
  /// Shares its conditions.
  std::unique_ptr<Graph> copy() const;
  /// Stops where a kernel fails.
  void run() const;
};

inline cudaGraph_t handle_of(Graph* graph) { return reinterpret_cast<cudaGraph_t>(graph); }
inline cudaGraphNode_t handle_of(Node* node) { return reinterpret_cast<cudaGraphNode_t>(node); }
/// Fails for null.
Graph& graph_of(cudaGraph_t handle);
Node& node_of(cudaGraphNode_t handle);

/// The condition of a handle that cudaGraphConditionalHandleCreate gave.
std::shared_ptr<Condition> find_condition(cudaGraphConditionalHandle handle);

}  // namespace winnow::emulator
