// SPDX-License-Identifier: Apache-2.0
#include "reference/linear.h"

// One loop, compiled for three kinds of x86 and chosen when the library is loaded; elsewhere, and
// with compilers that cannot, once. It makes the checks against this backend several times shorter.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define WINNOW_FOR_EACH_X86 \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WINNOW_FOR_EACH_X86
#endif

namespace winnow::reference {
namespace {

WINNOW_FOR_EACH_X86 double dot_of(const double* a, const double* b, std::size_t size) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::size_t d = 0; d < size; ++d) sum += a[d] * b[d];
  return sum;
}

WINNOW_FOR_EACH_X86 void add_to(double* target, double factor, const double* source,
                                std::size_t size) {
#pragma omp simd
  for (std::size_t d = 0; d < size; ++d) target[d] += factor * source[d];
}

}  // namespace

double dot(std::span<const double> a, std::span<const double> b) {
  return dot_of(a.data(), b.data(), a.size());
}

void add_scaled(std::span<double> target, double factor, std::span<const double> source) {
  add_to(target.data(), factor, source.data(), target.size());
}

}  // namespace winnow::reference
