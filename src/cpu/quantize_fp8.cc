// SPDX-License-Identifier: Apache-2.0
// Quantises rows to fp8 (e4m3), with the rounding of core/numerics.h.
#include <algorithm>
#include <bit>
#include <cmath>
#include <span>

#include "backend_operators.h"
#include "core/numerics.h"
#include "core/refusals.h"
#include "core/threads.h"
#include "cpu/plan.h"
#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/quantize_fp8.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/widen-inl.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::cpu::HWY_NAMESPACE {

float scale_of(std::span<const float> x, bool power_of_two) {
  constexpr std::uint32_t kInfinity = 0x7f800000u;
  constexpr float kMinAmax = 1e-4f;
  std::uint32_t amax = std::bit_cast<std::uint32_t>(kMinAmax);
  for (const float value : x) {
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(value) & 0x7fffffffu;
    amax = std::max(amax, magnitude < kInfinity ? magnitude : 0u);
  }
  const float scale = std::bit_cast<float>(amax) / kFloat8Max;
  if (!power_of_two) return scale;
  int exponent = 0;
  const float fraction = std::frexp(scale, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

/// The vector form of to_float8.
template <class D, class U = hn::RebindToUnsigned<D>>
HWY_INLINE hn::Vec<U> narrow_to_float8(D d, hn::Vec<D> x) {
  const U u;
  const auto bits = hn::BitCast(u, x);
  const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(u, 0x80u));
  const auto magnitude = hn::And(bits, hn::Set(u, 0x7fffffffu));
  const auto rebiased = hn::Sub(magnitude, hn::Set(u, 120u << 23));
  const auto is_odd = hn::And(hn::ShiftRight<20>(rebiased), hn::Set(u, 1u));
  const auto normal = hn::ShiftRight<20>(hn::Add(rebiased, hn::Add(hn::Set(u, 0x7ffffu), is_odd)));
  // Adding 2^14, whose last mantissa bit is 2^-9, rounds a denormal and leaves its bits at the end
  // of the mantissa.
  const auto base = hn::Set(d, 16384.0f);
  const auto denormal =
      hn::Sub(hn::BitCast(u, hn::Add(hn::BitCast(d, magnitude), base)), hn::BitCast(u, base));
  const auto is_denormal = hn::Lt(magnitude, hn::Set(u, 121u << 23));
  const auto finite = hn::Min(hn::IfThenElse(is_denormal, denormal, normal), hn::Set(u, 0x7eu));
  const auto is_nan = hn::Gt(magnitude, hn::Set(u, 0x7f800000u));
  return hn::Or(sign, hn::IfThenElse(is_nan, hn::Set(u, 0x7fu), finite));
}

void quantize_row(DType dtype, const void* x, std::span<float> wide, bool power_of_two, void* to,
                  float* scale) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> i32;
  const hn::Rebind<std::uint8_t, decltype(d)> u8;
  const auto count = static_cast<std::int64_t>(wide.size());
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto* const values = static_cast<std::uint8_t*>(to);
  widen_row(dtype, x, wide.data(), count);
  *scale = scale_of(wide, power_of_two);
  const auto divisor = hn::Set(d, *scale);
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto bits = narrow_to_float8(d, hn::Div(hn::LoadU(d, wide.data() + i), divisor));
    hn::StoreU(hn::DemoteTo(u8, hn::BitCast(i32, bits)), u8, values + i);
  }
  for (; i < count; ++i) values[i] = to_float8(wide[i] / *scale).bits;
}

}  // namespace winnow::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::cpu {
namespace {

std::size_t scratch_bytes(const QuantizeFp8& args) {
  return Scratch::bytes<float>(args.x.shape[args.x.rank - 1]);
}

/// Offset in elements of row [t, h], or of row t if the tensor has no heads.
std::int64_t offset_of(const Tensor& tensor, std::int64_t t, std::int64_t h, bool has_heads) {
  return t * tensor.stride[0] + (has_heads ? h * tensor.stride[1] : 0);
}

}  // namespace

HWY_EXPORT(quantize_row);

std::string why_not(const QuantizeFp8& args, const Execution& execution) {
  if (args.x.dtype == DType::f64) return refusal::no_f64;
  return over_limit(scratch_bytes(args), execution);
}

std::size_t workspace_bytes(const QuantizeFp8& args, const Execution& execution) {
  return all_lanes_bytes(execution, scratch_bytes(args));
}

void run(const QuantizeFp8& args, const Execution& execution) {
  const bool has_heads = args.x.rank == 3;
  const std::int64_t heads = has_heads ? args.x.shape[1] : 1;
  const std::int64_t dim = args.x.shape[args.x.rank - 1];
  const std::int64_t rows = args.x.shape[0] * heads;
  constexpr std::int64_t kRowsPerTask = 64;
  parallel_for(execution, ceil_div(rows, kRowsPerTask), scratch_bytes(args),
               [&](std::int64_t task, Scratch scratch) {
                 const std::span<float> wide = scratch.take<float>(dim);
                 for (std::int64_t i = task * kRowsPerTask;
                      i < std::min(rows, (task + 1) * kRowsPerTask); ++i) {
                   const std::int64_t t = i / heads;
                   const std::int64_t h = i % heads;
                   HWY_DYNAMIC_DISPATCH(quantize_row)
                   (args.x.dtype,
                    static_cast<const char*>(args.x.data) +
                        offset_of(args.x, t, h, has_heads) * element_bytes(args.x.dtype),
                    wide, args.power_of_two,
                    static_cast<char*>(args.values.data) + offset_of(args.values, t, h, has_heads),
                    static_cast<float*>(args.scale.data) + offset_of(args.scale, t, h, has_heads));
                 }
               });
}

}  // namespace winnow::cpu
#endif
