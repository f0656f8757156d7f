// SPDX-License-Identifier: Apache-2.0
// Matrix products of a warp (mma.sync) and of a warpgroup (wgmma), and the copies of their
// fragments.
//
// Sums are those of tensor cores in kind: the products of one instruction and the accumulator are
// added almost exactly, and the sum is cut to fp32, not rounded; fp8 keeps 13 bits behind the
// largest term.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "emulator/lanes.h"
#include "emulator/proxies.h"
#include "emulator/small_floats.h"

namespace winnow::emulator {
namespace {

enum class Element { bf16, f16, e4m3 };

float number(Element type, std::uint16_t bits) {
  switch (type) {
    case Element::bf16:
      return from_bf16(bits);
    case Element::f16:
      return from_f16(bits);
    default:
      return from_e4m3(static_cast<std::uint8_t>(bits));
  }
}

/// Cuts a sum to fp32.
float cut(double x) {
  constexpr std::uint64_t kBeyondFp32 = (std::uint64_t{1} << 29) - 1;
  return static_cast<float>(std::bit_cast<double>(std::bit_cast<std::uint64_t>(x) & ~kBeyondFp32));
}

/// c[m, n] += sum over k of a[m, k] b[k, n], for 16 rows.
constexpr int kRows = 16;
void multiply(const float* a, const double* b, int columns, int depth, double* c) {
  constexpr int kAtOnce = 8;  // columns: a multiple of all shapes
  for (int row = 0; row < kRows; ++row) {
    for (int first = 0; first < columns; first += kAtOnce) {
      double* const to = c + row * columns + first;
      double sums[kAtOnce];
      std::copy_n(to, kAtOnce, sums);
      for (int k = 0; k < depth; ++k) {
        const double factor = a[row * depth + k];
        const double* const other = b + k * columns + first;
        for (int n = 0; n < kAtOnce; ++n) sums[n] += factor * other[n];
      }
      std::copy_n(sums, kAtOnce, to);
    }
  }
}

/// The same with terms cut to 13 bits behind the largest one's first.
void multiply_e4m3(const float* a, const double* b, int columns, int depth, double* c) {
  for (int row = 0; row < kRows; ++row) {
    for (int n = 0; n < columns; ++n) {
      double& sum = c[row * columns + n];
      double largest = std::fabs(sum);
      bool is_finite = std::isfinite(sum);
      for (int k = 0; k < depth; ++k) {
        const double term = a[row * depth + k] * b[k * columns + n];
        largest = std::max(largest, std::fabs(term));
        is_finite = is_finite && std::isfinite(term);
      }
      if (largest == 0 && is_finite) continue;
      const int quantum = is_finite ? std::ilogb(largest) - 13 : 0;
      const auto whole = [&](double x) {
        return is_finite ? std::ldexp(std::trunc(std::ldexp(x, -quantum)), quantum) : x;
      };
      double total = whole(sum);
      for (int k = 0; k < depth; ++k) {
        total += whole(a[row * depth + k] * b[k * columns + n]);
      }
      sum = total;
    }
  }
}

// Of a fragment of 16 rows, a lane holds pairs of columns: register i is row lane / 4 + 8 * (i %
// 2), columns lane % 4 * 2 + 8 * (i / 2) and the next.
void read_a_fragment(const Warp& warp, const Operand* registers, Element type, float* a) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t pair = warp.read<std::uint32_t>(registers[i], lane);
      const int row = lane / 4 + 8 * (i % 2);
      const int column = lane % 4 * 2 + 8 * (i / 2);
      a[row * 16 + column] = number(type, static_cast<std::uint16_t>(pair));
      a[row * 16 + column + 1] = number(type, static_cast<std::uint16_t>(pair >> 16));
    }
  }
}

