// SPDX-License-Identifier: Apache-2.0
// arguments: an argument struct from tensors that have the names of its fields.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "harness/memory.h"
#include "winnow/operators.h"

namespace winnow::harness {

/// Every tensor is find(name, role) of its field. Options are those of `args`.
template <Arguments Args, class Find>
Args arguments(const Find& find, Args args = {}) {
  for_each_field<Args>([&]<class Value>(const Field<Args, Value>& field) {
    if constexpr (std::is_same_v<Value, Tensor>)
      args.*field.member = find(std::string_view(field.name), field.role);
  });
  return args;
}

/// What a layer calls an argument of an operator: there the indexer's tensors must not be taken for
/// those of attention.
template <Arguments Args>
std::string_view name_in_layer(std::string_view argument) {
  constexpr bool kIsIndexer =
      std::is_same_v<Args, IndexTopkForward> || std::is_same_v<Args, IndexTopkBackward>;
  constexpr bool kIsOnSelection =
      kIsIndexer || std::is_same_v<Args, IndexTarget> || std::is_same_v<Args, IndexLoss>;
  constexpr std::pair<const char*, const char*> kOfIndexer[] = {
      {"q", "index_q"}, {"k", "index_k"}, {"d_q", "d_index_q"}, {"d_k", "d_index_k"}};
  constexpr std::pair<const char*, const char*> kOnSelection[] = {{"indices", "selected"},
                                                                  {"lengths", "selected_lengths"}};
  for (const auto& [name, in_layer] : kOfIndexer)
    if (kIsIndexer && argument == name) return in_layer;
  for (const auto& [name, in_layer] : kOnSelection)
    if (kIsOnSelection && argument == name) return in_layer;
  return argument == "pool_ids" ? "selected" : argument;
}

/// As arguments, but find gets the names that they have in a layer.
template <Arguments Args, class Find>
Args layer_arguments(const Find& find, const Args& args = {}) {
  return arguments<Args>(
      [&](std::string_view name, FieldRole role) { return find(name_in_layer<Args>(name), role); },
      args);
}

/// Owns buffers by the names of their tensors.
class NamedBuffers {
 public:
  NamedBuffers() = default;
  NamedBuffers(const NamedBuffers&) = delete;  // owners hold references to its buffers
  NamedBuffers& operator=(const NamedBuffers&) = delete;

  Buffer& add(std::string_view name, Buffer buffer) {
    return *by_name_.insert_or_assign(std::string(name), &buffers_.emplace_back(std::move(buffer)))
                .first->second;
  }
  /// One more name for a buffer that is here.
  Buffer& alias(const std::string& name, const std::string& of) {
    return *(by_name_[name] = by_name_.at(of));
  }
  /// An absent one where nothing has the name.
  const Buffer& find(std::string_view name) const {
    static const Buffer absent;
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? absent : *found->second;
  }

  template <Arguments Args>
  Args arguments() const {
    return harness::arguments<Args>(
        [this](std::string_view name, FieldRole) { return find(name).tensor(); });
  }
  template <Arguments Args>
  Args layer_arguments() const {
    return harness::layer_arguments<Args>(
        [this](std::string_view name, FieldRole) { return find(name).tensor(); });
  }

  bool canaries_intact() const {
    for (const Buffer& buffer : buffers_)
      if (!buffer.canaries_intact()) return false;
    return true;
  }

 private:
  std::deque<Buffer> buffers_;  // keeps its elements where they are
  std::map<std::string, Buffer*, std::less<>> by_name_;
};

}  // namespace winnow::harness
