// SPDX-License-Identifier: Apache-2.0
// The program: info, check, run, bench, plan. Exit code 0: fine; 1: something failed; 2: a bad
// word.
#include "winnow/winnow.h"

#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "tools/commands.h"
#include "tools/help.h"

namespace {

constexpr int kFailed = 1;
constexpr int kBadWord = 2;

int complain(const std::string& sentence, int exit_code) {
  fmt::print(stderr, "winnow: {}\n", sentence);
  return exit_code;
}

int run(int argc, char** argv) {
  int exit_code = 0;
  CLI::App app("Sparse attention with a learned indexer: what runs here, how exactly, how fast.",
               "winnow");
  app.set_version_flag("--version", fmt::format("winnow {}", winnow::version()));
  app.formatter(std::make_shared<winnow::tools::HelpFormatter>());
  app.require_subcommand(1);
  winnow::tools::add_info(app, exit_code);
  winnow::tools::add_check(app, exit_code);
  winnow::tools::add_run(app, exit_code);
  winnow::tools::add_bench(app, exit_code);
  winnow::tools::add_plan(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help and --version
    const bool no_command = app.get_subcommands().empty();
    return complain(
        no_command ? "no such command: there are info, check, run, bench and plan" : error.what(),
        kBadWord);
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::invalid_argument& error) {
    return complain(error.what(), kBadWord);
  } catch (const std::exception& error) {
    return complain(error.what(), kFailed);
  }
}
