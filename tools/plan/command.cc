// SPDX-License-Identifier: Apache-2.0
// winnow plan: what the sparse attention of a model's training step costs over many ranks.
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "tools/commands.h"
#include "tools/help.h"
#include "tools/json_document.h"
#include "tools/plan/report.h"
#include "tools/progress.h"
#include "tools/whole_number.h"
#include "tools/words.h"
#include "winnow/winnow.h"

namespace winnow::plan {
namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 26;
constexpr int kMostRanks = 1 << 16;

struct Options {
  std::string model;
  std::vector<std::int64_t> tokens;
  std::vector<int> ranks;
  std::int64_t documents = 1;
  std::vector<std::int64_t> lengths;
  std::string gpu = "h200";
  std::string rates_file;  // empty: the compiled rates of the GPU
  double bandwidth = 50;   // GB/s
  std::string sharding = "zigzag";
  bool json = false;
};

std::vector<std::int32_t> offsets_of(const Options& options, std::int64_t tokens) {
  std::vector<std::int32_t> offsets{0};
  if (options.lengths.empty()) {
    if (options.documents > tokens)
      throw std::invalid_argument(
          fmt::format("--documents {}: must be at most {}, the tokens", options.documents, tokens));
    for (std::int64_t i = 1; i <= options.documents; ++i)
      offsets.push_back(static_cast<std::int32_t>(i * tokens / options.documents));
    return offsets;
  }
  std::int64_t sum = 0;
  for (const std::int64_t length : options.lengths) {
    sum += length;
    if (sum > tokens)
      throw std::invalid_argument(
          fmt::format("--lengths: must sum to at most {}, the tokens; the first {} sum to {}",
                      tokens, offsets.size(), sum));
    offsets.push_back(static_cast<std::int32_t>(sum));
  }
  return offsets;
}

std::vector<PlanRequest> requests_of(const Options& options) {
  if (!(options.bandwidth > 0) || std::isinf(options.bandwidth))
    throw std::invalid_argument(
        fmt::format("--bandwidth {}: must be GB/s, finite and more than 0", options.bandwidth));
  const Model model = find_model(options.model);
  const DeviceRates device =
      options.rates_file.empty() ? find_gpu(options.gpu) : read_rates(options.rates_file);
  std::vector<PlanRequest> requests;
  for (const std::int64_t tokens : options.tokens)
    for (const int ranks : options.ranks)
      requests.push_back({.model = model,
                          .cu_seqlens = offsets_of(options, tokens),
                          .tokens = tokens,
                          .ranks = ranks,
                          .sharding = tools::sharding_word(options.sharding),
                          .device = device,
                          .bandwidth = options.bandwidth * 1e9});
  return requests;
}

std::vector<Planned> plans_of(const Options& options) {
  const std::vector<PlanRequest> requests = requests_of(options);
  tools::Progress progress(static_cast<double>(requests.size()));
  std::vector<Planned> plans;
  for (const PlanRequest& request : requests)
    plans.push_back(
        {request, plan_step(request, [&](double share) {
           progress.begin(fmt::format("{} tokens, {} ranks", request.tokens, request.ranks), share);
         })});
  return plans;
}

void run(const Options& options) {
  const std::vector<Planned> plans = plans_of(options);
  if (options.json) {
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    for (const Planned& planned : plans) all.push_back(json_of(planned));
    tools::print_json("plan", {{"plans", all}});
  } else if (plans.size() == 1) {
    print_plan(plans[0]);
  } else {
    print_table(plans);
  }
}

}  // namespace
}  // namespace winnow::plan

namespace winnow::tools {

void add_plan(CLI::App& app, int&) {
  CLI::App* command = app.add_subcommand(
      "plan",
      "Sparse attention of a training step over many ranks, on paper: FLOPs, messages, memory.");
  auto options = std::make_shared<plan::Options>();
  command->add_option("--model", options->model, "One of " + join(model_names()) + ".")->required();
  command
      ->add_option("--tokens", options->tokens,
                   "Rows of the packed batch. Several: one line for each instead of one plan.")
      ->required()
      ->delimiter(',')
      ->transform(whole_number(std::int64_t{1}, plan::kMostTokens))
      ->option_text("N,...");
  command->add_option("--ranks", options->ranks, "Of context parallelism. Several: likewise.")
      ->required()
      ->delimiter(',')
      ->transform(whole_number(1, plan::kMostRanks))
      ->option_text("N,...");
  CLI::Option* documents = command
                               ->add_option("--documents", options->documents,
                                            "Equal documents in the batch. Default: 1.")
                               ->transform(whole_number(std::int64_t{1}, plan::kMostTokens));
  command
      ->add_option("--lengths", options->lengths,
                   "Their lengths instead; rows behind the last one are padding.")
      ->delimiter(',')
      ->transform(whole_number(std::int64_t{0}, plan::kMostTokens))
      ->excludes(documents)
      ->option_text("N,...");
  CLI::Option* gpu =
      command->add_option("--gpu", options->gpu, "Whose measured rates are taken. There is h200.");
  command
      ->add_option("--rates", options->rates_file,
                   "Rates from this file instead, as bench --rates writes it.")
      ->excludes(gpu)
      ->option_text("FILE");
  command
      ->add_option("--bandwidth", options->bandwidth,
                   "GB/s that a rank takes from others and gives to them at once. Default: 50, a "
                   "400 Gbit/s adapter for each GPU.")
      ->option_text("GB/S");
  command->add_option("--sharding", options->sharding,
                      "contiguous, or zigzag for equal causal work. Default: zigzag.");
  command->add_flag("--json", options->json, "Print JSON.");
  add_examples(*command, {"plan --model glm-5.2 --tokens 131072 --ranks 8",
                          "plan --model glm-5.2 --tokens 131072,1048576 --ranks 8,16,32 --json",
                          "plan --model glm-5.2 --tokens 131072 --ranks 8 --rates rates.json"});
  command->callback([options] { plan::run(*options); });
}

}  // namespace winnow::tools
