// SPDX-License-Identifier: Apache-2.0
// winnow check: operators on cases and backends, held against the reference in double.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "harness/backends.h"
#include "harness/families.h"
#include "tools/commands.h"
#include "tools/help.h"
#include "tools/json_document.h"
#include "tools/progress.h"
#include "tools/report_json.h"
#include "tools/terminal.h"
#include "tools/text.h"
#include "tools/whole_number.h"
#include "tools/words.h"
#include "winnow/winnow.h"

namespace winnow::tools {
namespace {

struct Options {
  std::string op;
  std::string backend;
  std::string kernel;
  std::string name_of_case;
  std::uint64_t seed = 1;
  bool json = false;
};

struct Task {
  std::string_view op;
  harness::Case c;
  Backend backend;

  std::string title() const {
    const bool trimmed = c.tokens < harness::find_case(c.name).tokens;
    return fmt::format("{}, {}{}, {}", op, c.name,
                       trimmed ? fmt::format(" with {} queries", c.tokens) : "", name(backend));
  }
};

/// A model's own size takes a CPU minutes for each op: unless someone asks for the case by name,
/// it gets fewer queries, with all keys. (On the reference the harness runs sampled rows alone.)
harness::Case trimmed(harness::Case c, Backend backend) {
  constexpr std::int64_t kQueries = 256;
  if (c.full && backend == Backend::cpu) c.tokens = std::min(c.tokens, kQueries);
  return c;
}

bool has_kernel(const Options& options, Backend backend) {
  const std::vector<std::string_view> names = kernel_names(op_words(options.op), backend);
  return std::find(names.begin(), names.end(), options.kernel) != names.end();
}

std::vector<Backend> backends_of(const Options& options) {
  std::vector<Backend> backends = options.backend.empty()
                                      ? harness::usable_backends()
                                      : std::vector{backend_word(options.backend)};
  if (kernel_word(options.kernel, op_words(options.op), backends) != nullptr)
    std::erase_if(backends, [&](Backend backend) { return !has_kernel(options, backend); });
  return backends;
}

std::vector<Task> tasks_of(const Options& options) {
  const std::vector<Backend> backends = backends_of(options);
  std::vector<harness::Case> cases;
  if (!options.name_of_case.empty()) cases.push_back(harness::find_case(options.name_of_case));
  for (const harness::Case& each : harness::cases())
    if (options.name_of_case.empty() && !each.slow) cases.push_back(each);

  std::vector<Task> tasks;
  for (const std::string_view op : op_words(options.op))
    for (const harness::Case& c : cases)
      for (const Backend backend : backends) {
        // What a case does not have is worth a line only if someone asked for it.
        const bool asked_for = !options.op.empty() && !options.name_of_case.empty();
        if (asked_for || harness::missing(op, c).empty())
          tasks.push_back({op, options.name_of_case.empty() ? trimmed(c, backend) : c, backend});
      }
  return tasks;
}

/// The kernels that ran, in the order of the reports.
std::vector<std::string_view> kernels_of(const std::vector<harness::Report>& reports) {
  std::vector<std::string_view> kernels;
  for (const harness::Report& report : reports)
    if (!report.kernel.empty() &&
        std::find(kernels.begin(), kernels.end(), report.kernel) == kernels.end())
      kernels.push_back(report.kernel);
  return kernels;
}

struct Counts {
  std::size_t compared = 0;
  std::size_t failed = 0;
  std::size_t skipped = 0;

  void add(const harness::Report& report) {
    ++(report.skipped ? skipped : compared);
    if (!report.ok) ++failed;
  }
};

int check(const Options& options) {
  const std::vector<Task> tasks = tasks_of(options);
  const auto start = std::chrono::steady_clock::now();
  Counts counts;
  nlohmann::ordered_json checks = nlohmann::json::array();
  {
    constexpr double kFullWork = 40;  // against 1 of a small case, roughly
    double work = 0;
    for (const Task& task : tasks) work += task.c.full ? kFullWork : 1;
    Progress progress(work);
    for (const Task& task : tasks) {
      progress.begin(fmt::format("{}, {}", task.op, task.c.name), task.c.full ? kFullWork : 1);
      Execution execution{.backend = task.backend};
      execution.kernel = kernel_word(options.kernel, op_words(options.op), {task.backend});
      const auto reports = harness::check(task.op, task.c, execution, options.seed);
      const std::vector<std::string_view> kernels = kernels_of(reports);
      std::string text = task.title();
      if (!kernels.empty()) text += fmt::format(", {}", join(kernels, " and "));
      text += '\n';
      nlohmann::ordered_json lines = nlohmann::json::array();
      for (const harness::Report& report : reports) {
        counts.add(report);
        const bool ambiguous = kernels.size() > 1 && !report.kernel.empty();
        text += fmt::format("  {}{}\n", coloured_line(report),
                            ambiguous ? "  by " + report.kernel : "");
        lines.push_back(json_of(report));
      }
      if (!options.json) progress.print(text);
      checks.push_back({{"op", task.op},
                        {"case", task.c.name},
                        {"tokens", task.c.tokens},
                        {"backend", name(task.backend)},
                        {"reports", std::move(lines)}});
    }
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  if (options.json) {
    const nlohmann::ordered_json all{{"seed", options.seed},        {"checks", std::move(checks)},
                                     {"compared", counts.compared}, {"failed", counts.failed},
                                     {"skipped", counts.skipped},   {"seconds", elapsed.count()},
                                     {"ok", counts.failed == 0}};
    print_json("check", all);
  } else {
    fmt::print("\n{} {}: {} tensors compared, {} failed, {} skipped, {}\n", tasks.size(),
               tasks.size() == 1 ? "check" : "checks", counts.compared, counts.failed,
               counts.skipped, seconds_text(elapsed.count()));
  }
  return counts.failed == 0 ? 0 : 1;
}

}  // namespace

void add_check(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand(
      "check", "Hold operators against the reference in double. Exit code 1 if one fails.");
  auto options = std::make_shared<Options>();
  command->add_option("OP", options->op, "One of " + join(op_words("")) + ". Default: all.");
  command->add_option("--backend", options->backend,
                      "One of " + join(backend_names()) +
                          ". Default: all that are usable here and have the kernel asked for.");
  command->add_option("--kernel", options->kernel, kKernelHelp);
  command->add_option("--case", options->name_of_case,
                      "A model (" + join(model_names()) +
                          ") or an awkward case; a bad word lists all. Default: all quick ones.");
  command->add_option("--seed", options->seed, "Of all inputs. Default: 1.")->transform(any_seed());
  command->add_flag("--json", options->json, "Print JSON.");
  add_examples(*command, {"check", "check sparse_attention --backend cpu",
                          "check index_topk --case glm-5.2 --json"});
  command->callback([options, &exit_code] { exit_code = check(*options); });
}

}  // namespace winnow::tools
