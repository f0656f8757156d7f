// SPDX-License-Identifier: Apache-2.0
// Binaries: PTX that is decoded when a kernel in it is first used.
#include <cstdio>

#include "emulator/runtime/device.h"
#include "emulator/runtime/errors.h"
#include "emulator/runtime/fat_binary.h"
#include "emulator/runtime/registry.h"

namespace winnow::emulator {
namespace {

cudaError_t complain(const PtxError& error) {
  std::fprintf(stderr, "emulated GPU: %s\n", error.what());
  return cudaErrorInvalidPtx;
}

}  // namespace

const Module& Binary::module() {
  if (module_ != nullptr) return *module_;
  require(failure_ == cudaSuccess, failure_);
  const std::optional<PtxText> ptx = find_ptx(wrapper_);
  if (!ptx) fail(failure_ = cudaErrorNoKernelImageForDevice);
  try {
    const LockedGpu gpu;  // its variables are memory
    module_ = std::make_unique<Module>(ptx->text);
  } catch (const PtxError& error) {
    fail(failure_ = complain(error));
  }
  capability_ = ptx->capability;
  return *module_;
}

Binary::Decoded Binary::decode(const std::string& name) {
  const Module& all = module();
  try {
    const LockedGpu gpu;
    const Function* const found = all.find(name);
    return {found, found == nullptr ? cudaErrorInvalidDeviceFunction : cudaSuccess};
  } catch (const PtxError& error) {
    return {nullptr, complain(error)};
  }
}

const Function& Binary::function(const std::string& name) {
  const std::lock_guard lock(mutex_);
  auto found = functions_.find(name);
  if (found == functions_.end()) found = functions_.emplace(name, decode(name)).first;
  require(found->second.failure == cudaSuccess, found->second.failure);
  return *found->second.function;
}

int Binary::capability() {
  const std::lock_guard lock(mutex_);
  module();
  return capability_;
}

}  // namespace winnow::emulator
