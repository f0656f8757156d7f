// SPDX-License-Identifier: Apache-2.0
// Checks and makes launches of kernels.
#include "emulator/runtime/launch.h"

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "emulator/runtime/capture.h"
#include "emulator/runtime/device.h"
#include "emulator/runtime/errors.h"
#include "emulator/runtime/registry.h"

namespace winnow::emulator {
namespace {

std::array<unsigned, 3> of(const dim3& sizes) { return {sizes.x, sizes.y, sizes.z}; }

std::uint64_t product(const std::array<unsigned, 3>& sizes) {
  return std::uint64_t{sizes[0]} * sizes[1] * sizes[2];
}

/// The launch as the device takes it.
Grid checked(const Kernel& kernel, const FunctionInfo& info, const LaunchShape& shape) {
  Grid grid{.blocks = of(shape.grid),
            .threads = of(shape.block),
            .cluster = shape.cluster[0] == 0 ? info.cluster : shape.cluster,
            .dynamic_shared_bytes = shape.shared_bytes};
  const std::uint64_t threads = product(grid.threads);
  require(threads > 0 && threads <= kMostThreads && std::cmp_less_equal(threads, info.max_threads),
          cudaErrorInvalidConfiguration);
  for (std::size_t i = 0; i < 3; ++i) {
    require(std::cmp_less_equal(grid.threads[i], kMostThreadsAlong[i]) && grid.blocks[i] > 0 &&
                std::cmp_less_equal(grid.blocks[i], kMostBlocksAlong[i]),
            cudaErrorInvalidConfiguration);
    require(grid.cluster[i] > 0 && grid.blocks[i] % grid.cluster[i] == 0,
            cudaErrorInvalidClusterSize);
  }
  require(product(grid.cluster) <= kMostBlocksOfCluster, cudaErrorInvalidClusterSize);
  require(product(grid.cluster) == 1 || model().major >= 9, cudaErrorNotSupported);
  // The blocks of a cluster that run together are neighbours along x.
  require(grid.cluster[1] == 1 && grid.cluster[2] == 1, cudaErrorNotSupported);
  require(shape.shared_bytes <= kernel.most_dynamic_bytes() &&
          shape.shared_bytes + info.static_shared_bytes <= model().shared_bytes);
  return grid;
}

/// Tensor maps among the parameters are aligned to 64 bytes.
struct alignas(128) Line {
  std::byte bytes[128];
};

struct Launch {
  const Function* function;
  Grid grid;
  std::vector<Line> lines;  // of parameters

  std::byte* parameters() { return lines.data()->bytes; }
};

void run(Launch& launch) {
  try {
    LockedGpu()->run(*launch.function, launch.grid, launch.parameters());
  } catch (const std::exception& error) {
    break_device(cudaErrorLaunchFailure, error.what());
  }
}

/// Attributes of a launch that change what it does; the others are about time.
LaunchShape shape_of(const cudaLaunchConfig_t& config) {
  LaunchShape shape{
      .grid = config.gridDim, .block = config.blockDim, .shared_bytes = config.dynamicSmemBytes};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id != cudaLaunchAttributeClusterDimension) continue;
    const auto& cluster = attribute.val.clusterDim;
    shape.cluster = {cluster.x, cluster.y, cluster.z};
  }
  return shape;
}

}  // namespace

Action kernel_action(const void* handle, const LaunchShape& shape, void* const* parameters) {
  const Kernel& kernel = find_kernel(handle);
  const Function& function = kernel.function();
  const FunctionInfo& about = info(function);
  auto launch = std::make_shared<Launch>();
  launch->function = &function;
  launch->grid = checked(kernel, about, shape);
  launch->lines.resize(about.all_parameter_bytes / sizeof(Line) + 1);
  for (std::size_t i = 0; i < about.parameter_offsets.size(); ++i) {
    std::memcpy(launch->parameters() + about.parameter_offsets[i], parameters[i],
                about.parameter_bytes[i]);
  }
  return {.run = [launch = std::move(launch)] { run(*launch); }, .is_kernel = true};
}

}  // namespace winnow::emulator

using namespace winnow::emulator;

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** parameters) {
  return call([&] {
    require(config != nullptr);
    enqueue(find_stream(config->stream), kernel_action(kernel, shape_of(*config), parameters));
  });
}
