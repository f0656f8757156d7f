// SPDX-License-Identifier: Apache-2.0
// The workspace limit on calls of every op: it is kept, or the refusal names one that suffices.
#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "harness/index_loss.h"
#include "harness/index_topk.h"
#include "tests/attention_calls.h"
#include "tests/callers_memory.h"
#include "tests/dense_loss_calls.h"
#include "tests/indexer_calls.h"
#include "tests/random_calls.h"

namespace winnow::tests {
namespace {

/// Calls body(backend, call) for some calls of every op.
template <class Body>
void on_each_call(const Body& body) {
  constexpr std::uint64_t kCalls = 8;
  on_each_backend([&](Backend backend) {
    for_each_operator([&]<class Args>(std::type_identity<Args>) {
      for (std::uint64_t seed = 0; seed < kCalls; ++seed) {
        const Call call = CallMaker(seed, harness::device_of(backend)).make<Args>();
        SCOPED_TRACE(fmt::format("{}, seed {}", call.op, seed));
        // Calls that the backend refuses with any limit are not tested here.
        if (call.why_not(on(backend)).empty()) body(backend, call);
      }
    });
  });
}

/// Bytes of the fp32 accumulators of bf16 and f16 gradients, which the limit does not count.
std::size_t copy_bytes(const Call& call) {
  std::size_t bytes = 0;
  for (const Argument& argument : call.arguments) {
    const Tensor& tensor = *argument.tensor;
    if (!argument.is_output || (tensor.dtype != DType::bf16 && tensor.dtype != DType::f16))
      continue;
    if (std::string_view(argument.name) != "d_kv" && std::string_view(argument.name) != "d_k" &&
        std::string_view(argument.name) != "d_index_k")
      continue;
    std::size_t elements = 1;
    for (std::int32_t i = 0; i < tensor.rank; ++i)
      elements *= static_cast<std::size_t>(tensor.shape[i]);
    bytes += 4 * elements + 64;
  }
  return bytes;
}

struct NamedLimit {
  std::size_t least, given;
};

/// Parses "... needs a workspace_limit of at least 123 bytes for this call, the limit is 45".
NamedLimit named_limit(const std::string& reason) {
  const auto number_behind = [&](const std::string& words) -> std::size_t {
    const std::size_t at = reason.find(words);
    EXPECT_NE(at, std::string::npos) << reason;
    return at == std::string::npos ? 0 : std::stoull(reason.substr(at + words.size()));
  };
  return {number_behind("needs a workspace_limit of at least "), number_behind("the limit is ")};
}

// The steps that train the indexer of a frozen model, warm-up and sparse: no call writes a gradient
// of attention, and no workspace has room for one.
TEST(Workspace, OfAnIndexersStepHasNoRoomForGradientsOfAttention) {
  const harness::Case c{.name = "frozen model",
                        .tokens = 128,
                        .rows = 1024,
                        .documents = 1,
                        .heads = 8,
                        .qk_dim = 512,
                        .index_heads = 2,
                        .index_dim = 8,
                        .scale = 0.05F};
  on_each_backend([&](Backend backend) {
    if (backend == Backend::reference) return;  // it has scratch for single rows, and takes long
    const harness::Placement placement{.device = harness::device_of(backend)};
    const harness::IndexTopkWork indexer(c, placement, 1);
    const harness::IndexTargetWork target(c, placement, 1);
    const harness::IndexLossWork loss(c, placement, 1);
    harness::DenseIndexLossWork dense(c, placement, 1);
    dense.lse.upload(Values(static_cast<std::size_t>(c.tokens * c.heads), 7.0));
    CallersMemory memory{.device = placement.device};
    const Execution execution{.backend = backend,
                              .workspace_limit = std::size_t{1} << 19,
                              .allocate = CallersMemory::allocate,
                              .allocate_context = &memory};
    const auto run_indexer = [&]<class Args>(const Args& args) {
      run(args, execution);
      for_each_field<Args>([&]<class Value>(const Field<Args, Value>& field) {
        if constexpr (std::is_same_v<Value, Tensor>) {
          const Tensor& written = args.*field.member;
          if (field.role != FieldRole::output || written.rank < 1) return;
          EXPECT_NE(written.shape[written.rank - 1], c.qk_dim) << Args::kOperator << field.name;
        }
      });
    };
    run_indexer(dense.forward_given);
    run_indexer(dense.backward);
    run_indexer(indexer.forward);
    run_indexer(target.args);
    run_indexer(loss.args);
    run_indexer(indexer.backward);
    const std::size_t asked = *std::max_element(memory.asked.begin(), memory.asked.end());
    EXPECT_LT(asked, static_cast<std::size_t>(2 * c.tokens * c.heads * c.qk_dim)) << "d_q";
    EXPECT_LT(asked, static_cast<std::size_t>(2 * c.keys() * c.qk_dim)) << "d_kv";
  });
}

TEST(Workspace, OfACallIsWithinTheLimitOrTheCallIsRefused) {
  on_each_call([](Backend backend, const Call& call) {
    for (const int threads : {1, 2, 7}) {
      for (std::size_t limit = 0; limit <= std::size_t{1} << 24; limit += 1 + limit / 3) {
        const Execution execution{.backend = backend, .workspace_limit = limit, .threads = threads};
        if (call.why_not(execution).empty()) {
          EXPECT_LE(call.workspace_bytes(execution), limit + copy_bytes(call))
              << threads << " threads";
        }
      }
    }
  });
}

/// The limit that a refusal names suffices, and one byte less does not.
template <class WhyNot>
void expect_named_limit_serves(Backend backend, std::size_t limit, const WhyNot& why_not) {
  const std::string reason = why_not({.backend = backend, .workspace_limit = limit});
  if (reason.empty()) return;
  const NamedLimit named = named_limit(reason);
  EXPECT_EQ(named.given, limit);
  EXPECT_EQ(why_not({.backend = backend, .workspace_limit = named.least}), "");
  EXPECT_NE(why_not({.backend = backend, .workspace_limit = named.least - 1}), "");
}

TEST(Workspace, ALimitThatIsNamedIsEnoughAndTheLeast) {
  on_each_call([](Backend backend, const Call& call) {
    for (const std::size_t limit : {0, 1, 63, 64, 65, 1000, 5000, 20000, 100000})
      expect_named_limit_serves(backend, limit, call.why_not);
    const std::string reason = call.why_not({.backend = backend, .workspace_limit = 0});
    if (reason.empty()) return;
    const Execution least{.backend = backend, .workspace_limit = named_limit(reason).least};
    EXPECT_EQ(refusal_of([&] { call.run(least); }), "");
  });
}

TEST(Workspace, OfManyRowsAndKeysLikewise) {
  // A larger limit gives larger chunks.
  on_each_backend([](Backend backend) {
    const DenseLoss d =
        filled({.tokens = 40, .keys = 3000, .index_keys = 3000, .key_offset = 0}, 1);
    const DenseLossWork work(d, harness::device_of(backend));
    for (std::size_t limit = 1000; limit < 1000000; limit += limit / 8) {
      SCOPED_TRACE(limit);
      const Execution execution{.backend = backend, .workspace_limit = limit};
      if (why_not(work.backward, execution).empty()) {
        EXPECT_LE(workspace_bytes(work.backward, execution), limit);
      }
      expect_named_limit_serves(backend, limit,
                                [&](const Execution& e) { return why_not(work.backward, e); });
    }
  });
}

/// Calls body(execution) with limits from the least that the call takes on, on the backends of the
/// host, whose gradients do not depend on it.
template <class Args, class Body>
void on_each_limit(const Args& args, const Body& body) {
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    SCOPED_TRACE(name(backend));
    int runs = 0;
    for (std::size_t limit = 1000; limit < std::size_t{1} << 24; limit += limit / 4) {
      SCOPED_TRACE(limit);
      const Execution execution{.backend = backend, .workspace_limit = limit};
      if (!why_not(args, execution).empty()) continue;
      ++runs;
      body(execution);
    }
    EXPECT_GT(runs, 10);
  }
}

TEST(Workspace, LimitChangesNoBitOfTheGradientsOfSparseAttention) {
  Attention a = with_sink(
      filled({.tokens = 5, .keys = 60, .heads = 64, .qk_dim = 64, .v_dim = 64, .topk = 40}, 3), 3);
  for (const DType d_kv_type : {DType::f32, DType::bf16}) {
    a.d_kv_type = d_kv_type;
    const AttentionOutputs outputs = forward(a, on(Backend::reference));
    const AttentionBackwardWork work(a, outputs, {});
    on_each_limit(work.args, [&](const Execution& execution) {
      expect_same_bits(backward(a, outputs, execution),
                       backward(a, outputs, on(execution.backend)));
    });
  }
}

TEST(Workspace, LimitChangesNoBitOfTheGradientsOfTheIndexer) {
  Indexer ix = filled({.tokens = 12, .keys = 300, .heads = 20, .dim = 24, .topk = 50}, 4);
  ix.indices = select(ix, on(Backend::reference)).indices;
  const IndexBackwardWork work(ix, {});
  on_each_limit(work.args, [&](const Execution& execution) {
    const IndexGradients actual = backward(ix, execution);
    const IndexGradients expected = backward(ix, on(execution.backend));
    EXPECT_TRUE(same_bits(actual.d_q, expected.d_q));
    EXPECT_TRUE(same_bits(actual.d_weights, expected.d_weights));
    EXPECT_TRUE(same_bits(actual.d_k, expected.d_k));
  });
}

TEST(Workspace, LimitChangesNoBitOfTheGradientsOfTheDenseLoss) {
  const DenseLoss d =
      filled({.tokens = 8, .keys = 90, .index_keys = 90, .key_offset = 0, .heads = 20}, 5);
  const Values lse = forward(d, on(Backend::reference)).lse;
  const DenseLossWork work(d, {});
  on_each_limit(work.backward, [&](const Execution& execution) {
    const DenseLossGradients actual = backward(d, lse, execution);
    const DenseLossGradients expected = backward(d, lse, on(execution.backend));
    EXPECT_TRUE(same_bits(actual.d_index_q, expected.d_index_q));
    EXPECT_TRUE(same_bits(actual.d_weights, expected.d_weights));
    EXPECT_TRUE(same_bits(actual.d_index_k, expected.d_index_k));
  });
}

}  // namespace
}  // namespace winnow::tests
