// SPDX-License-Identifier: Apache-2.0
// A program of somebody else: calls the library, and catches an Error that it throws.
#include <cstdio>
#include <vector>

#include "winnow/winnow.h"

int main() {
  std::vector<std::int32_t> cu_seqlens = {0, 3, 8}, begin(8), end(8);
  winnow::KeyWindows windows = {.cu_seqlens = winnow::tensor_of(cu_seqlens, {3}),
                                .begin = winnow::tensor_of(begin, {8}),
                                .end = winnow::tensor_of(end, {8})};
  winnow::key_windows(windows);
  windows.end = {};
  try {
    winnow::key_windows(windows);
    return 1;
  } catch (const winnow::Error& error) {
    std::printf("winnow %s, cuda backend: %s\n%s\n", winnow::version(),
                winnow::why_not(winnow::Backend::cuda).c_str(), error.what());
  }
  return begin[7] == 3 && end[7] == 8 ? 0 : 1;
}
