// SPDX-License-Identifier: Apache-2.0
// parse_header: the JSON at the head of a safetensors file.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "tools/compare/safetensors.h"

namespace winnow::dump {

struct Header {
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::string> metadata;
};

/// Throws FileError, without the name of the file, for anything but an object of tensors, each with
/// dtype, shape and data_offsets, and of strings under __metadata__. A name that stands twice is
/// refused. Offsets are not compared with each other or with the size of the file.
Header parse_header(std::string_view json);

}  // namespace winnow::dump
