// SPDX-License-Identifier: Apache-2.0
// The formulas of `winnow plan`, against layers that are computed over ranks.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "harness/index_topk.h"
#include "harness/local_communicator.h"
#include "harness/rank_step.h"
#include "tests/far_memory.h"
#include "tests/rank_layer.h"
#include "tests/testing.h"
#include "tools/plan/step_plan.h"

namespace winnow::tests {
namespace {

using plan::LayerPlan;
using plan::RankWork;

/// Documents of different lengths, one of them empty, and rows after the last.
const Ints kOffsets{0, 53, 53, 131, 148};
constexpr std::int64_t kTokens = 160;

/// Every kind of layer of the models, at small size.
std::vector<LayerKind> small_kinds() {
  Case latent = harness::find_case("glm-5.2-small");
  Case pooled = harness::find_case("deepseek-v4-flash-small");
  latent.rows = pooled.rows = kTokens;
  Case window = pooled;
  window.ratio = 1;
  window.topk = window.window;
  Case listed = pooled;
  listed.ratio = 8;
  return {{"selecting", 1, Lists::selected, latent},
          {"reusing", 1, Lists::reused, latent},
          {"selecting pools", 1, Lists::selected, pooled},
          {"window", 1, Lists::window, window},
          {"all pools", 1, Lists::all_pools, listed}};
}

/// Calls body(plan of a rank, its work, the layer that it computed, its traffic).
void on_real_layers(
    const std::function<void(const LayerPlan&, const RankWork&, const RankLayer&, Traffic)>& body) {
  for (const LayerKind& kind : small_kinds())
    for (const Sharding sharding : {Sharding::contiguous, Sharding::zigzag})
      for (const int ranks : {1, 2, 3}) {
        const harness::BatchShards shards(kind.c, {kind.c, kOffsets, {}, {}}, ranks, sharding);
        const ShardedBatch batch{.cu_seqlens = kOffsets, .tokens = kTokens, .shards = shards.rows};
        const std::vector<RankWork> works = rank_works(kind, batch);
        const plan::WholeKeys whole = whole_keys(kind, batch);
        harness::on_local_ranks(ranks, [&](Communicator& communicator) {
          const RankWork& work = works[communicator.rank()];
          SCOPED_TRACE(fmt::format("{}, {}, rank {} of {}", kind.name,
                                   sharding == Sharding::zigzag ? "zigzag" : "contiguous",
                                   communicator.rank(), ranks));
          const RankLayer layer(kind, batch, shards.pools, communicator);
          body(plan::plan_layer(kind, whole, work), work, layer, communicator.traffic());
        });
      }
}

TEST(Plan, TensorsAreThoseOfARealLayer) {
  on_real_layers([](const LayerPlan& plan, const RankWork&, const RankLayer& layer, Traffic) {
    std::map<std::string, double> planned;
    for (const plan::PlannedTensor& each : plan.tensors)
      if (each.part != "staging") planned[std::string(each.name)] = each.bytes();
    EXPECT_EQ(planned, layer.tensor_bytes);
  });
}

TEST(Plan, StagingIsWhatScatterTakes) {
  constexpr double kAlignment = 256;
  on_real_layers([](const LayerPlan& plan, const RankWork&, const RankLayer& layer, Traffic) {
    double planned = 0;
    for (const plan::PlannedTensor& each : plan.tensors)
      if (each.part == "staging") planned += each.bytes();
    const auto staged = static_cast<double>(layer.staged_bytes);
    EXPECT_LE(staged, planned + 2 * kAlignment);
    EXPECT_GE(staged, planned - sizeof(float));  // the last float may equal the fill pattern
  });
}

TEST(Plan, MessagesAreWhatTheCommunicatorSent) {
  on_real_layers([](const LayerPlan& plan, const RankWork&, const RankLayer&, Traffic traffic) {
    double gathered = 0;
    double reduced = 0;
    for (const plan::PlannedMessage& each : plan.messages)
      (each.backward ? reduced : gathered) += each.bytes;
    EXPECT_EQ(gathered, static_cast<double>(traffic.gathered));
    EXPECT_EQ(reduced, static_cast<double>(traffic.reduced));
  });
}

TEST(Plan, WorkIsWhatWindowsAndListsHold) {
  on_real_layers([](const LayerPlan&, const RankWork& work, const RankLayer& layer, Traffic) {
    if (layer.seen.has_value()) {
      EXPECT_EQ(work.seen, *layer.seen);
    }
    EXPECT_EQ(work.slots(), layer.slots);
  });
}

// ---- Without ranks.

plan::PlanRequest request(const char* model, std::int64_t tokens, int ranks) {
  return {.model = plan::find_model(model),
          .cu_seqlens = {0, static_cast<std::int32_t>(tokens)},
          .tokens = tokens,
          .ranks = ranks,
          .sharding = Sharding::zigzag,
          .device = plan::find_gpu("h200"),
          .bandwidth = 50e9};
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const Case& c : harness::cases())
    if (c.full) names.push_back(c.name);
  return names;
}

TEST(Plan, KnowsEveryModelOfTheCases) {
  const std::map<std::string, std::int64_t> layers{
      {"glm-5.2", 78}, {"deepseek-v3.2", 61}, {"deepseek-v4-flash", 43}, {"deepseek-v4-pro", 61}};
  for (const std::string& name : model_names()) {
    std::int64_t sum = 0;
    for (const LayerKind& kind : plan::find_model(name).kinds) sum += kind.layers;
    EXPECT_EQ(sum, layers.at(name)) << name;
  }
  EXPECT_EQ(plan::find_model("deepseek-v4-flash").row_multiple(), 128);
  EXPECT_EQ(plan::find_model("glm-5.2").row_multiple(), 1);
  EXPECT_THROW(plan::find_model("glm-5.2-small"), std::invalid_argument);
  EXPECT_THROW(plan::find_gpu("a100"), std::invalid_argument);
}

TEST(Plan, FlopsAreThoseOfBench) {
  Case c = harness::find_case("glm-5.2-small");
  c.tokens = c.rows;
  c.documents = 1;
  const harness::IndexTopkWork work(c, {}, 1);
  const LayerKind kind{"selecting", 1, Lists::selected, c};
  const ShardedBatch batch{.cu_seqlens = {0, static_cast<std::int32_t>(c.rows)},
                           .tokens = c.rows,
                           .shards = shard_rows(std::vector{0, static_cast<std::int32_t>(c.rows)},
                                                c.rows, 1, Sharding::zigzag)};
  const LayerPlan plan =
      plan::plan_layer(kind, whole_keys(kind, batch), rank_works(kind, batch).front());
  const auto flops = [&](std::string_view name) {
    return std::find_if(plan.calls.begin(), plan.calls.end(),
                        [&](const auto& call) { return call.name == name; })
        ->flops;
  };
  EXPECT_EQ(flops("index_topk_forward"), work.forward_flops);
  EXPECT_EQ(flops("index_topk_backward"), work.backward_flops);
}

TEST(Plan, ContiguousShardsOfOneDocumentAreTwiceAsLongAsZigzag) {
  for (const std::string& model : model_names())
    for (const int ranks : {1, 8, 1024}) {
      const plan::StepPlan step = plan_step(request(model.c_str(), 1 << 20, ranks));
      EXPECT_NEAR(step.contiguous_imbalance, 2 - 1.0 / ranks, 1e-3) << model << ", " << ranks;
      EXPECT_NEAR(step.zigzag_imbalance, 1, 1e-3) << model << ", " << ranks;
      EXPECT_EQ(step.rows, (1 << 20) / ranks);
    }
}

TEST(Plan, RatesMeetTheirMeasurements) {
  const plan::DeviceRates& gpu = plan::find_gpu("h200");
  for (const plan::CallRate& each : gpu.calls)
    EXPECT_NEAR(call_rate(gpu, each.call, each.model, each.keys), each.teraflops * 1e12, 1e6)
        << each.call << " of " << each.model;
  const auto backward = [&](const char* model, double keys) {
    return call_rate(gpu, "sparse_attention_backward", model, keys);
  };
  EXPECT_LT(backward("glm-5.2", 65536), backward("glm-5.2", 32768));
  EXPECT_GT(backward("glm-5.2", 65536), backward("glm-5.2", 131072));
  EXPECT_EQ(backward("glm-5.2", 1 << 20), backward("glm-5.2", 131072));
}

TEST(Plan, ModelsWithOneMeasurementFollowTheCurveOfAnother) {
  plan::DeviceRates gpu = plan::find_gpu("h200");
  const char* const call = "sparse_attention_backward";
  std::erase_if(gpu.calls, [&](const plan::CallRate& each) {
    return each.call == call && each.model == "deepseek-v3.2";
  });
  gpu.calls.push_back({call, "deepseek-v3.2", 8192, 400, {}});
  const auto rate = [&](const char* model, double keys) {
    return call_rate(gpu, call, model, keys);
  };
  EXPECT_DOUBLE_EQ(rate("deepseek-v3.2", 8192), 400e12);
  EXPECT_DOUBLE_EQ(rate("deepseek-v3.2", 131072) / rate("deepseek-v3.2", 8192),
                   rate("glm-5.2", 131072) / rate("glm-5.2", 8192));
}

TEST(Plan, WritesRatesAsItReadsThem) {
  const std::string text(plan::h200_text());
  EXPECT_EQ(rates_text(plan::parse_rates(text, "h200.json")), text);
}

/// The error of parse_rates for h200.json with the first `from` replaced; empty if there is none.
std::string refusal(const std::string& from, const std::string& to) {
  std::string text(plan::h200_text());
  text.replace(text.find(from), from.size(), to);
  try {
    plan::parse_rates(text, "h200.json");
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return {};
}

TEST(Plan, NamesTheKeyThatARatesFileLacks) {
  for (const char* key :
       {"name", "memory_bytes", "cache_bytes", "memory_rate", "matrix_product", "calls", "value",
        "call", "model", "keys", "teraflops", "device", "date", "command"}) {
    const std::string sentence =
        refusal(fmt::format("\"{}\":", key), fmt::format("\"no {}\":", key));
    EXPECT_TRUE(sentence.starts_with("h200.json")) << sentence;
    EXPECT_NE(sentence.find(fmt::format("the key '{}' is missing", key)), std::string::npos)
        << sentence;
  }
  EXPECT_EQ(refusal("\"keys\":2048", "\"keys\":0"),
            "h200.json/calls/0/keys: must be a number of more than 0");
  EXPECT_EQ(refusal("\"keys\":2048", "\"keys\":\"2048\""),
            "h200.json/calls/0/keys: must be a number of more than 0");
  EXPECT_EQ(refusal("\"h200\"", "200"), "h200.json/name: must be a string");
  EXPECT_EQ(refusal("\"value_projection_backward\"", "\"index_loss\""),
            "h200.json/calls: value_projection_backward of glm-5.2 is missing");
  EXPECT_TRUE(refusal("\"calls\": [", "\"calls\": ").starts_with("h200.json: is not JSON: "));
}

TEST(Plan, BoundIsWhatTakesLongest) {
  plan::PlanRequest asked = request("glm-5.2", 131072, 64);
  asked.bandwidth = 1e6;
  EXPECT_EQ(plan_step(asked).both().bound(), plan::Bound::network);
  asked.bandwidth = 1e15;
  plan::StepPlan step = plan_step(asked);
  EXPECT_NE(step.both().bound(), plan::Bound::network);
  EXPECT_DOUBLE_EQ(step.overlapped_seconds, step.both().kernel_seconds);
  asked.device.memory_rate.value = 1e9;
  EXPECT_EQ(plan_step(asked).both().bound(), plan::Bound::memory);
  asked.device.memory_rate.value = 1e18;
  EXPECT_EQ(plan_step(asked).both().bound(), plan::Bound::compute);
}

TEST(Plan, MemoryOfAStepAddsUpOverLayers) {
  const auto workspace = static_cast<double>(Execution{}.workspace_limit);
  for (const std::string& model : model_names()) {
    const plan::StepPlan step = plan_step(request(model.c_str(), 131072, 64));
    double kept = 0;
    double gathered = 0;
    double most_beside_kept = 0;
    double most_beside_all = 0;
    for (const plan::PlannedLayer& layer : step.layers) {
      std::map<plan::Kept, double> bytes;
      for (const plan::PlannedTensor& each : layer.plan.tensors) bytes[each.kept] += each.bytes();
      const double within = bytes[plan::Kept::within_layer] + workspace;
      const double regathered = bytes[plan::Kept::unless_regathered];
      kept += bytes[plan::Kept::until_backward] * static_cast<double>(layer.kind.layers);
      gathered += regathered * static_cast<double>(layer.kind.layers);
      most_beside_all = std::max(most_beside_all, within);
      most_beside_kept = std::max(most_beside_kept, within + regathered);
      EXPECT_LE(layer.memory.total(), step.one_layer_bytes);
    }
    EXPECT_DOUBLE_EQ(step.regathered_bytes, kept + most_beside_kept) << model;
    EXPECT_DOUBLE_EQ(step.kept_bytes, kept + gathered + most_beside_all) << model;
  }
}

/// Checks the calls that need most, at the size of a model but without its memory.
TEST(Plan, WorkspaceIsNoMoreThanPlanned) {
  const plan::StepPlan step = plan_step(request("glm-5.2", 131072, 64));
  const plan::PlannedLayer& layer = step.layers[0];
  std::deque<FarMemory> memory;  // zeros: the contents of windows are read
  const auto of = [&](std::string_view name) {
    const auto found = std::find_if(layer.plan.tensors.begin(), layer.plan.tensors.end(),
                                    [&](const auto& each) { return each.name == name; });
    const std::int64_t bytes = elements(found->shape) * element_bytes(found->dtype);
    Tensor tensor{.data = memory.emplace_back(Device(), static_cast<std::size_t>(bytes)).data(),
                  .dtype = found->dtype,
                  .device = {}};
    tensor.rank = static_cast<std::int32_t>(found->shape.size());
    std::int64_t stride = 1;
    for (std::int32_t i = tensor.rank - 1; i >= 0; --i) {
      tensor.shape[i] = found->shape[i];
      tensor.stride[i] = std::exchange(stride, stride * found->shape[i]);
    }
    return tensor;
  };
  const IndexTopkForward select{.q = of("index_q"),
                                .k = of("index_k"),
                                .weights = of("weights"),
                                .k_scale = {},
                                .begin = of("begin"),
                                .end = of("end"),
                                .indices = of("selected"),
                                .lengths = of("selected_lengths"),
                                .scores = of("scores")};
  const SparseAttentionBackward attend{.q = of("q"),
                                       .kv = of("kv"),
                                       .indices = of("selected"),
                                       .lengths = of("selected_lengths"),
                                       .sink = {},
                                       .out = of("out"),
                                       .lse = of("lse"),
                                       .d_out = of("d_out"),
                                       .d_lse = {},
                                       .d_q = of("d_q"),
                                       .d_kv = of("d_kv"),
                                       .d_sink = {},
                                       .scale = layer.kind.c.scale};
  const double planned = layer.memory.of("workspace, at most");
  for (const auto bytes : {workspace_bytes(select), workspace_bytes(attend)}) {
    EXPECT_GT(bytes, 0U);
    EXPECT_LE(static_cast<double>(bytes), planned);
  }
}

}  // namespace
}  // namespace winnow::tests