// Of an accumulator of 16 rows, a lane holds for every eight columns two neighbours in row lane /
// 4, and the two below them in row lane / 4 + 8.
int place_in_accumulator(int lane, int i, int columns) {
  const int row = lane / 4 + 8 * (i / 2 % 2);
  return row * columns + i / 4 * 8 + lane % 4 * 2 + i % 2;
}
void read_accumulator(const Warp& warp, const Operand* registers, int columns, double* c) {
  for (int i = 0; i < columns / 2; ++i) {
    const std::uint32_t* const from = source<float>(warp, registers[i]);
    for (int lane = 0; lane < kLanes; ++lane) {
      c[place_in_accumulator(lane, i, columns)] = from_slot<float>(from[lane]);
    }
  }
}
void write_accumulator(Warp& warp, const Operand* registers, int columns, const double* c) {
  for (int i = 0; i < columns / 2; ++i) {
    std::uint32_t* const to = target<float>(warp, registers[i]);
    for (int lane = 0; lane < kLanes; ++lane) {
      to[lane] = to_slot<float>(cut(c[place_in_accumulator(lane, i, columns)]));
    }
  }
}

/// mma.sync.m16n8k16 d, a, b, c
Outcome multiply_in_warp(Warp& warp, const Instruction& i, LaneMask) {
  const auto type = static_cast<Element>(i.variant);
  const Operand* const d = i.operands;
  float a[kRows * 16];
  double b[16 * 8], c[kRows * 8];
  read_a_fragment(warp, d + 4, type, a);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int j = 0; j < 2; ++j) {
      const std::uint32_t pair = warp.read<std::uint32_t>(d[8 + j], lane);
      const int k = lane % 4 * 2 + 8 * j;
      b[k * 8 + lane / 4] = number(type, static_cast<std::uint16_t>(pair));
      b[(k + 1) * 8 + lane / 4] = number(type, static_cast<std::uint16_t>(pair >> 16));
    }
  }
  read_accumulator(warp, d + 10, 8, c);
  multiply(a, b, 8, 16, c);
  write_accumulator(warp, d, 8, c);
  return Outcome::done;
}

