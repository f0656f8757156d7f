// SPDX-License-Identifier: Apache-2.0
#include "reference/linear.h"

// GCC compiles each loop for three x86 levels and picks one when the library is loaded; elsewhere
// there is one version. The tests against this backend run several times faster with it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define WINNOW_X86_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WINNOW_X86_CLONES
#endif

namespace winnow::reference {
namespace {

WINNOW_X86_CLONES double dot_loop(const double* a, const double* b, std::size_t size) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::size_t d = 0; d < size; ++d) sum += a[d] * b[d];
  return sum;
}

WINNOW_X86_CLONES void add_scaled_loop(double* target, double factor, const double* source,
                                       std::size_t size) {
#pragma omp simd
  for (std::size_t d = 0; d < size; ++d) target[d] += factor * source[d];
}

}  // namespace

double dot(std::span<const double> a, std::span<const double> b) {
  return dot_loop(a.data(), b.data(), a.size());
}

void add_scaled(std::span<double> target, double factor, std::span<const double> source) {
  add_scaled_loop(target.data(), factor, source.data(), target.size());
}

}  // namespace winnow::reference
