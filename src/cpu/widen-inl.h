// SPDX-License-Identifier: Apache-2.0
// Converts rows of bf16, fp16 or fp32 to fp32 and back, with the rounding of core/numerics.h.
// Included once per SIMD target.
#include <cassert>
#include <cstdint>
#include <cstring>

#include <hwy/highway.h>

#include "core/numerics.h"
#include "cpu/simd.h"
#include "winnow/tensor.h"

#if defined(WINNOW_CPU_WIDEN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_WIDEN_INL_H_
#undef WINNOW_CPU_WIDEN_INL_H_
#else
#define WINNOW_CPU_WIDEN_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Vector versions of to_float, to_bfloat16 and to_float16. Integer arithmetic keeps denormals,
// which the conversion instructions of some targets flush to zero.

template <class D, class U = hn::RebindToUnsigned<D>>
HWY_INLINE hn::Vec<D> widen_bits(D d, hn::Vec<U> bits, BFloat16) {
  return hn::BitCast(d, hn::ShiftLeft<16>(bits));
}

template <class D, class U = hn::RebindToUnsigned<D>>
HWY_INLINE hn::Vec<D> widen_bits(D d, hn::Vec<U> bits, Float16) {
  const U u;
  const auto magnitude = hn::And(bits, hn::Set(u, 0x7fffu));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(u, 0x8000u)));
  // Exponent 31 means infinity or NaN in fp16 and must become 255.
  const auto is_special = hn::Gt(magnitude, hn::Set(u, 0x7bffu));
  const auto normal =
      hn::Add(hn::ShiftLeft<13>(magnitude),
              hn::IfThenElse(is_special, hn::Set(u, 224u << 23), hn::Set(u, 112u << 23)));
  // A denormal is its mantissa in units of 2^-24.
  const auto mantissa = hn::ConvertTo(d, hn::BitCast(hn::RebindToSigned<D>(), magnitude));
  const auto denormal = hn::BitCast(u, hn::Mul(mantissa, hn::Set(d, 0x1p-24f)));
  const auto is_denormal = hn::Lt(magnitude, hn::Set(u, 0x400u));
  return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(is_denormal, denormal, normal)));
}

template <class U>
HWY_INLINE hn::Vec<U> round_shift_16(U u, hn::Vec<U> bits) {
  const auto is_odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u, 1u));
  return hn::ShiftRight<16>(hn::Add(bits, hn::Add(hn::Set(u, 0x7fffu), is_odd)));
}

template <class D, class U = hn::RebindToUnsigned<D>>
HWY_INLINE hn::Vec<U> narrow_bits(D, hn::Vec<D> x, BFloat16) {
  const U u;
  const auto bits = hn::BitCast(u, x);
  const auto nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(u, 0x40u));
  // Tests bits, since x != x is false for NaN on some targets.
  const auto is_nan = hn::Gt(hn::And(bits, hn::Set(u, 0x7fffffffu)), hn::Set(u, 0x7f800000u));
  return hn::IfThenElse(is_nan, nan, round_shift_16(u, bits));
}

template <class D, class U = hn::RebindToUnsigned<D>>
HWY_INLINE hn::Vec<U> narrow_bits(D d, hn::Vec<D> x, Float16) {
  const U u;
  const auto bits = hn::BitCast(u, x);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(u, 0x8000u));
  const auto magnitude = hn::And(bits, hn::Set(u, 0x7fffffffu));
  const auto is_odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(u, 1u));
  const auto rounded = hn::ShiftRight<13>(hn::Add(magnitude, hn::Add(hn::Set(u, 0xfffu), is_odd)));
  const auto normal = hn::Sub(rounded, hn::Set(u, 112u << 10));
  // Adding 1/2, whose last mantissa bit is 2^-24, rounds a denormal and leaves its bits at the end
  // of the mantissa.
  const auto half = hn::Set(d, 0.5f);
  const auto denormal =
      hn::Sub(hn::BitCast(u, hn::Add(hn::BitCast(d, magnitude), half)), hn::BitCast(u, half));
  const auto finite = hn::IfThenElse(hn::Lt(magnitude, hn::Set(u, 113u << 23)), denormal, normal);
  const auto infinite = hn::IfThenElse(hn::Gt(magnitude, hn::Set(u, 0x7f800000u)),
                                       hn::Set(u, 0x7e00u), hn::Set(u, 0x7c00u));
  // The largest float below 65520, from which on rounding gives infinity.
  const auto overflows = hn::Gt(magnitude, hn::Set(u, 0x477fefffu));
  return hn::Or(sign, hn::IfThenElse(overflows, infinite, finite));
}

