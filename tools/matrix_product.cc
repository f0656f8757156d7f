// SPDX-License-Identifier: Apache-2.0
// The machine's own matrix product: a large sgemm of OpenBLAS on the CPU, cuBLAS on a CUDA device.
#include "tools/matrix_product.h"

#include <vector>

#include <cblas.h>
#include <fmt/format.h>

#include "harness/device_product.h"
#include "tools/measure.h"

namespace winnow::tools {
namespace {

constexpr int kSize = 3072;
constexpr int kRepeats = 3;

MatrixProduct sgemm(int threads) {
  constexpr std::size_t elements = std::size_t{kSize} * kSize;
  const std::vector<float> a(elements, 0.5F);
  const std::vector<float> b(elements, 0.25F);
  std::vector<float> c(elements);
  openblas_set_num_threads(threads);
  const Timing timing = measure({}, kRepeats, [&] {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, kSize, kSize, kSize, 1, a.data(), kSize,
                b.data(), kSize, 0, c.data(), kSize);
  });
  return {2.0 * elements * kSize / timing.median,
          fmt::format("sgemm {}^3 of OpenBLAS on {} {}", kSize, threads,
                      threads == 1 ? "thread" : "threads")};
}

}  // namespace

std::optional<MatrixProduct> matrix_product(Device device, int threads) {
  if (device.kind == DeviceKind::cpu) return sgemm(threads);
  const std::optional<double> rate = harness::device_product_rate(device);
  if (!rate) return std::nullopt;
  return MatrixProduct{*rate, "bf16 8192^3 of cuBLAS"};
}

}  // namespace winnow::tools
