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
#include "tests/callers_memory.h"
#include "tests/placements.h"

namespace winnow::tests {

struct Mutation {
  std::string what;                // description for failures
  std::vector<std::string> names;  // one of these words must be in the message; empty: any argument
};

class Mutator {
 public:
  /// `workspace` is valid memory on the device of the call, `allocated` that of its allocator.
  Mutator(std::uint64_t seed, Call& call, Execution& execution, const Buffer& workspace,
          CallersMemory& allocated)
      : random_(seed, "mutation"),
        call_(call),
        execution_(execution),
        workspace_(workspace),
        allocated_(allocated) {}

  Mutation apply() {
    const std::int64_t kind = below(24);
    if (kind < 12) return spoil_tensor();
    if (kind < 15) return spoil_contents();
    if (kind < 18) return spoil_number();
    if (kind < 21) return place_tensor();
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
    if (!tensor || argument.is_placed)
      return {fmt::format("{} stays as it is", argument.name), {argument.name}};
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

  /// Places a tensor among or over another one, or with gaps between its rows.
  Mutation place_tensor() {
    std::vector<Argument*> plain;
    for (Argument& argument : call_.arguments)
      if (is_plain(argument)) plain.push_back(&argument);
    if (plain.empty()) return spoil_number();
    const auto count = static_cast<std::int64_t>(plain.size());
    Argument& a = *plain[below(count)];
    Argument& b = *plain[below(count)];
    const auto inner = [&](const Argument& argument, std::int64_t least) {
      return static_cast<int>(least + below(argument.tensor->rank - least));
    };
    std::vector<std::string> names = words_for(a.name);
    for (const std::string& word : words_for(b.name)) names.push_back(word);
    if (&a != &b && below(2) == 0) {
      // With an output the call must be refused, whatever the types, unless they lie behind each
      // other. Inputs of one type may share their values; others would make sums inexact.
      const bool has_output = a.is_output || b.is_output;
      const std::int64_t offset = has_output ? 8 * below(4) : 0;
      if ((has_output || (a.tensor->dtype == b.tensor->dtype &&
                          a.memory.tensor().shape[0] <= b.memory.tensor().shape[0])) &&
          put_over(a, b, offset, has_output))
        return {fmt::format("{} over {} + {}", a.name, b.name, offset), names};
    }
    if (b.tensor->rank < 2) return {fmt::format("{} stays as it is", b.name), names};
    const int b_inner = inner(b, 1);
    if (&a != &b && put_between(a, inner(a, 0), b, b_inner))
      return {fmt::format("{} between rows of {}", a.name, b.name), names};
    spread_rows(b, b_inner);
    return {fmt::format("{} with gaps", b.name), names};
  }

  /// Mutates one entry or all entries of an i32 input.
  Mutation spoil_contents() {
    std::vector<Argument*> candidates;
    for (Argument& argument : call_.arguments)
      if (*argument.tensor && argument.tensor->dtype == DType::i32 && !argument.is_output &&
          !argument.is_placed && argument.memory.tensor().rank > 0 &&
          argument.memory.tensor().shape[0] > 1)
        candidates.push_back(&argument);
    if (candidates.empty()) return spoil_number();
    Argument& argument = *candidates[below(static_cast<std::int64_t>(candidates.size()))];
    Ints words = argument.memory.download_ints();
    const auto hostile = [&](std::int32_t entry) {
      return one_of({-1, -2, kMinInt32, kMaxInt32, 0, 1, 100, std::max(entry, -9) - 1,
                     std::min(entry, 99) + 1});
    };
    const std::size_t count = words.size() / 2;  // the second half of the memory is unused
    std::string what;
    if (below(4) == 0) {
      std::transform(words.begin(), words.begin() + count, words.begin(), hostile);
      what = fmt::format("{} holds {}", argument.name,
                         fmt::join(words.begin(), words.begin() + count, " "));
    } else {
      std::int32_t& entry = words[below(static_cast<std::int64_t>(count))];
      entry = hostile(entry);
      what = fmt::format("{} holds {}", argument.name, entry);
    }
    argument.memory.upload(words);
    return {what, words_for(argument.name)};
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
    switch (below(12)) {
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
      case 6: {  // at the end of the memory, so that a byte behind it is a canary
        const std::size_t needed = workspace_bytes();
        const auto missing = std::min(static_cast<std::size_t>(below(2)), needed);
        const std::size_t all = static_cast<std::size_t>(workspace_.tensor().shape[0]) * 4;
        const std::size_t first = (all - needed) / 16 * 16;
        execution_.workspace = memory + first;
        execution_.workspace_bytes = needed - missing;
        return {fmt::format("workspace of {} bytes, {} too few", needed, missing), {"workspace"}};
      }
      case 7:
        if (!is_plain(call_.arguments[0])) return spoil_number();
        call_.arguments[0].is_placed = true;  // or it might not be there any more
        execution_.workspace = call_.arguments[0].begin();
        execution_.workspace_bytes = one_of({std::size_t{16}, std::size_t{1} << 16});
        return {"workspace over the first argument", {"workspace"}};
      case 8:
      case 9:
        execution_.workspace = nullptr;
        execution_.workspace_bytes = 0;
        execution_.allocate = CallersMemory::allocate;
        execution_.allocate_context = &allocated_;
        allocated_.exhausted = below(4) == 0;
        allocated_.shift = below(4) == 0 ? 8 : 0;
        return {fmt::format("allocator, {}, {} bytes on",
                            allocated_.exhausted ? "exhausted" : "with memory", allocated_.shift),
                {"allocate"}};
      case 10:
        execution_.kernel = one_of({"", "loops", "simd", "general", "fast"});
        return {fmt::format("kernel '{}'", execution_.kernel), {"kernel"}};
      default:
        execution_.workspace_limit =
            one_of({std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{1} << 20,
                    std::numeric_limits<std::size_t>::max()});
        return {fmt::format("workspace_limit {}", execution_.workspace_limit), {"workspace_limit"}};
    }
  }

  /// What the call asks for; 0 if it is refused, or if that is more than there is.
  std::size_t workspace_bytes() const {
    try {
      const std::size_t bytes = call_.workspace_bytes(execution_);
      return bytes < workspace_.bytes() / 2 ? bytes : 0;
    } catch (const Error&) {
      return 0;
    }
  }

  Random random_;
  std::int64_t draw_ = 0;
  Call& call_;
  Execution& execution_;
  const Buffer& workspace_;
  CallersMemory& allocated_;
};

}  // namespace winnow::tests
