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

/// The elements of a tensor in logical order, independent of its strides.
inline Values read(const Argument& argument) {
  const Tensor& tensor = *argument.tensor;
  const Ints words = argument.memory.download_ints();
  const auto* const bytes = reinterpret_cast<const std::byte*>(words.data());
  const std::int64_t size = element_bytes(tensor.dtype);
  const Shape shape(tensor.shape.begin(), tensor.shape.begin() + tensor.rank);
  Values result(static_cast<std::size_t>(elements(shape)));
  for (std::size_t i = 0; i < result.size(); ++i) {
    auto rest = static_cast<std::int64_t>(i);
    std::int64_t offset = static_cast<std::byte*>(tensor.data) - argument.begin();
    for (std::int32_t d = tensor.rank - 1; d >= 0; --d) {
      offset += rest % tensor.shape[d] * tensor.stride[d] * size;
      rest /= tensor.shape[d];
    }
    if (tensor.dtype == DType::i32) {
      std::int32_t value = 0;
      std::memcpy(&value, bytes + offset, sizeof value);
      result[i] = value;
    } else {
      harness::decode(tensor.dtype, bytes + offset, std::span(&result[i], 1));
    }
  }
  return result;
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
