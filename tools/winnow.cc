// SPDX-License-Identifier: Apache-2.0
// The program: info, check, run, bench, plan, compare, completion.
#include "winnow/winnow.h"

#include <csignal>
#include <cstdio>
#include <exception>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "tools/commands.h"
#include "tools/help.h"
#include "tools/interrupt.h"
#include "tools/output.h"

namespace {

using winnow::tools::complain;

constexpr int kFailed = 1;
constexpr int kBadWord = 2;
constexpr int kReaderGone = 128 + SIGPIPE;  // what a shell reports of a program that SIGPIPE ended
constexpr char kExitCodes[] =
    R"(Exit code 0: all is well. 1: something failed, or the output could not be written. 2: a word of
the command line is wrong, or there is no command. 130: Ctrl-C; no file is left half written, but a
second Ctrl-C ends the program at once and may leave FILE.PID.part. 141: the reader of the output
has gone, as head does; then nothing is said.)";

std::string names_of_commands(const CLI::App& app) {
  std::string names;
  for (const CLI::App* const command : app.get_subcommands({}))
    names += (names.empty() ? "" : ", ") + command->get_name();
  return names;
}

int run(int argc, char** argv) {
  int exit_code = 0;
  CLI::App app("Sparse attention with a learned indexer: what runs here, how exactly, how fast.",
               "winnow");
  app.set_version_flag("--version", fmt::format("winnow {}", winnow::version()));
  app.formatter(std::make_shared<winnow::tools::HelpFormatter>());
  app.footer(kExitCodes);
  app.require_subcommand(1);
  winnow::tools::add_info(app, exit_code);
  winnow::tools::add_check(app, exit_code);
  winnow::tools::add_run(app, exit_code);
  winnow::tools::add_bench(app, exit_code);
  winnow::tools::add_plan(app, exit_code);
  winnow::tools::add_compare(app, exit_code);
  winnow::tools::add_completion(app, exit_code);
  if (argc == 1) {
    std::fputs(app.help().c_str(), stderr);
    return kBadWord;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help and --version
      std::ostringstream text;
      app.exit(error, text);
      fmt::print("{}", text.str());  // unlike std::cout it throws where that fails
      return 0;
    }
    const bool no_command = app.get_subcommands().empty();
    complain(no_command ? "no such command: there are " + names_of_commands(app) : error.what());
    return kBadWord;
  }
  return exit_code;
}

int failed(const std::exception& error, int exit_code) {
  complain(error.what());
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  winnow::tools::fill_closed_streams();
  winnow::tools::watch_for_interrupts();
  try {
    const int exit_code = run(argc, argv);
    winnow::tools::flush_output();
    return exit_code;
  } catch (const winnow::tools::Interrupted& error) {
    return failed(error, winnow::tools::kInterrupted);
  } catch (const std::invalid_argument& error) {
    return failed(error, kBadWord);
  } catch (const std::system_error& error) {
    if (std::ferror(stdout) == 0) return failed(error, kFailed);
    if (error.code() == std::errc::broken_pipe) return kReaderGone;
    complain("cannot write to stdout: " + error.code().message());
    return kFailed;
  } catch (const std::exception& error) {
    return failed(error, kFailed);
  }
}
