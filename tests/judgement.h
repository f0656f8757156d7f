// SPDX-License-Identifier: Apache-2.0
// Checks a call of the fuzz test: what it left in memory, or the message of its refusal.
#pragma once

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tests/call_maker.h"
#include "tests/mutations.h"

namespace winnow::tests {

// ---- Memory after a call.

using Snapshot = std::vector<Ints>;

inline Snapshot snapshot(const Call& call) {
  Snapshot result;
  for (const Argument& argument : call.arguments)
    result.push_back(argument.memory.tensor() ? argument.memory.download_ints() : Ints{});
  return result;
}

inline bool canaries_intact(const Call& call) {
  return std::all_of(call.arguments.begin(), call.arguments.end(),
                     [](const Argument& argument) { return argument.memory.canaries_intact(); });
}

/// The argument whose memory the tensor is in.
inline const Argument& place_of(const Argument& argument) {
  return argument.within != nullptr ? *argument.within : argument;
}

/// Where the elements of a legal tensor begin in its memory, in bytes and in logical order.
inline std::vector<std::int64_t> element_offsets(const Argument& argument) {
  const Tensor& tensor = *argument.tensor;
  const std::int64_t size = element_bytes(tensor.dtype);
  std::vector<std::int64_t> result(static_cast<std::size_t>(elements_of(tensor, 0, tensor.rank)));
  for (std::size_t i = 0; i < result.size(); ++i) {
    auto rest = static_cast<std::int64_t>(i);
    result[i] = static_cast<std::byte*>(tensor.data) - place_of(argument).begin();
    for (std::int32_t d = tensor.rank - 1; d >= 0; --d) {
      result[i] += rest % tensor.shape[d] * tensor.stride[d] * size;
      rest /= tensor.shape[d];
    }
  }
  return result;
}

/// The elements of a tensor in logical order, independent of its strides.
inline Values read(const Argument& argument) {
  const DType dtype = argument.tensor->dtype;
  const Bytes bytes = bytes_of(place_of(argument).memory);
  Values result;
  for (const std::int64_t offset : element_offsets(argument)) {
    double& element = result.emplace_back();
    if (dtype == DType::i32) {
      std::int32_t value = 0;
      std::memcpy(&value, bytes.data() + offset, sizeof value);
      element = value;
    } else {
      harness::decode(dtype, bytes.data() + offset, std::span(&element, 1));
    }
  }
  return result;
}

/// Expects that no byte beside the elements of the outputs has changed.
inline void expect_only_outputs_written(const Call& call, Snapshot before) {
  Snapshot after = snapshot(call);
  for (const Argument& output : call.arguments) {
    if (!output.is_output || !*output.tensor) continue;
    const auto place = static_cast<std::size_t>(&place_of(output) - call.arguments.data());
    const auto size = static_cast<std::size_t>(element_bytes(output.tensor->dtype));
    for (const std::int64_t offset : element_offsets(output))
      for (Snapshot* const memory : {&before, &after})
        std::memset(reinterpret_cast<std::byte*>((*memory)[place].data()) + offset, 0, size);
  }
  for (std::size_t i = 0; i < after.size(); ++i)
    EXPECT_EQ(after[i], before[i])
        << "written to beside the outputs: the memory of " << call.arguments[i].name;
}

/// Tolerance of an output against the reference, relative to its largest element or 1; 0 if the
/// inputs make every sum exact.
inline double limit_of(const Call& call, std::string_view argument) {
  if (call.op.starts_with("index_topk") || call.op.starts_with("value_projection") ||
      call.op == "quantize_fp8" || call.op == "key_windows" || call.op == "window_indices")
    return 0;
  const DType dtype = call.arguments[0].tensor->dtype;
  if (argument == "out") return harness::output_limit(dtype).value;
  if (argument == "lse" || argument == "max_logits") return harness::lse_limit(dtype).value;
  if (argument == "target") return harness::target_limit(dtype).value;
  if (argument == "loss") return harness::loss_limit(dtype).value;
  return harness::gradient_limit(dtype).value;
}

/// Compares the outputs of two runs of the same call.
inline void expect_equal_outputs(const Call& actual, const Call& expected, bool same_backend) {
  for (std::size_t i = 0; i < actual.arguments.size(); ++i) {
    const Argument& argument = actual.arguments[i];
    if (!argument.is_output || !*argument.tensor) continue;
    const Values a = read(argument);
    const Values b = read(expected.arguments[i]);
    const double limit = limit_of(actual, argument.name);
    if (same_backend) {
      EXPECT_TRUE(same_bits(a, b)) << argument.name;
    } else if (limit == 0) {
      EXPECT_TRUE(ok(harness::compare_exactly(argument.name, a, b)));
    } else {
      double unit = 1;
      for (const double value : b)
        if (std::isfinite(value)) unit = std::max(unit, std::abs(value));
      EXPECT_TRUE(ok(compare(argument.name, a, b, {limit, true, false}, Values(b.size(), unit))));
    }
  }
}

// ---- Messages of refusals.

/// Whether `text` contains `word` as a whole word.
inline bool names(std::string_view text, std::string_view word) {
  const auto is_letter = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
  };
  for (std::size_t at = text.find(word); at != std::string_view::npos;
       at = text.find(word, at + 1)) {
    const std::size_t end = at + word.size();
    if ((at == 0 || !is_letter(text[at - 1])) && (end == text.size() || !is_letter(text[end])))
      return true;
  }
  return false;
}

inline void expect_named(const Call& call, const Error& error,
                         const std::vector<Mutation>& mutations) {
  const std::string text = error.what();
  ASSERT_TRUE(text.starts_with(std::string(call.op) + ": ")) << text;
  const std::string_view rest = std::string_view(text).substr(call.op.size() + 2);
  ASSERT_FALSE(mutations.empty()) << text;
  if (mutations.size() > 1) return;
  const std::vector<std::string>& words = mutations[0].names;
  bool named = std::any_of(words.begin(), words.end(),
                           [&](const std::string& word) { return names(rest, word); });
  for (const Argument& argument : call.arguments)
    named = named || (words.empty() && names(rest, argument.name));
  EXPECT_TRUE(named) << text;
}

/// Checks that workspace_bytes and why_not agree with the call itself.
inline void expect_one_answer(const Call& call, const Execution& execution, const Error& error) {
  if (names(error.what(), "allocate")) return;  // only the call itself asks for memory
  if (error.code() == ErrorCode::unsupported) {
    EXPECT_EQ(std::string(call.op) + ": " + call.why_not(execution), error.what());
  } else if (!names(error.what(), "workspace_bytes")) {
    EXPECT_EQ(refusal_of([&] { call.why_not(execution); }), error.what());
  }
  if (!names(error.what(), "workspace_bytes")) {
    EXPECT_EQ(refusal_of([&] { call.workspace_bytes(execution); }), error.what());
  }
}

}  // namespace winnow::tests
