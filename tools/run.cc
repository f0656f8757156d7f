// SPDX-License-Identifier: Apache-2.0
// winnow run: one training step of sparse attention on a packed batch.
#include <algorithm>
#include <bit>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "harness/training_step.h"
#include "tools/commands.h"
#include "tools/help.h"
#include "tools/json_document.h"
#include "tools/output.h"
#include "tools/rank_run.h"
#include "tools/report_json.h"
#include "tools/table.h"
#include "tools/terminal.h"
#include "tools/text.h"
#include "tools/timed_step.h"
#include "tools/whole_number.h"
#include "tools/words.h"
#include "winnow/winnow.h"

namespace winnow::tools {
namespace {

constexpr std::int64_t kFewestRows = 16;
constexpr std::int64_t kRows = 4096;
constexpr std::int64_t kRankRows = 1024;  // over ranks, where one of them also does it all alone

struct Options {
  std::string backend;
  std::string kernel;
  std::string model = "glm-5.2";
  std::int64_t rows = 0;     // 0: kRows or kRankRows
  std::int64_t queries = 0;  // 0: as many as the backend does in less than a minute
  std::uint64_t seed = 1;
  bool json = false;
  bool context_parallel = false;
  std::string sharding = "zigzag";
};

/// What a backend does in about half a minute on two cores.
double affordable_flops(Backend backend) {
  switch (backend) {
    case Backend::reference:
      return 350e9;
    case Backend::cpu:
      return 12e12;
    default:
      return 1e18;
  }
}

harness::Case sized_case(const Options& options, Backend backend) {
  harness::Case c = model_word(options.model);
  c.rows = options.rows > 0 ? options.rows : kRows;
  c.tokens = options.queries;
  if (c.tokens == 0) {
    const auto most =
        static_cast<std::uint64_t>(affordable_flops(backend) / harness::flops_per_row(c));
    c.tokens = std::max(kFewestRows, static_cast<std::int64_t>(std::bit_floor(most)));
  }
  c.tokens = std::min(c.tokens, c.rows);
  return c;
}

std::vector<std::int32_t> document_lengths(const harness::Case& c) {
  const harness::Batch batch(c);
  std::vector<std::int32_t> lengths;
  for (std::size_t i = 0; i + 1 < batch.offsets.size(); ++i)
    lengths.push_back(batch.offsets[i + 1] - batch.offsets[i]);
  return lengths;
}

void print_head(const harness::Case& c, Backend backend) {
  fmt::print("One training step of sparse attention, {} geometry, {}\n\n", c.name, name(c.dtype));
  fmt::print("backend    {}: {}\n", name(backend), describe(backend));
  fmt::print("batch      {} rows: packed documents of {}\n", c.rows,
             fmt::join(document_lengths(c), ", "));
  if (c.tokens < c.rows)
    fmt::print("queries    {} of the rows, evenly spread, as one of {} ranks would hold them\n",
               c.tokens, c.rows / c.tokens);
  else
    fmt::print("queries    all rows\n");
  fmt::print("attention  {}\nindexer    {}\n\n", attention_text(c), indexer_text(c));
  flush_output();
}

void print_text(const harness::Case& c, const StepResult& result) {
  Table stages({"<call", "<kernel", "time", "speed", "workspace"});
  double seconds = 0;
  double flops = 0;
  for (const Stage& stage : result.stages) {
    stages.add({stage.call, stage.kernel, seconds_text(stage.seconds),
                stage.flops > 0 ? rate_text(stage.flops / stage.seconds) : "",
                bytes_text(static_cast<double>(stage.workspace_bytes))});
    seconds += stage.seconds;
    flops += stage.flops;
  }
  stages.add({"the step", "", seconds_text(seconds), rate_text(flops / seconds), ""});
  fmt::print("{}mean index loss {:.4f}\n\n", stages.text(), result.mean_loss);

  Table memory({"<memory", "", "<instead of", ""});
  for (const MemoryUse& use : result.memory)
    memory.add({use.what, bytes_text(use.bytes), use.instead_of, bytes_text(use.dense_bytes)});
  fmt::print("{}\n", memory.text());

  fmt::print("error against the reference in double ({} of {} queries; sums: {} of {} keys)\n",
             result.compared_rows, c.tokens, result.compared_keys, c.keys());
  for (const harness::Report& report : result.reports) fmt::print("{}\n", coloured_line(report));
  if (result.failed() == 0)
    fmt::print("all {} within their limits\n", result.reports.size());
  else
    fmt::print("{} of {} FAILED\n", result.failed(), result.reports.size());
}

void print_json(const harness::Case& c, const Options& options, Backend backend,
                const StepResult& result) {
  using Json = nlohmann::ordered_json;
  Json stages = Json::array();
  for (const Stage& stage : result.stages) {
    stages.push_back({{"call", stage.call},
                      {"kernel", stage.kernel},
                      {"seconds", stage.seconds},
                      {"flops", stage.flops}});
    if (stage.flops > 0) stages.back()["flops_per_second"] = stage.flops / stage.seconds;
    stages.back()["workspace_bytes"] = stage.workspace_bytes;
  }
  Json memory = Json::array();
  for (const MemoryUse& use : result.memory)
    memory.push_back({{"what", use.what},
                      {"bytes", use.bytes},
                      {"instead_of", use.instead_of},
                      {"dense_bytes", use.dense_bytes}});
  Json errors = Json::array();
  for (const harness::Report& report : result.reports) errors.push_back(json_of(report));
  const Json all{{"backend", name(backend)},
                 {"runs_on", describe(backend)},
                 {"case", c.name},
                 {"rows", c.rows},
                 {"documents", document_lengths(c)},
                 {"query_rows", c.tokens},
                 {"seed", options.seed},
                 {"stages", stages},
                 {"mean_index_loss", result.mean_loss},
                 {"memory", memory},
                 {"compared_query_rows", result.compared_rows},
                 {"compared_keys", result.compared_keys},
                 {"errors", errors},
                 {"ok", result.failed() == 0}};
  tools::print_json("run", all);
}

Execution execution_of(const Options& options) {
  Execution execution{.backend = backend_word(options.backend)};
  execution.kernel = kernel_word(options.kernel, op_words(""), {execution.backend});
  return execution;
}

int run_over_ranks(const Options& options) {
  harness::Case c = model_word(options.model);
  c.rows = c.tokens = options.rows > 0 ? options.rows : kRankRows;
  // Few enough keys that the indexer has to choose.
  c.topk = c.window + std::min(c.index_topk(), std::max<std::int64_t>(1, c.index_keys() / 8));
  return run_on_ranks({.c = c,
                       .execution = execution_of(options),
                       .sharding = sharding_word(options.sharding),
                       .seed = options.seed,
                       .json = options.json});
}

int run(const Options& options) {
  if (options.context_parallel) return run_over_ranks(options);
  const Execution execution = execution_of(options);
  const Backend backend = execution.backend;
  const harness::Case c = sized_case(options, backend);
  if (!options.json) print_head(c, backend);
  const StepResult result = run_step(c, execution, options.seed);
  if (options.json)
    print_json(c, options, backend, result);
  else
    print_text(c, result);
  return result.failed() == 0 ? 0 : 1;
}

}  // namespace

void add_run(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand(
      "run", "One training step of sparse attention on a packed batch: times, memory, errors.");
  auto options = std::make_shared<Options>();
  command->add_option("--backend", options->backend,
                      "One of " + join(backend_names()) + ". Default: the fastest here.");
  command->add_option("--kernel", options->kernel, kKernelHelp);
  command->add_option("--case", options->model,
                      "One of " + join(model_names()) + ". Default: glm-5.2.");
  command
      ->add_option("--tokens", options->rows,
                   "Rows of the packed batch, all of them keys. Default: 4096; with "
                   "--context-parallel 1024.")
      ->transform(whole_number(kFewestRows, std::int64_t{1} << 24));
  CLI::Option* const queries =
      command
          ->add_option("--query-rows", options->queries,
                       "Rows that are queries too. Default: as many as the backend does in less "
                       "than a minute on two cores, at most all.")
          ->transform(whole_number(std::int64_t{1}, std::int64_t{1} << 24));
  command->add_option("--seed", options->seed, "Of all inputs. Default: 1.")->transform(any_seed());
  command->add_flag("--json", options->json, "Print JSON.");
  CLI::Option* const ranks =
      command
          ->add_flag("--context-parallel", options->context_parallel,
                     "Over the ranks of an MPI job, each with a shard of the rows: mpirun -n 4 "
                     "winnow run --context-parallel. All rows are queries, each for an eighth of "
                     "the keys at most. Rank 0 then makes the "
                     "step alone, and the exit code is 0 only if both are the same: selection and "
                     "forward bit by bit, sums within fp32.")
          ->excludes(queries);
  command
      ->add_option("--sharding", options->sharding,
                   "How ranks share the rows: contiguous, or zigzag, which gives them equal work. "
                   "Default: zigzag.")
      ->needs(ranks);
  add_examples(*command,
               {"run", "run --backend cpu --tokens 2048", "run --case deepseek-v4-flash --json"});
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace winnow::tools
