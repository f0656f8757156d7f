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

std::string join(const std::vector<std::string_view>& words, std::string_view separator = ", ");

/// A backend that is usable here; empty: the fastest of them.
Backend backend_word(const std::string& word);
/// `word`, if it is the name of an operator; empty: all of them.
std::vector<std::string_view> op_words(const std::string& word);
/// A case with a model's own geometry.
const harness::Case& model_word(const std::string& word);
harness::Slots slots_word(const std::string& word);
Sharding sharding_word(const std::string& word);
std::string_view name(Sharding sharding);

std::vector<std::string_view> backend_names();
/// The cases with a model's own geometry.
std::vector<std::string_view> model_names();

}  // namespace winnow::tools
