// SPDX-License-Identifier: Apache-2.0
#include "tools/rank_run.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "harness/backends.h"
#include "harness/calls.h"
#include "harness/rank_step.h"
#include "tools/interrupt.h"
#include "tools/json_document.h"
#include "tools/mpi_job.h"
#include "tools/output.h"
#include "tools/progress.h"
#include "tools/report_json.h"
#include "tools/table.h"
#include "tools/terminal.h"
#include "tools/text.h"
#include "tools/timing.h"
#include "tools/words.h"

namespace winnow::tools {
namespace {

/// What a rank did.
struct RankFigures {
  double rows = 0;
  double index_keys = 0;  // of all its windows: the work of the indexer
  double gathered = 0;    // bytes of keys
  double reduced = 0;     // bytes of their gradients
  double gather = 0;      // seconds
  double compute = 0;
  double scatter = 0;
};
/// The bar of rank 0; other ranks have none.
using Bar = std::optional<Progress>;
// Of the bar: parts beside the two steps, on the ranks and alone, which are 1 each. They take about
// as long as each other, since the ranks share one machine.
constexpr double kInputsShare = 0.05;
constexpr double kTrafficShare = 0.05;
constexpr double kCompareShare = 0.1;

void begin(Bar& bar, std::string_view what, double work) {
  if (bar) bar->begin(what, work);
}

// A job in which a rank hangs has ended after half a minute, with the time that MPI_Abort takes.
constexpr std::chrono::seconds kTimeout{20};
constexpr std::size_t kFigures = sizeof(RankFigures) / sizeof(double);

struct Outcome {
  std::vector<RankFigures> ranks;
  double alone_seconds = 0;
  std::vector<harness::Report> reports;

