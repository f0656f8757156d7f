// SPDX-License-Identifier: Apache-2.0
// winnow completion: what a shell needs to complete the words of this program, from the commands
// and options that it has.
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "harness/cases.h"
#include "tools/commands.h"
#include "tools/help.h"
#include "tools/words.h"

namespace winnow::tools {
namespace {

using Words = std::vector<std::string_view>;

constexpr std::array<std::string_view, 3> kShells{"bash", "zsh", "fish"};

/// What may stand where an option wants a value, or in place of a positional word.
struct Value {
  Words words{};
  bool is_file = false;
};

struct CompletedOption {
  std::string name;         // "--backend"; empty: positional
  std::string description;  // its first sentence
  bool has_value = false;
  bool value_optional = false;
  Value value{};
};

struct CompletedCommand {
  std::string name;
  std::string description;
  std::vector<CompletedOption> options;
};

Words case_names() {
  Words names;
  for (const harness::Case& each : harness::cases()) names.push_back(each.name);
  return names;
}

Words all_kernel_names() {
  Words names;
  for (const Backend backend : {Backend::reference, Backend::cpu, Backend::cuda})
    for (const std::string_view name : kernel_names(op_words(""), backend))
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  return names;
}

/// Of a number there is nothing to offer.
Value value_of(std::string_view command, std::string_view option) {
  if (option == "FILE" || option == "--json" || option == "--rates") return {{}, true};
  if (option == "OP") return {op_words("")};
  if (option == "SHELL") return {{kShells.begin(), kShells.end()}};
  if (option == "--backend") return {backend_names()};
  if (option == "--kernel") return {all_kernel_names()};
  if (option == "--model" || (option == "--case" && command == "run")) return {model_names()};
  if (option == "--case") return {case_names()};
  if (option == "--slots") return {slots_names()};
  if (option == "--data") return {score_pattern_names()};
  if (option == "--sharding") return {sharding_names()};
  if (option == "--gpu") return {{"h200"}};
  return {};
}

std::string first_sentence(const std::string& text) {
  return text.substr(0, std::min(text.find(". "), text.find_last_not_of('.') + 1));
}

std::vector<CompletedCommand> commands_of(const CLI::App& app) {
  std::vector<CompletedCommand> commands;
  for (const CLI::App* const command : app.get_subcommands({})) {
    CompletedCommand& each = commands.emplace_back(
        CompletedCommand{command->get_name(), first_sentence(command->get_description()), {}});
    for (const CLI::Option* const option : command->get_options()) {
      const std::string name = option->get_single_name();
      const bool positional = !option->nonpositional();
      each.options.push_back({positional ? "" : "--" + name,
                              first_sentence(option->get_description()),
                              option->get_expected_max() > 0, option->get_expected_min() == 0,
                              value_of(each.name, positional ? name : "--" + name)});
    }
  }
  return commands;
}

std::string names_of(const std::vector<CompletedCommand>& commands) {
  std::string names;
  for (const CompletedCommand& command : commands) names += command.name + " ";
  return names + "--help --version";
}

/// All that may stand in a command where no option waits for its value.
std::string words_of(const CompletedCommand& command) {
  std::string words;
  for (const CompletedOption& option : command.options)
    words += (option.name.empty() ? join(option.value.words, " ") : option.name) + " ";
  words.pop_back();
  return words;
}

bool takes_a_file(const CompletedCommand& command) {
  return std::any_of(command.options.begin(), command.options.end(), [](const auto& option) {
    return option.name.empty() && option.value.is_file;
  });
}

/// How a shell of this kind offers what may follow.
struct Shell {
  const char* head;       // up to the cases of the words before
  const char* words;      // offers {words}
  const char* files;      // offers files
  const char* no_values;  // offers nothing, where a number is waited for
  const char* tail;
};
constexpr Shell kBash{.head = R"(# Completion of winnow for bash: source <(winnow completion bash)
_winnow() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words="" files=""
  if ((COMP_CWORD == 1)); then
    words="{}"
  else
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD - 1]}}" in
)",
                      .words = "words=\"{}\"",
                      .files = "files=yes",
                      .no_values = "return 0",
                      .tail = R"(    esac
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word"; [[ $files ]] && compgen -f -- "$word")
}
complete -o filenames -F _winnow winnow
)"};
constexpr Shell kZsh{.head = R"(#compdef winnow
# Completion of winnow for zsh: winnow completion zsh > a folder of $fpath, as _winnow
_winnow() {{
  local offered="" files=""
  if ((CURRENT == 2)); then
    offered="{}"
  else
    case "${{words[2]}} ${{words[CURRENT - 1]}}" in
)",
                     .words = "offered=\"{}\"",
                     .files = "files=yes",
                     .no_values = "return 0",
                     .tail = R"(    esac
  fi
  compadd -- ${=offered}
  [[ -n $files ]] && _files
}
if [[ ${zsh_eval_context[-1]} == loadautofunc ]]; then _winnow "$@"; else compdef _winnow winnow; fi
)"};

