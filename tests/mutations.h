// SPDX-License-Identifier: Apache-2.0
// Mutates one argument of a call. The mutated call may still be valid, which the op decides.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/call_maker.h"

namespace winnow::tests {

struct Mutation {
  std::string what;                // description for failures
  std::vector<std::string> names;  // one of these words must be in the message; empty: any argument
};

class Mutator {
 public:
  /// `workspace` is valid memory on the device of the call.
  Mutator(std::uint64_t seed, Call& call, Execution& execution, const Buffer& workspace)
      : random_(seed, "mutation"), call_(call), execution_(execution), workspace_(workspace) {}

  Mutation apply() {
    const std::int64_t kind = below(20);
    if (kind < 11) return spoil_tensor();
    if (kind < 14) return spoil_contents();
    if (kind < 17) return spoil_number();
    return spoil_execution();
  }

  std::int64_t below(std::int64_t n) { return random_.below(draw_++, n); }

 private:
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return std::data(choices)[below(static_cast<std::int64_t>(choices.size()))];
  }

  /// If two arguments disagree, the message may name the other one, or the dimension they share.
  static std::vector<std::string> words_for(const std::string& name) {
    std::vector<std::string> words = {name};
    const auto also = [&](const char* argument, std::initializer_list<const char*> others) {
      if (name == argument) words.insert(words.end(), others.begin(), others.end());
    };
    also("k", {"keys"});
    also("kv", {"keys", "key_offset", "index_k"});
    also("index_k", {"keys"});
    also("indices", {"topk"});
    also("out", {"v_dim"});
    also("pool_ids", {"topk"});
    also("cu_seqlens", {"cu_seqlens_padded", "key_offset", "indices"});
    also("cu_seqlens_padded", {"key_offset"});
    also("window", {"topk", "indices"});
    also("ratio", {"key_offset", "indices"});
    also("key_offset", {"index_k"});
    also("replay", {"lengths", "indices"});
    also("scale", {"values"});
    return words;
  }

  static bool leads_types(const Argument& argument) {
    const std::string_view name = argument.name;
    return name == "q" || name == "x" || name == "scores" ||
           (name == "out" && argument.tensor->rank == 3);
  }

  Mutation spoil_tensor() {
    Argument& argument = call_.arguments[below(static_cast<std::int64_t>(call_.arguments.size()))];
    Tensor& tensor = *argument.tensor;
    if (!tensor) return {fmt::format("{} stays absent", argument.name), {argument.name}};
    Mutation mutation{fmt::format("{}: ", argument.name), words_for(argument.name)};
    const std::int32_t rank = std::clamp(tensor.rank, 0, 4);
    const std::int64_t dims = std::max(rank, 1);
    const std::int64_t i = below(dims);
    switch (below(9)) {
      case 0:
        tensor.rank = one_of({-1, 0, rank - 1, rank + 1, 5, 1000, kMaxInt32, kMinInt32});
        mutation.what += fmt::format("rank {}", tensor.rank);
        if (leads_types(argument)) mutation.names.clear();
        break;
      case 1:
        tensor.shape[i] =
            one_of({std::int64_t{-1}, std::numeric_limits<std::int64_t>::min(), std::int64_t{0},
                    below(std::max<std::int64_t>(tensor.shape[i], 1))});
        mutation.what += fmt::format("shape[{}] {}", i, tensor.shape[i]);
        break;
      case 2:  // stride 0 keeps the view within its memory
        tensor.shape[i] = one_of({std::max<std::int64_t>(tensor.shape[i], 0) % 100 + 1 + below(3),
                                  std::int64_t{1} << 31, std::int64_t{1} << 40,
                                  std::numeric_limits<std::int64_t>::max()});
        tensor.stride[i] = 0;
        mutation.what += fmt::format("shape[{}] {} with stride 0", i, tensor.shape[i]);
        break;
      case 3:
        tensor.dtype = static_cast<DType>(one_of({0, 1, 2, 3, 4, 5, 6, -1, 1000000}));
        mutation.what += fmt::format("dtype {}", static_cast<std::int32_t>(tensor.dtype));
        if (leads_types(argument)) mutation.names.clear();
        break;
      case 4:
        tensor.device =
            one_of({Device{DeviceKind::cuda, 0}, Device{DeviceKind::cuda, 7},
                    Device{DeviceKind::cpu, 0}, Device{DeviceKind::cpu, 3},
                    Device{static_cast<DeviceKind>(2), 0}, Device{static_cast<DeviceKind>(-5), 0}});
        mutation.what += fmt::format("device {}:{}", static_cast<std::int32_t>(tensor.device.kind),
                                     tensor.device.index);
        // An address on another device must not be accessed.
        tensor.data = tensor.device == argument.memory.tensor().device
                          ? argument.memory.tensor().data
                          : reinterpret_cast<void*>(std::uintptr_t{0x1000});
        break;
      case 5:
        tensor.data = nullptr;
        mutation.what += "null";
        break;
      case 6:
        tensor.data = argument.begin() + 1;
        mutation.what += "misaligned";
        break;
      default:  // the largest stride overflows 64 bits wherever it is used
        tensor.stride[i] =
            one_of({std::int64_t{-1}, std::numeric_limits<std::int64_t>::min(), std::int64_t{0},
                    std::int64_t{0}, std::int64_t{1}, std::numeric_limits<std::int64_t>::max()});
        mutation.what += fmt::format("stride[{}] {}", i, tensor.stride[i]);
    }
    return mutation;
  }

