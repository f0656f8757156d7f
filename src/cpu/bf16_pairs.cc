// SPDX-License-Identifier: Apache-2.0
// Whether the CPU, on the SIMD target that is chosen at run time, multiplies pairs of bf16.
#include "cpu/bf16_pairs.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/refusals.h"
#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/bf16_pairs.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace {

bool target_multiplies_pairs() { return kMultipliesPairs; }

}  // namespace
}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::cpu {
namespace {

HWY_EXPORT(target_multiplies_pairs);

bool has_instructions() {
#if HWY_ARCH_X86
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

}  // namespace

bool can_multiply_pairs() {
  return HWY_DYNAMIC_DISPATCH(target_multiplies_pairs)() && has_instructions();
}

std::string why_not_pairs_of(DType dtype, std::initializer_list<DType> taken) {
  if (std::find(taken.begin(), taken.end(), dtype) == taken.end()) {
    std::string names;
    for (const DType each : taken)
      names += (names.empty() ? "" : " and ") + std::string(name(each));
    return fmt::format(refusal::takes_dtypes, names);
  }
  return can_multiply_pairs() ? std::string() : refusal::needs_avx512_bf16;
}

}  // namespace winnow::cpu
#endif
