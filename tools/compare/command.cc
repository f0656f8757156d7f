// SPDX-License-Identifier: Apache-2.0
// winnow compare: a call that was dumped from a job, on every backend and kernel that takes it.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "tools/commands.h"
#include "tools/compare/comparison.h"
#include "tools/compare/dumped_call.h"
#include "tools/compare/safetensors.h"
#include "tools/help.h"
#include "tools/json_document.h"
#include "tools/output.h"
#include "tools/progress.h"
#include "tools/report_json.h"
#include "tools/table.h"
#include "tools/terminal.h"
#include "tools/whole_number.h"
#include "tools/words.h"
#include "winnow/winnow.h"

namespace winnow::dump {
namespace {

using tools::Table;
using Json = nlohmann::ordered_json;

struct Options {
  std::string file;
  std::string backend;
  std::string kernel;
  std::int64_t rows = 0;
  bool format = false;
  bool json = false;
};

// ---- The file format.

std::string role_text(const FormatField& field) {
  constexpr const char* kRoles[] = {"input", "output", "option"};
  return kRoles[static_cast<int>(field.role)];
}

std::string value_text(const FormatField& field) {
  switch (field.option) {
    case OptionKind::none:
      return fmt::format("[{}]", fmt::join(field.dimensions, ", "));
    case OptionKind::whole_number:
      return "whole number";
    case OptionKind::number:
      return "number";
    case OptionKind::truth:
      return "true or false";
    default:
      return fmt::format("{}", fmt::join(field.words, " or "));
  }
}

void print_format(bool json) {
  Json operators = Json::array();
  Table table({"<operator", "<name", "<", "<shape or value"});
  for (const std::string_view op : operator_names()) {
    Json fields = Json::array();
    std::string in_first_line(op);
    for (const FormatField& field : format_of(op)) {
      table.add({std::exchange(in_first_line, ""), std::string(field.name), role_text(field),
                 value_text(field)});
      fields.push_back(
          {{"name", field.name}, {"role", role_text(field)}, {"value", value_text(field)}});
    }
    operators.push_back({{"name", op}, {"fields", std::move(fields)}});
  }
  if (json)
    tools::print_json("compare", {{"operators", std::move(operators)}});
  else
    fmt::print("{}", table.text());
}

// ---- A comparison.

std::string place_text(const Difference& difference) {
  std::vector<std::string> words;
  for (const auto& [name, at] : difference.at) words.push_back(fmt::format("{} {}", name, at));
  return fmt::format("{}: {:.6g}, reference {:.6g}", fmt::join(words, ", "), difference.value,
                     difference.expected);
}

std::string finding_text(Finding finding) {
  if (finding.most) finding.report.note.clear();  // the places say more
  std::string text = fmt::format("  {}\n", tools::coloured_line(finding.report));
  if (finding.most) text += fmt::format("    most at {}\n", place_text(*finding.most));
  if (finding.first) text += fmt::format("    first at {}\n", place_text(*finding.first));
  return text;
}

std::string title_of(const DumpedCall& call, const Contender& contender) {
  if (!contender.backend.empty())
    return contender.kernel.empty() ? contender.backend
                                    : fmt::format("{}, {}", contender.backend, contender.kernel);
  return call.ran_on.empty() ? "the file" : fmt::format("the file, made by {}", call.ran_on);
}

void print_text(const Options& options, const DumpedCall& call, const Comparison& comparison) {
  fmt::print("{} of {}\n", call.op, options.file);
  Table tensors({"<", "<", "<"});
  for (const FormatField& field : call.fields) {
    const auto output = call.outputs.find(field.name);
    const harness::Buffer* const stored = call.find(field.name);
    if (stored != nullptr)
      tensors.add({"  " + std::string(field.name), describe(stored->tensor()),
                   output == call.outputs.end() ? "" : "output in the file"});
    else if (output != call.outputs.end())
      tensors.add(
          {"  " + std::string(field.name),
           fmt::format("{}[{}]", name(output->second.dtype), fmt::join(output->second.shape, ", ")),
           "output"});
  }
  const std::string lines = tensors.text();
  fmt::print("{}\n", lines.substr(lines.find('\n') + 1));
  fmt::print("{} of {} rows compared with the reference in double\n", comparison.compared_rows,
             comparison.query_rows);
  for (const Contender& contender : comparison.contenders) {
    fmt::print("\n{}{}\n", title_of(call, contender),
               contender.why_not.empty() ? "" : ": " + contender.why_not);
    for (const Finding& finding : contender.findings) fmt::print("{}", finding_text(finding));
  }
  const auto ran = std::count_if(comparison.contenders.begin(), comparison.contenders.end(),
                                 [](const Contender& each) { return each.why_not.empty(); });
  fmt::print("\n{} compared, {} failed\n", ran, comparison.failed());
}

Json json_of(const Difference& difference) {
  Json at = Json::object();
  for (const auto& [name, index] : difference.at) at[std::string(name)] = index;
  return {{"at", std::move(at)}, {"value", difference.value}, {"reference", difference.expected}};
}

void print_comparison_json(const Options& options, const DumpedCall& call,
                           const Comparison& comparison) {
  Json contenders = Json::array();
  for (const Contender& contender : comparison.contenders) {
    Json json;
    json["contender"] = contender.backend.empty() ? "file" : contender.backend;
    if (!contender.kernel.empty()) json["kernel"] = contender.kernel;
    if (contender.backend.empty() && !call.ran_on.empty()) json["ran_on"] = call.ran_on;
    if (!contender.why_not.empty()) {
      json["why_not"] = contender.why_not;
    } else {
      json["ok"] = !contender.failed();
      for (const Finding& finding : contender.findings) {
        Json each = tools::json_of(finding.report);
        if (finding.most) each["most"] = json_of(*finding.most);
        if (finding.first) each["first"] = json_of(*finding.first);
        json["outputs"].push_back(std::move(each));
      }
    }
    contenders.push_back(std::move(json));
  }
  tools::print_json("compare", {{"file", options.file},
                                {"op", call.op},
                                {"query_rows", comparison.query_rows},
                                {"compared_rows", comparison.compared_rows},
                                {"contenders", std::move(contenders)},
                                {"ok", comparison.ok()}});
}

int run(const Options& options) {
  if (options.format) {
    print_format(options.json);
    return 0;
  }
  if (options.file.empty()) throw std::invalid_argument("compare: FILE is missing");
  ComparisonRequest request{.backends = {Backend::reference, Backend::cpu, Backend::cuda},
                            .kernel = options.kernel,
                            .rows = options.rows};
  if (!options.backend.empty()) request.backends = {tools::backend_word(options.backend)};
  const DumpedCall call = read_call(options.file);
  tools::kernel_word(options.kernel, {call.op}, request.backends);
  const Comparison comparison = [&] {
    tools::Progress progress(1 + static_cast<double>(request.backends.size()));
    try {
      return compare_call(call, request, progress);
    } catch (const Error& error) {
      throw FileError(fmt::format("{}: {}", options.file, error.what()));
    }
  }();
  if (options.json)
    print_comparison_json(options, call, comparison);
  else
    print_text(options, call, comparison);
  if (comparison.failed() == 0 && !comparison.ok())
    tools::complain(fmt::format("{}: no kernel ran, so that none was compared", options.file));
  return comparison.ok() ? 0 : 1;
}

}  // namespace
}  // namespace winnow::dump

namespace winnow::tools {

void add_compare(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand(
      "compare",
      "A call that winnow.dump wrote, on every backend and kernel, against the reference.");
  auto options = std::make_shared<dump::Options>();
  CLI::Option* const file = command->add_option(
      "FILE", options->file, "A safetensors file of one call. Exit code 1 if a kernel is wrong.");
  command->add_option("--backend", options->backend,
                      "One of " + join(backend_names()) + ". Default: all.");
  command->add_option("--kernel", options->kernel,
                      "This kernel alone; info lists the names. Default: all.");
  command
      ->add_option("--rows", options->rows,
                   "Query rows that are compared, evenly spread. Default: all, or as many as the "
                   "reference does in some seconds.")
      ->transform(whole_number(std::int64_t{1}, std::int64_t{1} << 31));
  command
      ->add_flag("--format", options->format,
                 "Print the names that a file may have for each operator, with their shapes.")
      ->excludes(file);
  command->add_flag("--json", options->json, "Print JSON.");
  add_examples(*command,
               {"compare attention.safetensors", "compare attention.safetensors --json",
                "compare attention.safetensors --backend cpu --rows 64", "compare --format"});
  command->callback([options, &exit_code] { exit_code = dump::run(*options); });
}

}  // namespace winnow::tools
