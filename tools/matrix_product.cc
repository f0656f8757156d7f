// SPDX-License-Identifier: Apache-2.0
// The machine's own matrix product: a large sgemm of OpenBLAS on the CPU, cuBLAS on a CUDA device.
#include "tools/matrix_product.h"

#include <vector>

#include <dlfcn.h>
#include <fmt/format.h>

#include "harness/device_product.h"
#include "tools/timing.h"

namespace winnow::tools {
namespace {

constexpr int kSize = 3072;
constexpr int kRepeats = 3;

// OpenBLAS is opened at run time, as cuBLAS is: the two names in use, as its header declares them.
constexpr int kRowMajor = 101;
constexpr int kNoTranspose = 111;
using SetThreads = void (*)(int threads);
using Sgemm = void (*)(int order, int transpose_a, int transpose_b, int m, int n, int k,
                       float alpha, const float* a, int lda, const float* b, int ldb, float beta,
                       float* c, int ldc);

std::optional<MatrixProduct> sgemm(int threads) {
  void* const library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::nullopt;
  const auto set_threads = reinterpret_cast<SetThreads>(dlsym(library, "openblas_set_num_threads"));
  const auto multiply = reinterpret_cast<Sgemm>(dlsym(library, "cblas_sgemm"));
  if (set_threads == nullptr || multiply == nullptr) return std::nullopt;

  constexpr std::size_t elements = std::size_t{kSize} * kSize;
  const std::vector<float> a(elements, 0.5F);
  const std::vector<float> b(elements, 0.25F);
  std::vector<float> c(elements);
  set_threads(threads);
  const Timing timing = measure({}, kRepeats, [&] {
    multiply(kRowMajor, kNoTranspose, kNoTranspose, kSize, kSize, kSize, 1, a.data(), kSize,
             b.data(), kSize, 0, c.data(), kSize);
  });
  return MatrixProduct{2.0 * elements * kSize / timing.median,
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
