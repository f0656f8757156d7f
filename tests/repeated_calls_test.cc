// SPDX-License-Identifier: Apache-2.0
// Many calls in one process: they keep no memory, on the host or on a GPU.
#include <cstdint>
#include <type_traits>
#include <vector>

#include "harness/device_memory.h"
#include "tests/random_calls.h"
#include "tests/resident_memory.h"

namespace winnow::tests {
namespace {

constexpr int kRepeats = 3000;

/// Calls of the operator that the backend takes.
template <class Args>
std::vector<Call> some_calls(const Execution& execution) {
  constexpr std::uint64_t kSeeds = 10;
  std::vector<Call> calls;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Call call = CallMaker(seed, harness::device_of(execution.backend)).make<Args>();
    if (call.why_not(execution).empty()) calls.push_back(std::move(call));
  }
  return calls;
}

std::int64_t device_bytes(Device device) {
  if (device.kind == DeviceKind::cpu) return 0;
  return static_cast<std::int64_t>(harness::bytes_in_use_on_cuda(device.index));
}

TEST(RepeatedCalls, OfAnyOperatorKeepNoMemory) {
  on_each_backend([](Backend backend) {
    const Execution execution{.backend = backend, .threads = 2};
    const Device device = harness::device_of(backend);
    for_each_operator([&]<class Args>(std::type_identity<Args>) {
      SCOPED_TRACE(Args::kOperator);
      const std::vector<Call> calls = some_calls<Args>(execution);
      ASSERT_FALSE(calls.empty());
      for (const Call& call : calls) call.run(execution);
      const std::int64_t before = device_bytes(device);
      std::size_t next = 0;
      expect_no_growth(kRepeats, [&] { calls[next++ % calls.size()].run(execution); });
      EXPECT_LE(device_bytes(device) - before, kMaxGrowth) << "on " << describe(backend);
    });
  });
}

}  // namespace
}  // namespace winnow::tests
