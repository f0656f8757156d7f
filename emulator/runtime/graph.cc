// SPDX-License-Identifier: Apache-2.0
// Makes, copies and runs graphs.
#include "emulator/runtime/graph.h"

#include <algorithm>
#include <utility>

#include "emulator/runtime/errors.h"

namespace winnow::emulator {
namespace {

void run_node(const Node& node) {
  if (node.action.run) node.action.run();
  if (node.condition == nullptr) return;
  while (node.condition->value != 0 && broken() == cudaSuccess) node.body->run();
}

}  // namespace

Node& Graph::add(Action action) {
  static std::atomic<std::uint64_t> ids = 0;
  auto node = std::make_unique<Node>();
  node->id = ++ids;
  node->action = std::move(action);
  return *nodes.emplace_back(std::move(node));
}

Node* Graph::find(std::uint64_t id) const {
  for (const std::unique_ptr<Node>& node : nodes) {
    if (node->id == id) return node.get();
    if (node->body == nullptr) continue;
    if (Node* const found = node->body->find(id)) return found;
  }
  return nullptr;
}

bool Graph::on_host() const {
  return std::ranges::any_of(nodes, [](const auto& node) {
    return node->action.on_host || (node->body != nullptr && node->body->on_host());
  });
}

std::unique_ptr<Graph> Graph::copy() const {
  auto copied = std::make_unique<Graph>();
  copied->conditions = conditions;
  for (const std::unique_ptr<Node>& node : nodes) {
    auto made = std::make_unique<Node>();
    made->id = node->id;
    made->action = node->action;
    made->condition = node->condition;
    if (node->body != nullptr) made->body = node->body->copy();
    copied->nodes.push_back(std::move(made));
  }
  return copied;
}

void Graph::run() const {
  for (const std::unique_ptr<Node>& node : nodes) {
    if (broken() != cudaSuccess) return;
    run_node(*node);
  }
}

Graph& graph_of(cudaGraph_t handle) {
  require(handle != nullptr);
  return *reinterpret_cast<Graph*>(handle);
}

Node& node_of(cudaGraphNode_t handle) {
  require(handle != nullptr);
  return *reinterpret_cast<Node*>(handle);
}

}  // namespace winnow::emulator