/// The script of a shell whose cases look at the command and the word before.
std::string script_of(const std::vector<CompletedCommand>& commands, const Shell& shell) {
  std::string script = fmt::format(fmt::runtime(shell.head), names_of(commands));
  const auto add = [&](const std::string& pattern, const Value& value, const std::string& beside) {
    std::string words = join(value.words, " ");
    if (!beside.empty()) words += (words.empty() ? "" : " ") + beside;
    script += fmt::format("      {})", pattern);
    if (!words.empty()) script += " " + fmt::format(fmt::runtime(shell.words), words);
    if (value.is_file) script += fmt::format("{} {}", words.empty() ? "" : ";", shell.files);
    if (words.empty() && !value.is_file) script += fmt::format(" {}", shell.no_values);
    script += " ;;\n";
  };
  for (const CompletedCommand& command : commands)
    for (const CompletedOption& option : command.options)
      if (!option.name.empty() && option.has_value)
        add(fmt::format("\"{} {}\"", command.name, option.name), option.value,
            option.value_optional ? words_of(command) : "");
  for (const CompletedCommand& command : commands)
    add(fmt::format("\"{} \"*", command.name), {{}, takes_a_file(command)}, words_of(command));
  return script + shell.tail;
}

/// In single quotes of fish, where a quote and a backslash are escaped.
std::string quoted_for_fish(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) quoted += (c == '\'' || c == '\\' ? "\\" : "") + std::string(1, c);
  return quoted + "'";
}

std::string fish_script(const std::vector<CompletedCommand>& commands) {
  std::string script =
      "# Completion of winnow for fish: winnow completion fish | source\n"
      "complete -c winnow -f\n";
  for (const CompletedCommand& command : commands)
    script += fmt::format("complete -c winnow -n __fish_use_subcommand -a {} -d {}\n", command.name,
                          quoted_for_fish(command.description));
  for (const CompletedCommand& command : commands)
    for (const CompletedOption& option : command.options) {
      script += fmt::format("complete -c winnow -n '__fish_seen_subcommand_from {}'", command.name);
      if (!option.name.empty()) script += " -l " + option.name.substr(2);
      if (option.has_value) {
        if (!option.name.empty() && !option.value_optional)
          script += option.value.is_file ? " -r" : " -x";  // -x: no files
        if (option.value.is_file) script += " -F";
        if (!option.value.words.empty())
          script += fmt::format(" -a {}", quoted_for_fish(join(option.value.words, " ")));
      }
      script += fmt::format(" -d {}\n", quoted_for_fish(option.description));
      // Of an option whose value may be missing fish takes the next word for another one.
      if (option.value_optional && option.value.is_file)
        script += fmt::format(
            "complete -c winnow -n '__fish_seen_subcommand_from {}; "
            "and test (commandline -opc)[-1] = {}' -F\n",
            command.name, option.name);
    }
  return script;
}

void print_script(const CLI::App& app, const std::string& shell) {
  const std::vector<CompletedCommand> commands = commands_of(app);
  if (shell == "bash")
    fmt::print("{}", script_of(commands, kBash));
  else if (shell == "zsh")
    fmt::print("{}", script_of(commands, kZsh));
  else if (shell == "fish")
    fmt::print("{}", fish_script(commands));
  else
    throw std::invalid_argument(
        fmt::format("no shell '{}': there are {}", shell, join({kShells.begin(), kShells.end()})));
}

}  // namespace

void add_completion(CLI::App& app, int&) {
  CLI::App* command = app.add_subcommand(
      "completion", "A script with which a shell completes commands, options and their values.");
  auto shell = std::make_shared<std::string>();
  command->add_option("SHELL", *shell, "One of bash, zsh, fish.")->required();
  add_examples(*command, {"completion bash > ~/.local/share/bash-completion/completions/winnow",
                          "completion fish > ~/.config/fish/completions/winnow.fish"});
  command->callback([&app, shell] { print_script(app, *shell); });
}

}  // namespace winnow::tools
