// SPDX-License-Identifier: Apache-2.0
// Vectors of the elements of elements.h, and how they are multiplied. Included once per SIMD
// target.
#include <cstdint>

#include <hwy/highway.h>

#include "cpu/elements.h"
#include "cpu/simd.h"

#if defined(WINNOW_CPU_ELEMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_ELEMENTS_INL_H_
#undef WINNOW_CPU_ELEMENTS_INL_H_
#else
#define WINNOW_CPU_ELEMENTS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVector = hn::Vec<FloatTag>;
using PairTag = hn::RebindToUnsigned<FloatTag>;
using PairVector = hn::Vec<PairTag>;
inline constexpr std::int64_t kLanes = HWY_LANES(float);

/// Whether the target's instructions multiply pairs, if the CPU has AVX512-BF16 in addition
/// (cpu/bf16_pairs.h). Highway has no target of its own for them in the versions that distributions
/// ship.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
inline constexpr bool kMultipliesPairs = true;
#else
inline constexpr bool kMultipliesPairs = false;
#endif

template <class Element>
struct VectorOf;
template <>
struct VectorOf<float> {
  using Type = FloatVector;
};
template <>
struct VectorOf<Bf16Pair> {
  using Type = PairVector;
};
template <class Element>
using ElementVector = typename VectorOf<Element>::Type;

HWY_INLINE FloatVector load_elements(const float* from) { return hn::LoadU(FloatTag(), from); }
HWY_INLINE PairVector load_elements(const Bf16Pair* from) {
  return hn::LoadU(PairTag(), &from->bits);
}

HWY_INLINE FloatVector broadcast(float element) { return hn::Set(FloatTag(), element); }
HWY_INLINE PairVector broadcast(Bf16Pair element) { return hn::Set(PairTag(), element.bits); }

HWY_INLINE FloatVector multiply_add(FloatVector a, FloatVector b, FloatVector sum) {
  return hn::MulAdd(a, b, sum);
}
/// sum + a.first * b.first + a.second * b.second. Denormal operands and results count as 0.
HWY_INLINE FloatVector multiply_add(PairVector a, PairVector b, FloatVector sum) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
#else
  (void)a, (void)b;
  HWY_DASSERT(false);
#endif
  return sum;
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
