// SPDX-License-Identifier: Apache-2.0
// winnow info: the version, the devices, the backends and their kernels; of an operator, which
// kernel its calls take and why not the others.
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "harness/backends.h"
#include "harness/families.h"
#include "harness/kernel_choice.h"
#include "tools/commands.h"
#include "tools/help.h"
#include "tools/json_document.h"
#include "tools/table.h"
#include "tools/text.h"
#include "tools/words.h"
#include "winnow/winnow.h"

namespace winnow::tools {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string op;  // empty: about all of this machine
  std::string name_of_case;
  std::string backend;
  bool json = false;
};

bool usable(Backend backend) { return why_not(backend).empty(); }

struct Place {
  std::string device;
  std::string what;
  Backend automatic;  // what Backend::automatic takes for tensors there
};

std::vector<Place> places() {
  std::vector<Place> result{{"cpu", fmt::format("{} threads", std::thread::hardware_concurrency()),
                             usable(Backend::cpu) ? Backend::cpu : Backend::reference}};
  if (usable(Backend::cuda)) result.push_back({"cuda", describe(Backend::cuda), Backend::cuda});
  return result;
}

constexpr std::array kBackends{Backend::reference, Backend::cpu, Backend::cuda};

void print_text() {
  fmt::print("winnow {}\n\n", version());
  Table backends({"<backend", "<usable", "<"});
  for (const Backend backend : kBackends)
    backends.add({std::string(name(backend)), usable(backend) ? "yes" : "no",
                  usable(backend) ? describe(backend) : why_not(backend)});
  fmt::print("{}\n", backends.text());

  Table devices({"<device", "<", "<automatic takes"});
  for (const Place& place : places()) {
    std::string taken(name(place.automatic));
    if (place.automatic == Backend::reference) taken += ", as there is no faster one here";
    devices.add({place.device, place.what, taken});
  }
  fmt::print("{}\n", devices.text());

  Table operators({"<operator", "<reference", "<cpu", "<cuda"});
  for_each_operator([&]<class Args>(std::type_identity<Args>) {
    std::vector<std::string> cells{Args::kOperator};
    for (const Backend backend : kBackends) cells.push_back(join(kernels<Args>(backend)));
    operators.add(std::move(cells));
  });
  fmt::print("{}", operators.text());
}

void print_json() {
  Json backends = Json::array();
  for (const Backend backend : kBackends) {
    Json entry{{"name", name(backend)}, {"usable", usable(backend)}};
    entry[usable(backend) ? "runs_on" : "why_not"] =
        usable(backend) ? describe(backend) : why_not(backend);
    backends.push_back(std::move(entry));
  }
  Json devices = Json::array();
  for (const Place& place : places())
    devices.push_back(
        {{"device", place.device}, {"what", place.what}, {"automatic", name(place.automatic)}});
  Json operators = Json::array();
  for_each_operator([&]<class Args>(std::type_identity<Args>) {
    Json of_backend = Json::object();
    for (const Backend backend : kBackends)
      of_backend[std::string(name(backend))] = kernels<Args>(backend);
    operators.push_back({{"name", Args::kOperator}, {"kernels", std::move(of_backend)}});
  });
  const Json all{{"backends", backends}, {"devices", devices}, {"operators", operators}};
  tools::print_json("info", all);
}

// ---- The kernels of one operator's calls.

/// The kernels that a call might take, in the order in which they are tried.
struct Choice {
  std::string call;
  std::vector<Candidate> candidates;
};

struct Choices {
  harness::Case c;
  Device device;
  std::vector<Choice> list;
};

