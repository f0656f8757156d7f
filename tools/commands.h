// SPDX-License-Identifier: Apache-2.0
// The subcommands: each adds its words to the command line and leaves its exit code in `exit_code`.
#pragma once

#include <CLI/App.hpp>

namespace winnow::tools {

void add_info(CLI::App& app, int& exit_code);
void add_check(CLI::App& app, int& exit_code);
void add_run(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);
void add_plan(CLI::App& app, int& exit_code);
void add_compare(CLI::App& app, int& exit_code);
void add_completion(CLI::App& app, int& exit_code);

}  // namespace winnow::tools