/// Lane 8i + j gives the address of row j of matrix i; of each matrix a lane holds two neighbours
/// of row lane / 4, or of column lane / 4 if it is transposed.
template <bool kLoads>
Outcome copy_matrices(Warp& warp, const Instruction& i, LaneMask) {
  const bool transposed = i.variant != 0;
  const int matrices = i.count - 1;
  const Operand& address = i.operands[kLoads ? matrices : 0];
  const Operand* const registers = i.operands + (kLoads ? 0 : 1);
  for (int matrix = 0; matrix < matrices; ++matrix) {
    std::byte* rows[8];
    for (int row = 0; row < 8; ++row) {
      const int lane = 8 * matrix + row;
      const std::uint64_t at = warp.address(address, lane);
      warp.check_alignment(at, 16, lane);
      rows[row] = warp.shared(at, 16, lane);
      if constexpr (kLoads) {
        note_read(warp, i, rows[row]);
      } else {
        note_write(warp, i, rows[row]);
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      std::uint32_t word = kLoads ? 0 : warp.read<std::uint32_t>(registers[matrix], lane);
      for (int half = 0; half < 2; ++half) {
        const int row = transposed ? lane % 4 * 2 + half : lane / 4;
        const int column = transposed ? lane / 4 : lane % 4 * 2 + half;
        std::byte* const element = rows[row] + 2 * column;
        if constexpr (kLoads) {
          std::uint16_t bits;
          std::memcpy(&bits, element, sizeof bits);
          word |= std::uint32_t{bits} << (16 * half);
        } else {
          const auto bits = static_cast<std::uint16_t>(word >> (16 * half));
          std::memcpy(element, &bits, sizeof bits);
        }
      }
      if (kLoads) warp.write<std::uint32_t>(registers[matrix], lane, word);
    }
  }
  return Outcome::done;
}

// ---- wgmma

/// An operand in shared memory: `rows` of M or N, 32 bytes of K each.
struct SharedOperand {
  std::uint64_t descriptor = 0;
  int first_row = 0;
  int rows = 0;
  bool mn_major = false;
};

/// Calls f with each of the pieces of 16 bytes that an operand consists of. K-major: two a row;
/// MN-major, elements of two bytes: one for every eight rows and each of 16 elements of K.
template <class F>
void for_pieces(const Warp& warp, const SharedOperand& operand, F f) {
  const std::uint64_t d = operand.descriptor;
  constexpr int kFieldBits = 14;
  const auto field = [&](int bit) { return ((d >> bit) & ((1 << kFieldBits) - 1)) << 4; };
  const std::uint64_t start = field(0), leading = field(16), stride = field(32);
  if (d >> 62 != 1 || ((d >> 49) & 7) != 0) warp.fail("a descriptor without the 128-byte swizzle");
  const auto visit = [&](std::uint64_t address) {
    address ^= (address >> 3) & 0x70;  // the swizzle
    f(warp.shared(address, 16, -1));
  };
  if (operand.mn_major) {
    for (int k = 0; k < 16; ++k) {
      for (int row = operand.first_row; row < operand.first_row + operand.rows; row += 8) {
        visit(start + static_cast<std::uint64_t>(row / 64) * leading +
              static_cast<std::uint64_t>(k / 8) * stride +
              static_cast<std::uint64_t>(k % 8 * 128 + row % 64 * 2));
      }
    }
  } else {
    for (int row = operand.first_row; row < operand.first_row + operand.rows; ++row) {
      for (int piece = 0; piece < 2; ++piece) {
        visit(start + static_cast<std::uint64_t>(row / 8) * stride +
              static_cast<std::uint64_t>(row % 8 * 128 + piece * 16));
      }
    }
  }
}

std::vector<std::byte> read_pieces(const Warp& warp, const SharedOperand& operand) {
  std::vector<std::byte> pieces(static_cast<std::size_t>(operand.rows) * 32);
  std::byte* to = pieces.data();
  for_pieces(warp, operand, [&](const std::byte* from) {
    std::memcpy(to, from, 16);
    to += 16;
  });
  return pieces;
}

void check_fenced(const Warp& warp, const SharedOperand& operand) {
  for_pieces(warp, operand,
             [&](const std::byte* from) { check_writes_fenced(warp, -1, from, 16); });
}

std::uint64_t hash(std::span<const std::byte> bytes) {
  std::uint64_t h = 0xcbf29ce484222325u;
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data() + i, sizeof word);
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    h ^= h >> 29;
  }
  return h;
}

/// The numbers of an operand, [rows, depth] or, transposed, [depth, rows].
template <Element kType, class Number>
void widen(const std::vector<std::byte>& pieces, const SharedOperand& operand, bool transposed,
           Number* to) {
  constexpr int kDepth = kType == Element::e4m3 ? 32 : 16;
  for (int row = 0; row < operand.rows; ++row) {
    for (int k = 0; k < kDepth; ++k) {
      const int element = operand.mn_major ? k * operand.rows + row : row * kDepth + k;
      std::uint16_t bits = 0;
      if constexpr (kType == Element::e4m3) {
        bits = static_cast<std::uint8_t>(pieces[static_cast<std::size_t>(element)]);
      } else {
        std::memcpy(&bits, pieces.data() + 2 * element, 2);
      }
      to[transposed ? k * operand.rows + row : row * kDepth + k] = number(kType, bits);
    }
  }
}
template <class Number>
void widen(Element type, const std::vector<std::byte>& pieces, const SharedOperand& operand,
           bool transposed, Number* to) {
  switch (type) {
    case Element::bf16:
      return widen<Element::bf16>(pieces, operand, transposed, to);
    case Element::f16:
      return widen<Element::f16>(pieces, operand, transposed, to);
    default:
      return widen<Element::e4m3>(pieces, operand, transposed, to);
  }
}

