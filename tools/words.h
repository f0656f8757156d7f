// SPDX-License-Identifier: Apache-2.0
// Words of the command line that name something. A bad one throws std::invalid_argument that lists
// what is allowed; a backend that cannot run here throws Error with the reason.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "harness/cases.h"
#include "winnow/execution.h"
#include "winnow/parallel.h"

namespace winnow::tools {

inline constexpr char kDefaultCase[] = "glm-5.2";
inline constexpr char kDefaultCaseWithWindow[] = "deepseek-v4-flash";

/// The help of --case where an operator chooses the default.
std::string case_help();
/// The help of --kernel.
inline constexpr char kKernelHelp[] =
    "Run this kernel where an operator has it; info lists the names. Default: the best that can.";

std::string join(const std::vector<std::string_view>& words, std::string_view separator = ", ");

/// A backend that is usable here; empty: the fastest of them.
Backend backend_word(const std::string& word);
/// `word`, if it is the name of an operator; empty: all of them.
std::vector<std::string_view> op_words(const std::string& word);
/// The case of this name, which must have the operator; empty: a default case that has it.
const harness::Case& case_word(const std::string& word, std::string_view op);
/// `word`, if it is the name of a kernel that one of these operators has on one of these backends;
/// null if it is empty.
const char* kernel_word(const std::string& word, const std::vector<std::string_view>& ops,
                        const std::vector<Backend>& backends);
/// A case with a model's own geometry.
const harness::Case& model_word(const std::string& word);
harness::Slots slots_word(const std::string& word);
std::vector<std::string_view> slots_names();
harness::ScorePattern score_pattern_word(const std::string& word);
std::vector<std::string_view> score_pattern_names();
Sharding sharding_word(const std::string& word);
std::vector<std::string_view> sharding_names();
std::string_view name(Sharding sharding);

/// The kernels that these operators have on a backend, each once.
std::vector<std::string_view> kernel_names(const std::vector<std::string_view>& ops,
                                           Backend backend);
std::vector<std::string_view> backend_names();
/// The cases with a model's own geometry.
std::vector<std::string_view> model_names();

}  // namespace winnow::tools