Choices choices_of(const Options& options) {
  // The choice depends on no number of rows, so few do, whatever the case.
  constexpr std::int64_t kQueries = 8;
  constexpr std::uint64_t kSeed = 1;
  const std::string_view op = op_words(options.op).front();
  harness::Case c = case_word(options.name_of_case, op);
  c.tokens = std::min(c.tokens, kQueries);
  const Backend backend = backend_word(options.backend);
  const Device device = harness::device_of(backend);
  const Execution execution{.backend = options.backend.empty() ? Backend::automatic : backend};

  Choices choices{c, device, {}};
  const harness::Calls calls = calls_of(op, c, device, kSeed);
  for (const harness::Call& call : calls.list) {
    const Choice& choice = choices.list.emplace_back(Choice{call.name, call.explain(execution)});
    // Backward calls read what forward calls write, and their arguments are checked.
    if (harness::chosen(choice.candidates) != nullptr) call.run(execution);
  }
  return choices;
}

std::string_view device_name(const Choices& choices) {
  return choices.device.kind == DeviceKind::cuda ? "cuda" : "cpu";
}

void print_choices_text(const Options& options, const Choices& choices) {
  const harness::Case& c = choices.c;
  fmt::print("{} on {}, {}, tensors on {}\n  attention: {}\n  indexer: {}\n\n", options.op, c.name,
             name(c.dtype), device_name(choices), attention_text(c),
             indexer_text(c, /*with_keys=*/false));
  Table table({"<call", "<backend", "<kernel", "<"});
  for (const Choice& choice : choices.list) {
    const Candidate* const chosen = harness::chosen(choice.candidates);
    std::string call = choice.call;  // in its first line only
    for (const Candidate& candidate : choice.candidates) {
      table.add({std::exchange(call, ""), std::string(name(candidate.backend)),
                 std::string(candidate.kernel),
                 &candidate == chosen        ? "runs"
                 : candidate.why_not.empty() ? "could run, but comes later"
                                             : candidate.why_not});
    }
  }
  fmt::print("{}", table.text());
}

void print_choices_json(const Options& options, const Choices& choices) {
  Json calls = Json::array();
  for (const Choice& choice : choices.list) {
    Json candidates = Json::array();
    for (const Candidate& candidate : choice.candidates) {
      Json& entry = candidates.emplace_back(Json{{"backend", name(candidate.backend)}});
      if (!candidate.kernel.empty()) entry["kernel"] = candidate.kernel;
      if (!candidate.why_not.empty()) entry["why_not"] = candidate.why_not;
    }
    const Candidate* const chosen = harness::chosen(choice.candidates);
    calls.push_back({{"call", choice.call},
                     {"backend", chosen == nullptr ? Json() : Json(name(chosen->backend))},
                     {"kernel", chosen == nullptr ? Json() : Json(chosen->kernel)},
                     {"candidates", std::move(candidates)}});
  }
  const Json all{{"op", options.op},
                 {"case", choices.c.name},
                 {"device", device_name(choices)},
                 {"calls", calls}};
  tools::print_json("info", all);
}

void info(const Options& options) {
  if (options.op.empty()) return options.json ? print_json() : print_text();
  const Choices choices = choices_of(options);
  options.json ? print_choices_json(options, choices) : print_choices_text(options, choices);
}

}  // namespace

void add_info(CLI::App& app, int&) {
  CLI::App* command = app.add_subcommand(
      "info",
      "Version, backends and devices, or which kernels an operator takes, and why not others.");
  auto options = std::make_shared<Options>();
  CLI::Option* const op = command->add_option(
      "OP", options->op,
      "One of " + join(op_words("")) + ": which kernel would run each of its calls.");
  command->add_option("--case", options->name_of_case, case_help())->needs(op);
  command
      ->add_option("--backend", options->backend,
                   "One of " + join(backend_names()) +
                       ", which must run it. Default: any, with tensors for the fastest here.")
      ->needs(op);
  command->add_flag("--json", options->json, "Print JSON.");
  add_examples(*command,
               {"info", "info sparse_attention", "info index_topk --case glm-5.2 --json"});
  command->callback([options] { info(*options); });
}

}  // namespace winnow::tools
