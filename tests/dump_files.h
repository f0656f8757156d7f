// SPDX-License-Identifier: Apache-2.0
// Files of dumped calls, made of their parts so that any part can be wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

namespace winnow::tests {

/// A file in memory that has a path.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(memfd_create("dump", MFD_CLOEXEC)) {}
  ~MemoryFile() { close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return fmt::format("/proc/self/fd/{}", descriptor_); }
  void write(std::string_view bytes) const {
    if (ftruncate(descriptor_, 0) != 0 ||
        pwrite(descriptor_, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
      throw std::runtime_error("no memory for a file");
  }

 private:
  int descriptor_;
};

/// Length, header, data.
inline std::string file_of(std::string_view header, std::string_view data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i) & 0xff);
  return bytes.append(header).append(data);
}

struct DumpedTensor {
  std::string name;
  std::string dtype;
  std::vector<int> shape;
  std::size_t element_bytes;
};

/// A right file, whose tensors hold small numbers.
inline std::string file_of(std::string_view metadata, const std::vector<DumpedTensor>& tensors) {
  std::string header = fmt::format(R"({{"__metadata__":{{{}}})", metadata);
  std::string data;
  for (const DumpedTensor& tensor : tensors) {
    std::size_t bytes = tensor.element_bytes;
    std::string shape;
    for (const int size : tensor.shape) {
      bytes *= static_cast<std::size_t>(size);
      shape += fmt::format("{}{}", shape.empty() ? "" : ",", size);
    }
    header += fmt::format(R"(,"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                          tensor.name, tensor.dtype, shape, data.size(), data.size() + bytes);
    // Ascending integers, or floating-point numbers near 1: either has few bytes that are not 0.
    for (std::size_t i = 0; i < bytes; ++i) {
      const std::size_t element = i / tensor.element_bytes;
      const bool last = i % tensor.element_bytes == tensor.element_bytes - 1;
      if (tensor.dtype == "I32")
        data += static_cast<char>(i % 4 == 0 ? element % 3 : 0);
      else
        data += static_cast<char>(last ? 0x3f : i % 7 * 16);
    }
  }
  return file_of(header + "}", data);
}

/// One file of several operators.
inline std::vector<std::string> right_files() {
  return {
      file_of(R"("winnow_operator":"sparse_attention_forward","scale":"0.25","winnow_ran_on":"x",)"
              R"("lse":"F32[3, 2]")",
              {{"q", "BF16", {3, 2, 16}, 2},
               {"kv", "BF16", {4, 16}, 2},
               {"indices", "I32", {3, 4}, 4},
               {"lengths", "I32", {3}, 4},
               {"out", "BF16", {3, 2, 8}, 2}}),
      file_of(R"("winnow_operator":"index_topk_forward","order":"by_score","indices":"I32[3, 2]",)"
              R"("lengths":"I32[3]","scores":"F32[3, 2]")",
              {{"q", "F8_E4M3", {3, 1, 8}, 1},
               {"k", "F8_E4M3", {4, 8}, 1},
               {"weights", "F32", {3, 1}, 4},
               {"k_scale", "F32", {4}, 4},
               {"begin", "I32", {3}, 4},
               {"end", "I32", {3}, 4}}),
      file_of(R"("winnow_operator":"index_loss","loss":"F32[2]","d_scores":"F32[2, 3]")",
              {{"indices", "I32", {2, 3}, 4},
               {"scores", "F32", {2, 3}, 4},
               {"target", "F32", {2, 3}, 4}}),
      file_of(R"("winnow_operator":"key_windows","ratio":"1","padding_rows":"empty",)"
              R"("begin":"I32[4]","end":"I32[4]")",
              {{"cu_seqlens", "I32", {3}, 4}}),
      file_of(R"("winnow_operator":"sparse_attention_backward","scale":"0.5","d_sink":"F32[2]",)"
              R"("d_q":"F32[1, 2, 2, 8]","d_kv":"F32[1, 3, 8]")",
              {{"q", "F32", {1, 2, 2, 8}, 4},
               {"kv", "F32", {1, 3, 8}, 4},
               {"indices", "I32", {1, 2, 3}, 4},
               {"sink", "F32", {2}, 4},
               {"out", "F32", {1, 2, 2, 8}, 4},
               {"lse", "F32", {1, 2, 2}, 4},
               {"d_out", "F32", {1, 2, 2, 8}, 4}}),
      file_of(R"("winnow_operator":"index_topk_backward","d_q":"F32[2, 1, 8]","d_k":"F32[3, 8]",)"
              R"("d_weights":"F32[2, 1]")",
              {{"q", "F32", {2, 1, 8}, 4},
               {"k", "F32", {3, 8}, 4},
               {"weights", "F32", {2, 1}, 4},
               {"begin", "I32", {2}, 4},
               {"end", "I32", {2}, 4},
               {"indices", "I32", {2, 3}, 4},
               {"d_scores", "F32", {2, 3}, 4}}),
      file_of(R"("winnow_operator":"value_projection_forward","out_v":"F16[2, 1, 3]")",
              {{"out", "F16", {2, 1, 8}, 2}, {"w_v", "F16", {1, 3, 8}, 2}}),
      file_of(R"("winnow_operator":"quantize_fp8","values":"F8_E4M3[2, 8]","scale":"F32[2]")",
              {{"x", "BF16", {2, 8}, 2}}),
  };
}

}  // namespace winnow::tests