inline float from_float(float x, float) { return x; }
inline BFloat16 from_float(float x, BFloat16) { return to_bfloat16(x); }
inline Float16 from_float(float x, Float16) { return to_float16(x); }

template <class T, class D>
HWY_INLINE hn::Vec<D> load_widened(D d, const T* from) {
  const hn::Rebind<std::uint16_t, D> u16;
  const hn::RebindToUnsigned<D> u32;
  const auto bits = hn::LoadU(u16, reinterpret_cast<const std::uint16_t*>(from));
  return widen_bits(d, hn::PromoteTo(u32, bits), T{});
}
template <>
HWY_INLINE hn::Vec<hn::ScalableTag<float>> load_widened(hn::ScalableTag<float> d,
                                                        const float* from) {
  return hn::LoadU(d, from);
}

template <class T, class D>
HWY_INLINE void store_narrowed(D d, hn::Vec<D> x, T* to) {
  const hn::Rebind<std::uint16_t, D> u16;
  const hn::RebindToSigned<D> i32;
  const auto bits = hn::BitCast(i32, narrow_bits(d, x, T{}));
  hn::StoreU(hn::DemoteTo(u16, bits), u16, reinterpret_cast<std::uint16_t*>(to));
}
template <>
HWY_INLINE void store_narrowed(hn::ScalableTag<float> d, hn::Vec<hn::ScalableTag<float>> x,
                               float* to) {
  hn::StoreU(x, d, to);
}

template <class T>
void widen_row(const T* from, float* to, std::int64_t count) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(load_widened<T>(d, from + i), d, to + i);
  for (; i < count; ++i) to[i] = static_cast<float>(to_double(from[i]));
}

template <class T>
void narrow_row(const float* from, float factor, T* to, std::int64_t count) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto factors = hn::Set(d, factor);
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    store_narrowed<T>(d, hn::Mul(hn::LoadU(d, from + i), factors), to + i);
  }
  for (; i < count; ++i) {
    // Copied, since rows of bf16 may be objects of another type: pairs.
    const T rounded = from_float(from[i] * factor, T{});
    std::memcpy(to + i, &rounded, sizeof(T));
  }
}

/// Converts `count` elements of type `dtype` (bf16, f16 or f32) to fp32. Reads nothing after them.
inline void widen_row(DType dtype, const void* from, float* to, std::int64_t count) {
  switch (dtype) {
    case DType::bf16:
      return widen_row(static_cast<const BFloat16*>(from), to, count);
    case DType::f16:
      return widen_row(static_cast<const Float16*>(from), to, count);
    case DType::f32:
      std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
      return;
    default:
      assert(false);
  }
}

/// to[i] = factor * from[i], rounded once to nearest even. Writes nothing after `count` elements.
inline void narrow_row(DType dtype, const float* from, float factor, void* to, std::int64_t count) {
  switch (dtype) {
    case DType::bf16:
      return narrow_row(from, factor, static_cast<BFloat16*>(to), count);
    case DType::f16:
      return narrow_row(from, factor, static_cast<Float16*>(to), count);
    case DType::f32:
      return narrow_row(from, factor, static_cast<float*>(to), count);
    default:
      assert(false);
  }
}

/// The address of the row at `index` in the leading dimensions.
template <class... Index>
void* row_of(const Tensor& tensor, Index... index) {
  std::int64_t offset = 0;
  int i = 0;
  ((offset += static_cast<std::int64_t>(index) * tensor.stride[i++]), ...);
  return static_cast<char*>(tensor.data) + offset * element_bytes(tensor.dtype);
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
