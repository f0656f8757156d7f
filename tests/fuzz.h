// SPDX-License-Identifier: Apache-2.0
// Fuzz: random calls by seed, most of them spoilt. Each is computed right, with nothing written
// beside its outputs, or refused by name with nothing written at all.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/judgement.h"
#include "tests/mutations.h"
#include "tests/random_calls.h"

namespace winnow::tests {

/// A call and what was done to it. The same seed gives the same on every backend.
struct Spoilt {
  Call call;
  Execution execution;
  std::vector<Mutation> mutations;
  std::unique_ptr<CallersMemory> allocated;  // of the allocator of `execution`
};

inline Spoilt spoilt_call(std::uint64_t seed, Backend backend, const Buffer& workspace) {
  const Device device = harness::device_of(backend);
  // Results do not depend on the threads; small calls take longer on several.
  Spoilt result{make_call(seed, device),
                on_threads(seed % 8 == 0 ? 0 : 1, on(backend)),
                {},
                std::make_unique<CallersMemory>(CallersMemory{.device = device})};
  if (seed % 5 == 0) return result;
  Mutator mutator(seed, result.call, result.execution, workspace, *result.allocated);
  const std::int64_t count = mutator.below(5) < 3 ? 1 : 2 + mutator.below(2);
  for (std::int64_t i = 0; i < count; ++i) result.mutations.push_back(mutator.apply());
  return result;
}

inline std::string describe(const Spoilt& spoilt, std::uint64_t seed) {
  std::string text = fmt::format("seed {}: {}", seed, spoilt.call.op);
  for (const Mutation& mutation : spoilt.mutations) text += "; " + mutation.what;
  return text;
}

/// The calls on one backend.
class Fuzz {
 public:
  explicit Fuzz(Backend backend)
      : backend_(backend), workspace_(harness::device_of(backend), DType::i32, {1 << 18}) {}

  std::uint64_t computed = 0;
  std::uint64_t refused = 0;
  std::uint64_t out_of_memory = 0;
  /// Runs a call. A program may let memory run out in those that are not spoilt.
  std::function<void(const Spoilt&, std::uint64_t seed)> run =
      [](const Spoilt& spoilt, std::uint64_t) { spoilt.call.run(spoilt.execution); };

  /// Makes the call of a seed and judges it; on_refusal(error) sees its refusal.
  template <class OnRefusal>
  void call(std::uint64_t seed, const OnRefusal& on_refusal) {
    const Spoilt spoilt = spoilt_call(seed, backend_, workspace_);
    SCOPED_TRACE(describe(spoilt, seed));
    const Snapshot before = snapshot(spoilt.call);
    try {
      run(spoilt, seed);
      ++computed;
      expect_only_outputs_written(spoilt.call, before);
      expect_right(spoilt, seed);
    } catch (const Error& error) {
      if (spoilt.mutations.empty() && error.code() == ErrorCode::out_of_memory) {
        ++out_of_memory;
        expect_only_outputs_written(spoilt.call, before);
      } else {
        ++refused;
        on_refusal(error);
        expect_named(spoilt.call, error, spoilt.mutations);
        expect_one_answer(spoilt.call, spoilt.execution, error);
        EXPECT_EQ(snapshot(spoilt.call), before) << "written to, then refused: " << error.what();
      }
    }
    EXPECT_TRUE(canaries_intact(spoilt.call) && workspace_.canaries_intact() &&
                spoilt.allocated->canaries_intact());
  }

 private:
  /// Compares with the same call on the reference, which has its own memory. Contents of index
  /// tensors are checked on the host only.
  void expect_right(const Spoilt& spoilt, std::uint64_t seed) const {
    const Spoilt twin = spoilt_call(seed, Backend::reference, host_workspace_);
    const std::string on_host =
        refusal_of([&] { twin.call.run(on_threads(1, on(Backend::reference))); });
    if (!on_host.empty()) {
      EXPECT_EQ(harness::device_of(backend_).kind, DeviceKind::cuda) << on_host;
      return;
    }
    expect_equal_outputs(spoilt.call, twin.call, spoilt.execution.backend == Backend::reference);
  }

  Backend backend_;
  Buffer workspace_;
  Buffer host_workspace_{{}, DType::i32, {1 << 18}};
};

}  // namespace winnow::tests
