// SPDX-License-Identifier: Apache-2.0
// Arithmetic, lane by lane.
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <functional>
#include <limits>

#include "emulator/lanes.h"

namespace winnow::emulator {
namespace {

// Signed sums and products wrap.
template <class T>
using Wrapping =
    std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;

using Add = std::plus<>;
using Sub = std::minus<>;
struct Mul {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (sizeof(T) < 4)
      return static_cast<T>(std::uint32_t{a} * b);  // int would overflow
    else
      return a * b;
  }
};
struct Mad {
  template <class T>
  T operator()(T a, T b, T c) const {
    return Add()(Mul()(a, b), c);
  }
};
struct Fma {
  template <class T>
  T operator()(T a, T b, T c) const {
    return std::fma(a, b, c);
  }
};
using Neg = std::negate<>;
// A division by zero is not an error on the device.
struct Div {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      if (b == 0) return static_cast<T>(-1);
      if (std::is_signed_v<T> && b == T(-1)) return T(Wrapping<T>(0) - Wrapping<T>(a));
    }
    return a / b;
  }
};
struct Rem {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return a % b;
  }
};
struct Abs {
  template <class T>
  T operator()(T a) const {
    if constexpr (std::is_integral_v<T>)
      return a < 0 ? T(Wrapping<T>(0) - Wrapping<T>(a)) : a;
    else
      return std::fabs(a);
  }
};
// A NaN gives way to a number, unless asked otherwise.
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>)
      return std::min(a, b);
    else
      return a != a ? b : b != b ? a : a < b || (a == b && std::signbit(a)) ? a : b;
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>)
      return std::max(a, b);
    else
      return a != a ? b : b != b ? a : a > b || (a == b && !std::signbit(a)) ? a : b;
  }
};
struct MinNan {
  template <class T>
  T operator()(T a, T b) const {
    return a != a || b != b ? std::numeric_limits<T>::quiet_NaN() : Min()(a, b);
  }
};
struct MaxNan {
  template <class T>
  T operator()(T a, T b) const {
    return a != a || b != b ? std::numeric_limits<T>::quiet_NaN() : Max()(a, b);
  }
};
struct Rcp {
  template <class T>
  T operator()(T a) const {
    return 1 / a;
  }
};
struct Sqrt {
  template <class T>
  T operator()(T a) const {
    return std::sqrt(a);
  }
};
struct Rsqrt {
  template <class T>
  T operator()(T a) const {
    return 1 / std::sqrt(a);
  }
};
struct Ex2 {
  float operator()(float a) const { return std::exp2(a); }
};
struct Ex2Ftz {
  float operator()(float a) const {
    const float x = std::exp2(a);
    return x < std::numeric_limits<float>::min() ? 0 : x;
  }
};
struct Lg2 {
  float operator()(float a) const { return std::log2(a); }
};
/// Two halves of a word, each by F.
template <class F>
struct Halves {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const {
    return F()(static_cast<std::uint16_t>(a), static_cast<std::uint16_t>(b)) |
           static_cast<std::uint32_t>(
               F()(static_cast<std::uint16_t>(a >> 16), static_cast<std::uint16_t>(b >> 16)))
               << 16;
  }
};
template <int kInfinity>  // the pattern of infinity: 0x7f80 of bf16, 0x7c00 of f16
struct MaxNan16 {
  std::uint16_t operator()(std::uint16_t a, std::uint16_t b) const {
    if ((a & 0x7fff) > kInfinity || (b & 0x7fff) > kInfinity) return 0x7fff;
    const auto order = [](std::uint16_t x) { return x & 0x8000 ? -(x & 0x7fff) - 1 : int{x}; };
    return order(a) > order(b) ? a : b;
  }
};
struct Abs16 {
  std::uint32_t operator()(std::uint32_t a) const { return a & 0x7fff7fffu; }
};

/// Rounds as asked; the lanes' loop must not be vectorised by constants folded at compile time.
template <class T, class F, int kOperands>
Outcome rounded(Warp& warp, const Instruction& i, LaneMask mask) {
  const int before = std::fegetround();
  std::fesetround(static_cast<int>(i.variant));
  for_lanes(mask, [&](int lane) {
    volatile T a = warp.read<T>(i.operands[1], lane);
    volatile T b = warp.read<T>(i.operands[2], lane);
    volatile T d;
    if constexpr (kOperands == 2) {
      d = F()(T(a), T(b));
    } else {
      volatile T c = warp.read<T>(i.operands[3], lane);
      d = F()(T(a), T(b), T(c));
    }
    warp.write<T>(i.operands[0], lane, d);
  });
  std::fesetround(before);
  return Outcome::done;
}

int rounding_of(const Written& written) {
  if (written.has("rm")) return FE_DOWNWARD;
  if (written.has("rp")) return FE_UPWARD;
  if (written.has("rz")) return FE_TOWARDZERO;
  return FE_TONEAREST;
}

