// SPDX-License-Identifier: Apache-2.0
// What holds for every operator alike: its description of itself, the choice of its kernel, and
// the workspace that an allocator gives.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/ranges.h>

#include "harness/families.h"
#include "harness/kernel_choice.h"
#include "tests/call_bits.h"
#include "tests/callers_memory.h"
#include "tests/random_calls.h"
#include "tests/sanitized.h"
#include "tests/testing.h"

namespace winnow::tests {
namespace {

// ---- Fields.

/// Converts to a member of any type.
struct Anything {
  template <class T>
  operator T() const;  // NOLINT(google-explicit-constructor)
};

/// The number of members of an aggregate: the most values that can initialise it.
template <class Args, class... Values>
constexpr std::size_t member_count() {
  if constexpr (requires { Args{Values()..., Anything()}; }) {
    return member_count<Args, Values..., Anything>();
  } else {
    return sizeof...(Values);
  }
}

constexpr std::size_t rounded_up(std::size_t offset, std::size_t alignment) {
  return (offset + alignment - 1) / alignment * alignment;
}

TEST(Fields, CoverTheStructOfEveryOperator) {
  for_each_operator([]<class Args>(std::type_identity<Args>) {
    SCOPED_TRACE(Args::kOperator);
    EXPECT_EQ(std::tuple_size_v<decltype(Args::fields())>, member_count<Args>());
    const Args args;
    std::size_t end = 0;
    for_each_field<Args>([&](const auto& field) {
      const auto& member = args.*field.member;
      const auto offset = static_cast<std::size_t>(reinterpret_cast<const std::byte*>(&member) -
                                                   reinterpret_cast<const std::byte*>(&args));
      EXPECT_EQ(offset, rounded_up(end, alignof(decltype(member)))) << field.name;
      end = offset + sizeof(member);
    });
    EXPECT_EQ(rounded_up(end, alignof(Args)), sizeof(Args));
  });
}

TEST(Fields, HaveNamesOfTheirOwnAndWordsWhereTheyAreEnums) {
  std::set<std::string_view> operators;
  for_each_operator([&]<class Args>(std::type_identity<Args>) {
    SCOPED_TRACE(Args::kOperator);
    EXPECT_TRUE(operators.insert(Args::kOperator).second);
    std::set<std::string_view> names;
    for_each_field<Args>([&]<class Value>(const Field<Args, Value>& field) {
      EXPECT_TRUE(names.insert(field.name).second) << field.name;
      EXPECT_EQ(field.words != nullptr, std::is_enum_v<Value>) << field.name;
      EXPECT_EQ(field.role != FieldRole::option, (std::is_same_v<Value, Tensor>)) << field.name;
    });
  });
}

/// The code of the Error that `call` throws.
template <class Throwing>
ErrorCode code_of(const Throwing& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

// ---- Calls of every operator.

constexpr std::uint64_t kCallsEach = 12;

/// Calls body(call, args) for some calls of every operator, with tensors on this device.
template <class Body>
void on_each_call(Device device, const Body& body) {
  for_each_operator([&]<class Args>(std::type_identity<Args>) {
    for (std::uint64_t seed = 0; seed < kCallsEach; ++seed) {
      Call call = CallMaker(seed, device).make<Args>();
      SCOPED_TRACE(fmt::format("{}, seed {}", call.op, seed));
      body(call, *static_cast<const Args*>(call.args.get()));
    }
  });
}

// ---- The choice of the kernel.

TEST(Explain, TheFirstCandidateWithoutAReasonRuns) {
  on_each_backend([](Backend backend) {
    on_each_call(harness::device_of(backend), [&](Call& call, const auto& args) {
      for (const Backend asked : {Backend::automatic, backend}) {
        Execution execution{.backend = asked, .deterministic = true};
        const std::vector<Candidate> candidates = explain(args, execution);
        const Candidate* const chosen = harness::chosen(candidates);
        ASSERT_NE(chosen, nullptr);
        const Bits expected = bits_of_run(call, execution);
        const std::string kernel(chosen->kernel);
        EXPECT_EQ(bits_of_run(call, {.backend = chosen->backend,
                                     .deterministic = true,
                                     .kernel = kernel.c_str()}),
                  expected);
        execution.kernel = kernel.c_str();
        EXPECT_EQ(bits_of_run(call, execution), expected);
      }
    });
  });
}

TEST(Explain, AKernelThatIsAskedForRunsAlsoBehindABetterOne) {
  const Execution loops{.kernel = "loops"};
  int different = 0;
  on_each_call({}, [&](Call& call, const auto& args) {
    const Bits by_loops = bits_of_run(call, loops);
    EXPECT_EQ(by_loops, bits_of_run(call, on(Backend::reference)));
    EXPECT_EQ(call.workspace_bytes(loops), call.workspace_bytes(on(Backend::reference)));
    for (const Candidate& candidate : explain(args, loops)) {
      if (candidate.kernel.empty()) continue;  // the reason of a whole backend
      EXPECT_EQ(candidate.why_not.empty(), candidate.kernel == "loops") << candidate.kernel;
    }
    const std::vector<Candidate> of_cpu = explain(args, on(Backend::cpu));
    const Candidate* const best = harness::chosen(of_cpu);
    if (best == nullptr) return;
    const std::string name(best->kernel);
    const Bits by_name = bits_of_run(call, {.kernel = name.c_str()});
    EXPECT_EQ(by_name, bits_of_run(call, on(Backend::cpu)));
    if (by_name != by_loops) ++different;
  });
  EXPECT_GT(different, 0) << "nothing shows which of the two ran";
}

TEST(Explain, EveryKernelOfTheCpuBackendRunsWhereItIsAskedFor) {
  // Pairs of bf16 are added in another order here, and nothing else differs. That is a last bit,
  // which calls as small as these do not show: value_projection_test, index_loss_test and
  // dense_index_loss_test do.
  constexpr std::string_view kDifferInLastBits[] = {"value_projection_forward",
                                                    "value_projection_backward", "index_target",
                                                    "dense_index_loss_forward"};
  for_each_operator([&]<class Args>(std::type_identity<Args>) {
    const auto names = kernels<Args>(Backend::cpu);
    if (names.size() < 2) return;
    SCOPED_TRACE(Args::kOperator);
    int taken = 0;
    int different = 0;
    for (std::uint64_t seed = 0; seed < 4 * kCallsEach; ++seed) {
      Call call = CallMaker(seed, {}).make<Args>();
      std::set<Bits> results;
      int kernels_that_take = 0;
      for (const std::string_view name : names) {
        const Execution execution{.backend = Backend::cpu, .kernel = name.data()};
        if (!call.why_not(execution).empty()) continue;
        ++kernels_that_take;
        results.insert(bits_of_run(call, execution));
      }
      if (kernels_that_take > 1) ++taken;
      if (results.size() > 1) ++different;
    }
    const bool can_differ = std::find(std::begin(kDifferInLastBits), std::end(kDifferInLastBits),
                                      Args::kOperator) == std::end(kDifferInLastBits);
    if (taken > 0 && can_differ) {
      EXPECT_GT(different, 0) << "nothing shows that " << taken << " calls had two kernels";
    }
  });
}

TEST(Explain, AKernelThatNoBackendHasIsAnErrorThatListsTheNames) {
  on_each_call({}, []<class Args>(const Call&, const Args& args) {
    for (const Backend asked : {Backend::automatic, Backend::cpu, Backend::reference}) {
      std::vector<std::string_view> names;
      for (const Backend backend : {Backend::cuda, Backend::cpu, Backend::reference}) {
        if (asked != Backend::automatic && asked != backend) continue;
        for (const std::string_view name : kernels<Args>(backend)) names.push_back(name);
      }
      const Execution execution{.backend = asked, .kernel = "abacus"};
      const std::string text = fmt::format("{}: kernel 'abacus': must be one of {}",
                                           Args::kOperator, fmt::join(names, ", "));
      EXPECT_EQ(refusal_of([&] { run(args, execution); }), text);
      EXPECT_EQ(refusal_of([&] { (void)why_not(args, execution); }), text);
      EXPECT_EQ(refusal_of([&] { (void)workspace_bytes(args, execution); }), text);
      EXPECT_EQ(refusal_of([&] { (void)explain(args, execution); }), text);
      EXPECT_EQ(code_of([&] { run(args, execution); }), ErrorCode::invalid_argument);
    }
  });
}

TEST(Explain, AKernelThatCannotRunGivesItsOwnSentenceOnly) {
  on_each_backend([](Backend backend) {
    int refused = 0;
    on_each_call(harness::device_of(backend), [&]<class Args>(const Call&, const Args& args) {
      for (const std::string_view kernel : kernels<Args>(backend)) {
        const std::string word(kernel);
        // No limit at all refuses kernels that need a workspace; others refuse what they do not
        // take.
        const Execution execution{.backend = backend, .workspace_limit = 0, .kernel = word.c_str()};
        std::string reason;
        for (const Candidate& candidate : explain(args, execution))
          if (candidate.kernel == kernel) reason = candidate.why_not;
        if (reason.empty()) continue;
        ++refused;
        const std::string sentence =
            fmt::format("the {} backend's kernel {} {}", name(backend), kernel, reason);
        EXPECT_EQ(why_not(args, execution), sentence);
        EXPECT_EQ(refusal_of([&] { run(args, execution); }),
                  fmt::format("{}: {}", Args::kOperator, sentence));
        EXPECT_EQ(code_of([&] { run(args, execution); }), ErrorCode::unsupported);
      }
    });
    EXPECT_GT(refused, 0) << "every kernel took every call";
  });
}

/// The case with another number of query rows, and at a model's own size with fewer keys.
harness::Case with_rows(harness::Case c, std::int64_t tokens, std::int64_t rows) {
  if (c.full || c.slow) c.rows = std::min(c.rows, rows);
  c.tokens = std::min({c.tokens, c.rows, tokens});
  return c;
}

void expect_same_choices(const harness::Calls& few, const harness::Calls& many) {
  ASSERT_EQ(few.list.size(), many.list.size());
  for (std::size_t i = 0; i < few.list.size(); ++i) {
    SCOPED_TRACE(few.list[i].name);
    const std::vector<Candidate> of_few = few.list[i].explain({});
    const std::vector<Candidate> of_many = many.list[i].explain({});
    ASSERT_EQ(of_few.size(), of_many.size());
    for (std::size_t k = 0; k < of_few.size(); ++k) {
      EXPECT_EQ(of_few[k].backend, of_many[k].backend);
      EXPECT_EQ(of_few[k].kernel, of_many[k].kernel);
      EXPECT_EQ(of_few[k].why_not.empty(), of_many[k].why_not.empty())
          << of_few[k].kernel << ": " << of_few[k].why_not << of_many[k].why_not;
    }
    // The calls behind these read what they write.
    few.list[i].run({});
    many.list[i].run({});
  }
}

TEST(Explain, TheChoiceDoesNotDependOnTheNumbersOfRows) {
  constexpr std::uint64_t kSeed = 1;
  constexpr std::int64_t kMany = kSanitized ? 4 : 40;
  on_each_backend([](Backend backend) {
    // The choice walks over all backends of a device, and two have the host's.
    if (backend == Backend::reference) return;
    const Device device = harness::device_of(backend);
    for (const harness::Case& c : harness::cases()) {
      for (const std::string_view op : harness::ops()) {
        if (!harness::missing(op, c).empty()) continue;
        SCOPED_TRACE(fmt::format("{}, {}", op, c.name));
        expect_same_choices(harness::calls_of(op, with_rows(c, 1, 300), device, kSeed),
                            harness::calls_of(op, with_rows(c, kMany, 500), device, kSeed));
      }
    }
  });
}

// ---- The allocator.

Execution from(CallersMemory& memory, Backend backend) {
  return {.backend = backend,
          .deterministic = true,
          .allocate = CallersMemory::allocate,
          .allocate_context = &memory};
}

bool has_slices(const Call& call) {
  const Tensor& first = *call.arguments.front().tensor;
  return call.op.starts_with("sparse_attention") && first.rank == 4 && first.shape[0] > 1;
}

TEST(Allocator, IsAskedOnceForExactlyTheWorkspaceOfTheCall) {
  on_each_backend([](Backend backend) {
    int with_slices = 0;
    on_each_call(harness::device_of(backend), [&](Call& call, const auto&) {
      const Execution without{.backend = backend, .deterministic = true};
      if (!call.why_not(without).empty()) return;
      const std::size_t bytes = call.workspace_bytes(without);
      CallersMemory memory{.device = harness::device_of(backend)};
      const Execution execution = from(memory, backend);
      EXPECT_EQ(call.workspace_bytes(execution), bytes);
      EXPECT_EQ(memory.asked.size(), 0) << "asking for the size takes nothing";
      EXPECT_EQ(bits_of_run(call, execution), bits_of_run(call, without));
      EXPECT_EQ(memory.asked,
                bytes > 0 ? std::vector<std::size_t>{bytes} : std::vector<std::size_t>{});
      EXPECT_TRUE(memory.canaries_intact());
      if (bytes > 0 && has_slices(call)) ++with_slices;
    });
    if (harness::device_of(backend).kind == DeviceKind::cpu) {
      EXPECT_GT(with_slices, 0) << "no call had a batch";
    }
  });
}

TEST(Allocator, WithoutMemoryIsAnErrorAndNothingIsWritten) {
  on_each_backend([](Backend backend) {
    on_each_call(harness::device_of(backend), [&](Call& call, const auto&) {
      CallersMemory memory{.device = harness::device_of(backend), .exhausted = true};
      const Execution execution = from(memory, backend);
      if (!call.why_not(execution).empty()) return;
      const std::size_t bytes = call.workspace_bytes(execution);
      if (bytes == 0) return;
      const Bits before = output_bits(call);
      EXPECT_EQ(refusal_of([&] { call.run(execution); }),
                fmt::format("{}: cannot allocate a workspace of {} bytes", call.op, bytes));
      EXPECT_EQ(code_of([&] { call.run(execution); }), ErrorCode::out_of_memory);
      EXPECT_EQ(output_bits(call), before);
    });
  });
}

TEST(Allocator, MustGiveAlignedMemory) {
  on_each_backend([](Backend backend) {
    on_each_call(harness::device_of(backend), [&](Call& call, const auto&) {
      CallersMemory memory{.device = harness::device_of(backend), .shift = 8};
      const Execution execution = from(memory, backend);
      if (!call.why_not(execution).empty() || call.workspace_bytes(execution) == 0) return;
      const Bits before = output_bits(call);
      const std::string text = refusal_of([&] { call.run(execution); });
      EXPECT_TRUE(text.starts_with(fmt::format("{}: allocate 0x", call.op))) << text;
      EXPECT_TRUE(text.ends_with(": data must be aligned to 16 bytes")) << text;
      EXPECT_EQ(output_bits(call), before);
    });
  });
}

TEST(Allocator, IsNotAskedWhereAWorkspaceIsGiven) {
  on_each_backend([](Backend backend) {
    on_each_call(harness::device_of(backend), [&](Call& call, const auto&) {
      CallersMemory memory{.device = harness::device_of(backend)};
      Execution execution = from(memory, backend);
      if (!call.why_not(execution).empty()) return;
      const Bits expected = bits_of_run(call, execution);
      memory.asked.clear();
      execution.workspace_bytes = call.workspace_bytes(execution);
      const Buffer workspace(memory.device, DType::i32,
                             {static_cast<std::int64_t>(execution.workspace_bytes / 4 + 1)});
      execution.workspace = workspace.tensor().data;
      EXPECT_EQ(bits_of_run(call, execution), expected);
      EXPECT_EQ(memory.asked.size(), 0);
      EXPECT_TRUE(workspace.canaries_intact());
    });
  });
}

}  // namespace
}  // namespace winnow::tests