  std::size_t failed() const {
    return std::count_if(reports.begin(), reports.end(), [](const auto& each) { return !each.ok; });
  }
  /// The work of the busiest rank over that of the mean rank.
  double imbalance() const {
    double most = 0;
    double sum = 0;
    for (const RankFigures& rank : ranks) {
      most = std::max(most, rank.index_keys);
      sum += rank.index_keys;
    }
    return sum > 0 ? most * static_cast<double>(ranks.size()) / sum : 1;
  }
};

/// The seconds of a step's calls.
double run_calls(const harness::TrainingStep& step, Device device, const Execution& execution,
                 Bar& bar) {
  std::vector<harness::Call> calls;
  double flops = 0;
  step.visit_calls([&](const auto& args, double each) {
    calls.push_back(harness::call(args, each));
    flops += each;
  });
  double seconds = 0;
  for (const harness::Call& call : calls) {
    begin(bar, call.name, call.flops / flops);
    seconds += time_once(device, [&] { call.run(execution); });
  }
  return seconds;
}

RankFigures run_step(harness::RankStep& rank, Device device, const Execution& execution, Bar& bar) {
  RankFigures figures;
  begin(bar, "gathering keys", kTrafficShare);
  figures.gather = time_once(device, [&] {
    rank.gather(execution);
    rank.communicator.wait(execution);
  });
  figures.compute = run_calls(rank.step, device, execution, bar);
  begin(bar, "scattering gradients", kTrafficShare);
  figures.scatter = time_once(device, [&] {
    rank.scatter(execution);
    rank.communicator.wait(execution);
  });
  figures.rows = static_cast<double>(rank.step.batch.places.size());
  for (const harness::QueryPlace& place : rank.step.batch.places)
    figures.index_keys += static_cast<double>(place.index_keys);
  figures.gathered = static_cast<double>(rank.communicator.traffic().gathered);
  figures.reduced = static_cast<double>(rank.communicator.traffic().reduced);
  rank.sum_parameters(execution);
  rank.communicator.wait(execution);
  return figures;
}

std::vector<RankFigures> collect(const MpiJob& job, const RankFigures& figures) {
  const std::array<double, kFigures> numbers{figures.rows,    figures.index_keys, figures.gathered,
                                             figures.reduced, figures.gather,     figures.compute,
                                             figures.scatter};
  const std::vector<double> all = job.collect(numbers);
  std::vector<RankFigures> ranks;
  for (std::size_t i = 0; i < all.size(); i += kFigures)
    ranks.push_back(
        {all[i], all[i + 1], all[i + 2], all[i + 3], all[i + 4], all[i + 5], all[i + 6]});
  return ranks;
}

/// Results of all ranks against a step that rank 0 makes alone.
void compare(const MpiJob& job, const RankRun& request, const harness::RankStep& rank,
             Device device, Bar& bar, Outcome& outcome) {
  std::unique_ptr<harness::TrainingStep> alone;
  if (job.rank() == 0) {
    begin(bar, "inputs of one rank alone", kInputsShare);
    alone = std::make_unique<harness::TrainingStep>(request.c, device, request.seed);
    outcome.alone_seconds = run_calls(*alone, device, request.execution, bar);
  }
  begin(bar, "comparing with one rank", kCompareShare);
  const std::vector<harness::StepOutput> results = results_of(rank);
  for (std::size_t i = 0; i < results.size(); ++i) {
    const std::vector<double> of_ranks = job.collect(values_of(*results[i].buffer));
    if (job.rank() != 0) continue;
    const harness::StepOutput expected = results_alone(*alone)[i];
    harness::Rows rows;
    for (int r = 0; r < job.size(); ++r) {
      const harness::Rows held = rows_of_rank(expected, rank.shards, r);
      rows.insert(rows.end(), held.begin(), held.end());
    }
    outcome.reports.push_back(
        compare_with_one_rank(expected, of_ranks, values_of(*expected.buffer, rows)));
  }
}

void print_text(const RankRun& request, const Outcome& outcome) {
  const harness::Case& c = request.c;
  fmt::print("One training step of sparse attention over {} ranks, {} geometry, {}\n\n",
             outcome.ranks.size(), c.name, winnow::name(c.dtype));
  fmt::print("backend    {}: {}\n", winnow::name(request.execution.backend),
             describe(request.execution.backend));
  fmt::print("batch      {} rows in {} packed documents, sharding {}\n", c.rows,
             harness::Batch(c).offsets.size() - 1, name(request.sharding));
  fmt::print("attention  {}\nindexer    {}\n\n", attention_text(c), indexer_text(c));

  Table table(
      {"rank", "rows", "indexer work", "gathered", "reduced", "gather", "compute", "scatter"});
  for (std::size_t r = 0; r < outcome.ranks.size(); ++r) {
    const RankFigures& rank = outcome.ranks[r];
    table.add({fmt::to_string(r), fmt::format("{:.0f}", rank.rows),
               fmt::format("{:.0f} keys", rank.index_keys), bytes_text(rank.gathered),
               bytes_text(rank.reduced), seconds_text(rank.gather), seconds_text(rank.compute),
               seconds_text(rank.scatter)});
  }
  fmt::print("{}busiest rank: {:.3f} of the mean indexer work; one rank alone takes {}\n\n",
             table.text(), outcome.imbalance(), seconds_text(outcome.alone_seconds));

  fmt::print("difference from one rank\n");
  for (const harness::Report& report : outcome.reports) fmt::print("{}\n", coloured_line(report));
  if (outcome.failed() == 0)
    fmt::print("all {} within their limits\n", outcome.reports.size());
  else
    fmt::print("{} of {} FAILED\n", outcome.failed(), outcome.reports.size());
  flush_output();
}

void print_json(const RankRun& request, const Outcome& outcome) {
  using Json = nlohmann::ordered_json;
  Json ranks = Json::array();
  for (const RankFigures& rank : outcome.ranks)
    ranks.push_back({{"rows", rank.rows},
                     {"index_keys", rank.index_keys},
                     {"gathered_bytes", rank.gathered},
                     {"reduced_bytes", rank.reduced},
                     {"gather_seconds", rank.gather},
                     {"compute_seconds", rank.compute},
                     {"scatter_seconds", rank.scatter}});
  Json errors = Json::array();
  for (const harness::Report& report : outcome.reports) errors.push_back(json_of(report));
  const Json all{{"backend", winnow::name(request.execution.backend)},
                 {"runs_on", describe(request.execution.backend)},
                 {"case", request.c.name},
                 {"rows", request.c.rows},
                 {"sharding", name(request.sharding)},
                 {"seed", request.seed},
                 {"ranks", ranks},
                 {"indexer_imbalance", outcome.imbalance()},
                 {"alone_seconds", outcome.alone_seconds},
                 {"errors", errors},
                 {"ok", outcome.failed() == 0}};
  tools::print_json("run", all);
  flush_output();
}

int run(const MpiJob& job, const RankRun& request) {
  const harness::Batch batch(request.c);
  const harness::BatchShards shards(request.c, batch, job.size(), request.sharding);
  for (const auto& rows : shards.rows.rows) {
    if (rows.empty()) {
      throw std::invalid_argument(fmt::format("--tokens {}: too few for {} ranks: one has none",
                                              request.c.rows, job.size()));
    }
  }
  Bar bar;
  if (job.rank() == 0) bar.emplace(2 + 2 * kInputsShare + 2 * kTrafficShare + kCompareShare);
  begin(bar, "making inputs", kInputsShare);
  const Device device = harness::device_of(request.execution.backend);
  const auto communicator = job.communicator(kTimeout);
  harness::RankStep rank(request.c, batch, request.sharding, *communicator, request.seed, device);
  // The ranks of this machine share its cores.
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  Execution execution = request.execution;
  execution.threads = std::max(1, cores / job.size());

  Outcome outcome;
  outcome.ranks = collect(job, run_step(rank, device, execution, bar));
  compare(job, request, rank, device, bar, outcome);
  bar.reset();
  if (job.rank() == 0) request.json ? print_json(request, outcome) : print_text(request, outcome);
  return job.decided_by_rank_0(outcome.failed() == 0) ? 0 : 1;
}

}  // namespace

int run_on_ranks(const RankRun& request) {
  const MpiJob job;
  try {
    return run(job, request);
  } catch (const Interrupted& error) {
    complain(error.what());
    job.abort(kInterrupted);
  } catch (const std::exception& error) {
    complain(fmt::format("rank {} of {}: {}", job.rank(), job.size(), error.what()));
    job.abort(1);
  }
}

}  // namespace winnow::tools