/// B as numbers, [depth, columns]. The warps of a warpgroup, and often several products, share it.
const std::vector<double>& numbers_of_b(Element type, const std::vector<std::byte>& pieces,
                                        const SharedOperand& operand, std::uint64_t hash) {
  constexpr std::size_t kMost = 512;
  thread_local std::unordered_map<std::uint64_t, std::vector<double>> known;
  const std::uint64_t key =
      hash ^ (static_cast<std::uint64_t>(type) << 1 | operand.mn_major) * 0x9e3779b97f4a7c15u;
  const auto found = known.find(key);
  const std::size_t size = pieces.size() / (type == Element::e4m3 ? 1 : 2);
  if (found != known.end() && found->second.size() == size) return found->second;
  if (known.size() >= kMost) known.clear();
  std::vector<double>& made = known[key];
  made.resize(size);
  widen(type, pieces, operand, true, made.data());
  return made;
}

// How the shape of a product stands in Instruction::variant.
struct Shape {
  Element type;
  int columns;
  bool a_in_registers;
  bool a_mn_major, b_mn_major;

  std::int64_t pack() const {
    return static_cast<int>(type) | columns << 4 | a_in_registers << 16 | a_mn_major << 17 |
           b_mn_major << 18;
  }
  static Shape unpack(std::int64_t v) {
    return {static_cast<Element>(v & 15), static_cast<int>((v >> 4) & 0xfff), ((v >> 16) & 1) != 0,
            ((v >> 17) & 1) != 0, ((v >> 18) & 1) != 0};
  }
  SharedOperand a(std::uint64_t descriptor, int warp) const {
    return {descriptor, warp % 4 * kRows, kRows, a_mn_major};
  }
  SharedOperand b(std::uint64_t descriptor) const { return {descriptor, 0, columns, b_mn_major}; }
};

/// wgmma.mma_async d, a, b, p, ...: what this warp has of the product of its warpgroup. It is made
/// at once; that its operands in shared memory stay as they are until it is waited for is checked.
Outcome multiply_in_warpgroup(Warp& warp, const Instruction& i, LaneMask) {
  const Shape shape = Shape::unpack(i.variant);
  const int depth = shape.type == Element::e4m3 ? 32 : 16;
  const int accumulators = shape.columns / 2;
  const Operand* const d = i.operands;
  const Operand* const a_operand = d + accumulators;
  const Operand* const b_operand = a_operand + (shape.a_in_registers ? 4 : 1);
  const bool accumulates = warp.read_predicate(b_operand[1]) != 0;

  Warp::Product product;
  product.shape = i.variant;
  product.line = i.line;
  product.group = warp.product_group;
  std::vector<float> a(kRows * depth);
  if (shape.a_in_registers) {
    read_a_fragment(warp, a_operand, shape.type, a.data());
  } else {
    product.a = warp.read<std::uint64_t>(*a_operand, 0);
    const SharedOperand operand = shape.a(product.a, warp.index);
    check_fenced(warp, operand);
    const auto pieces = read_pieces(warp, operand);
    product.a_hash = hash(pieces);
    widen(shape.type, pieces, operand, false, a.data());
  }
  product.b = warp.read<std::uint64_t>(*b_operand, 0);
  const SharedOperand operand = shape.b(product.b);
  check_fenced(warp, operand);
  const auto pieces = read_pieces(warp, operand);
  product.b_hash = hash(pieces);
  const std::vector<double>& b = numbers_of_b(shape.type, pieces, operand, product.b_hash);

  std::vector<double> c(static_cast<std::size_t>(kRows) * shape.columns);
  if (accumulates) read_accumulator(warp, d, shape.columns, c.data());
  const auto run = shape.type == Element::e4m3 ? multiply_e4m3 : multiply;
  run(a.data(), b.data(), shape.columns, depth, c.data());
  write_accumulator(warp, d, shape.columns, c.data());
  warp.products.push_back(product);
  return Outcome::done;
}