__extension__ using Int128 = __int128;
__extension__ using Uint128 = unsigned __int128;

/// Products of twice the width, or their high half, and a summand.
template <class T, bool kHigh, bool kAdds>
Outcome wide_product(Warp& warp, const Instruction& i, LaneMask mask) {
  using Wide =
      std::conditional_t<sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, Int128, Uint128>,
                         std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>>;
  for_lanes(mask, [&](int lane) {
    const Wide product =
        Wide{warp.read<T>(i.operands[1], lane)} * Wide{warp.read<T>(i.operands[2], lane)};
    if constexpr (kHigh) {
      T high = static_cast<T>(product >> (8 * sizeof(T)));
      if (kAdds)
        high =
            static_cast<T>(std::uint64_t(high) + std::uint64_t(warp.read<T>(i.operands[3], lane)));
      warp.write<T>(i.operands[0], lane, high);
    } else {
      using Result =
          std::conditional_t<sizeof(T) == 2,
                             std::conditional_t<std::is_signed_v<T>, std::int32_t, std::uint32_t>,
                             std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>>;
      Result result = static_cast<Result>(product);
      if (kAdds) {
        result = static_cast<Result>(std::uint64_t(result) +
                                     std::uint64_t(warp.read<Result>(i.operands[3], lane)));
      }
      warp.write<Result>(i.operands[0], lane, result);
    }
  });
  return Outcome::done;
}

template <class T>
Execute of_number(const Written& written, Instruction& instruction) {
  const std::string_view op = written.opcode[0];
  using W = Wrapping<T>;
  if constexpr (std::is_floating_point_v<T>) {
    const int rounding = rounding_of(written);
    if (rounding != FE_TONEAREST) {
      instruction.variant = rounding;
      if (op == "add") return rounded<T, Add, 2>;
      if (op == "sub") return rounded<T, Sub, 2>;
      if (op == "mul") return rounded<T, Mul, 2>;
      if (op == "div") return rounded<T, Div, 2>;
      if (op == "fma") return rounded<T, Fma, 3>;
      return nullptr;
    }
    if (op == "fma") return ternary<T, Fma>;
    if (op == "rcp") return unary<T, Rcp>;
    if (op == "sqrt") return unary<T, Sqrt>;
    if (op == "rsqrt") return unary<T, Rsqrt>;
    if (written.has("NaN")) {
      if (op == "min") return binary<T, MinNan>;
      if (op == "max") return binary<T, MaxNan>;
    }
    if constexpr (std::is_same_v<T, float>) {
      if (op == "ex2") return written.has("ftz") ? unary<T, Ex2Ftz> : unary<T, Ex2>;
      if (op == "lg2") return unary<T, Lg2>;
    }
    if (op == "mul") return binary<T, Mul>;
  } else {
    if (op == "rem") return binary<T, Rem>;
    if (op == "mul") {
      if (written.has("lo")) return binary<W, Mul>;
      if (written.has("hi")) return wide_product<T, true, false>;
      if (written.has("wide")) return wide_product<T, false, false>;
    }
    if (op == "mad") {
      if (written.has("lo")) return ternary<W, Mad>;
      if (written.has("hi")) return wide_product<T, true, true>;
      if (written.has("wide")) return wide_product<T, false, true>;
    }
  }
  if (op == "add") return binary<W, Add>;
  if (op == "sub") return binary<W, Sub>;
  if (op == "div") return binary<T, Div>;
  if (op == "neg") return unary<W, Neg>;
  if (op == "abs") return unary<T, Abs>;
  if (op == "min") return binary<T, Min>;
  if (op == "max") return binary<T, Max>;
  return nullptr;
}

}  // namespace

bool decode_arithmetic(const Written& written, Instruction& instruction) {
  const std::string_view op = written.opcode[0];
  const std::string_view type = written.last();
  Execute& execute = instruction.execute;
  if (written.has("cc") || written.has("sat") || op == "addc" || op == "subc") return false;
  if (type == "f16x2" || type == "bf16x2" || type == "u16x2") {
    if (op == "max" && type == "u16x2") execute = binary<std::uint32_t, Halves<Max>>;
    if (op == "min" && type == "u16x2") execute = binary<std::uint32_t, Halves<Min>>;
    if (op == "max" && written.has("NaN")) {
      execute = type == "f16x2" ? binary<std::uint32_t, Halves<MaxNan16<0x7c00>>>
                                : binary<std::uint32_t, Halves<MaxNan16<0x7f80>>>;
    }
    if (op == "abs" && type != "u16x2") execute = unary<std::uint32_t, Abs16>;
    return execute != nullptr;
  }
  with_type(type, [&](auto t) { execute = of_number<decltype(t)>(written, instruction); });
  return execute != nullptr;
}

}  // namespace winnow::emulator
