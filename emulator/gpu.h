// SPDX-License-Identifier: Apache-2.0
// The emulated GPU as the CUDA runtime sees it: memory, and kernels that are read from PTX and run
// to their end when they are launched.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace winnow::emulator {

/// What a kernel did wrong: an access outside of all allocations, a barrier that not all reach,
/// a deadlock. The message names the kernel, the line of PTX, the thread and the address.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// PTX that cannot be read, or an instruction that is not known.
struct PtxError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Memory of the device, which is memory of the host that kernels may touch. Exactly the bytes
/// asked for: one byte more is outside.
class Memory {
 public:
  /// Filled with a pattern that is no useful number. Throws std::bad_alloc beyond the capacity.
  void* allocate(std::size_t bytes);
  /// Returns false for an address that is not the begin of an allocation.
  bool free(void* address);
  /// The allocation that holds an address, as [begin, end); {nullptr, nullptr} if there is none.
  struct Range {
    std::byte* begin = nullptr;
    std::byte* end = nullptr;
  };
  Range find(const void* address) const;
  /// Lets kernels touch memory that is not the device's, such as pinned memory of the host.
  void add(void* begin, std::size_t bytes);
  void remove(void* begin);

  std::size_t used() const { return used_; }
  std::size_t capacity() const { return capacity_; }

 private:
  struct Block {
    std::size_t bytes;
    bool owned;
  };
  std::map<std::byte*, Block> blocks_;
  std::size_t used_ = 0;
  std::size_t capacity_ = std::size_t{8} << 30;
};

struct Function;    // one .entry, decoded
struct ModuleText;  // what stands where in PTX

/// The kernels of one PTX text.
class Module {
 public:
  explicit Module(std::string_view ptx);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  /// Null if there is none. `name` is the mangled name of an .entry. Decodes it when it is first
  /// asked for. Throws PtxError.
  const Function* find(std::string_view name) const;
  /// The address of a .global or .const variable, which is registered with the device's memory;
  /// null if there is none.
  void* variable(std::string_view name) const;

 private:
  std::unique_ptr<ModuleText> text_;
  mutable std::map<std::string, std::unique_ptr<Function>, std::less<>> functions_;
};

struct FunctionInfo {
  std::vector<std::size_t> parameter_offsets;  // in the bytes of all parameters
  std::vector<std::size_t> parameter_bytes;
  std::size_t all_parameter_bytes = 0;
  std::size_t static_shared_bytes = 0;
  int max_threads = 1024;                    // .maxntid
  std::array<unsigned, 3> cluster{1, 1, 1};  // .reqnctapercluster
};
const FunctionInfo& info(const Function& function);

struct Grid {
  std::array<unsigned, 3> blocks{1, 1, 1};
  std::array<unsigned, 3> threads{1, 1, 1};
  std::array<unsigned, 3> cluster{1, 1, 1};
  std::size_t dynamic_shared_bytes = 0;
};

/// Functions of the runtime that device code calls. `arguments`: the bytes of each parameter.
using DeviceCall = void (*)(const std::vector<std::uint64_t>& arguments);

/// One device. Calls are serialised by the runtime.
class Gpu {
 public:
  static Gpu& instance();

  static constexpr int kMultiprocessors = 4;  // few, but enough for two clusters

  Memory memory;
  /// By its name in PTX, such as cudaGraphSetConditional.
  std::map<std::string, DeviceCall, std::less<>> device_calls;

  /// Runs a kernel to its end. Throws KernelError. `parameters` are laid out as `info` says.
  void run(const Function& function, const Grid& grid, const std::byte* parameters);
};

}  // namespace winnow::emulator