  /// Mutates one entry of an i32 input.
  Mutation spoil_contents() {
    std::vector<Argument*> candidates;
    for (Argument& argument : call_.arguments)
      if (*argument.tensor && argument.tensor->dtype == DType::i32 && !argument.is_output &&
          argument.memory.tensor().rank > 0 && argument.memory.tensor().shape[0] > 1)
        candidates.push_back(&argument);
    if (candidates.empty()) return spoil_number();
    Argument& argument = *candidates[below(static_cast<std::int64_t>(candidates.size()))];
    Ints words = argument.memory.download_ints();
    // The second half of the memory is unused.
    std::int32_t& entry = words[below(static_cast<std::int64_t>(words.size()) / 2)];
    entry = one_of({-1, -2, kMinInt32, kMaxInt32, 0, 1, 100, std::max(entry, -9) - 1,
                    std::min(entry, 99) + 1});
    argument.memory.upload(words);
    return {fmt::format("{} holds {}", argument.name, entry), words_for(argument.name)};
  }

  Mutation spoil_number() {
    if (call_.numbers.empty()) return spoil_execution();
    const Number& number = call_.numbers[below(static_cast<std::int64_t>(call_.numbers.size()))];
    const double value = number.choices[below(static_cast<std::int64_t>(number.choices.size()))];
    number.set(value);
    return {fmt::format("{} {}", number.name, value), words_for(number.name)};
  }

  Mutation spoil_execution() {
    auto* const memory = static_cast<std::byte*>(workspace_.tensor().data);
    switch (below(8)) {
      case 0:
        execution_.threads = one_of({-1, kMinInt32, 1025, kMaxInt32, 1, 3, 1024});
        return {fmt::format("threads {}", execution_.threads), {"threads"}};
      case 1:
        execution_.backend = static_cast<Backend>(one_of({-1, 0, 1, 2, 3, 4, 1000}));
        return {fmt::format("backend {}", static_cast<std::int32_t>(execution_.backend)),
                {"backend"}};
      case 2:
        execution_.workspace = nullptr;
        execution_.workspace_bytes = 64;
        return {"workspace null", {"workspace"}};
      case 3:
        execution_.workspace = memory + 8;
        execution_.workspace_bytes = workspace_.bytes() / 2;
        return {"workspace misaligned", {"workspace"}};
      case 4:
        execution_.workspace = memory;
        execution_.workspace_bytes = one_of({std::size_t{0}, std::size_t{8}, std::size_t{256}});
        return {fmt::format("workspace of {} bytes", execution_.workspace_bytes), {"workspace"}};
      case 5:
        execution_.workspace = memory;
        execution_.workspace_bytes = static_cast<std::size_t>(workspace_.tensor().shape[0]) * 4;
        return {"workspace ample", {"workspace"}};
      case 6:
        execution_.kernel = one_of({"", "loops", "simd", "general", "fast"});
        return {fmt::format("kernel '{}'", execution_.kernel), {"kernel"}};
      default:
        execution_.workspace_limit =
            one_of({std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{1} << 20,
                    std::numeric_limits<std::size_t>::max()});
        return {fmt::format("workspace_limit {}", execution_.workspace_limit), {"workspace_limit"}};
    }
  }

  Random random_;
  std::int64_t draw_ = 0;
  Call& call_;
  Execution& execution_;
  const Buffer& workspace_;
};

}  // namespace winnow::tests