Outcome commit_products(Warp& warp, const Instruction&, LaneMask) {
  ++warp.product_group;
  return Outcome::done;
}

Outcome wait_for_products(Warp& warp, const Instruction& i, LaneMask) {
  const int pending = static_cast<int>(i.operands[0].value);
  while (!warp.products.empty() && warp.products.front().group < warp.product_group - pending) {
    const Warp::Product product = warp.products.front();
    warp.products.pop_front();
    constexpr std::uint32_t kLooks = 4;  // one of so many products is looked at, to save time
    if (warp.block.grid.random(kLooks) != 0) continue;
    const Shape shape = Shape::unpack(product.shape);
    const bool a_changed =
        !shape.a_in_registers &&
        hash(read_pieces(warp, shape.a(product.a, warp.index))) != product.a_hash;
    const bool b_changed = hash(read_pieces(warp, shape.b(product.b))) != product.b_hash;
    if (a_changed || b_changed) {
      warp.fail(std::string("shared memory of operand ") + (a_changed ? "A" : "B") +
                " was overwritten before the wgmma of line " + std::to_string(product.line) +
                " was waited for");
    }
  }
  return Outcome::done;
}

/// The type of both operands, if it is one of those known and sums are fp32.
std::optional<Element> element_of(const Written& written) {
  if (!written.has("f32")) return std::nullopt;
  for (std::size_t i = 1; i + 1 < written.opcode.size(); ++i) {
    if (written.opcode[i] != written.opcode[i + 1]) continue;
    if (written.opcode[i] == "bf16") return Element::bf16;
    if (written.opcode[i] == "f16") return Element::f16;
    if (written.opcode[i] == "e4m3") return Element::e4m3;
  }
  return std::nullopt;
}

bool decode_wgmma(const Written& written, Instruction& instruction) {
  if (written.has("fence")) instruction.execute = do_nothing;
  if (written.has("commit_group")) instruction.execute = commit_products;
  if (written.has("wait_group")) instruction.execute = wait_for_products;
  if (!written.has("mma_async")) return instruction.execute != nullptr;
  const auto immediate = [&](std::size_t operand) {
    return operand < written.operands.size() ? written.operands[operand][0].value : 0;
  };
  Shape shape{};
  const std::optional<Element> type = element_of(written);
  if (!type) return false;
  shape.type = *type;
  shape.columns = static_cast<int>(written.operands[0].size()) * 2;
  shape.a_in_registers = written.operands[1].size() == 4;
  if (immediate(4) != 1 || immediate(5) != 1) return false;  // negated operands
  if (shape.a_in_registers && shape.type == Element::e4m3) return false;
  shape.a_mn_major = !shape.a_in_registers && immediate(6) != 0;
  shape.b_mn_major = immediate(shape.a_in_registers ? 6 : 7) != 0;
  instruction.variant = shape.pack();
  instruction.execute = multiply_in_warpgroup;
  return true;
}

}  // namespace

bool decode_tensor_core(const Written& written, Instruction& instruction) {
  const std::string_view op = written.opcode[0];
  if (op == "mma") {
    const std::optional<Element> type = element_of(written);
    if (!written.has("m16n8k16") || !type || type == Element::e4m3) return false;
    instruction.variant = static_cast<std::int64_t>(*type);
    instruction.execute = multiply_in_warp;
  } else if (op == "ldmatrix" || op == "stmatrix") {
    instruction.variant = written.has("trans") ? 1 : 0;
    instruction.execute = op == "ldmatrix" ? copy_matrices<true> : copy_matrices<false>;
  } else if (op != "wgmma" || !decode_wgmma(written, instruction)) {
    return false;
  }
  instruction.is_aligned = true;
  return true;
}

}  // namespace winnow::emulator
