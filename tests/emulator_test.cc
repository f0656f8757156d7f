// SPDX-License-Identifier: Apache-2.0
// The emulated GPU itself: small kernels in PTX give the right results, and wrong ones are found.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "emulator/gpu.h"
#include "emulator/tensor_map.h"

namespace winnow::tests {
namespace {

using namespace winnow::emulator;
using Words = std::vector<std::uint32_t>;

constexpr std::uint32_t kPoison = 0xffffffff;

const std::string kHead = ".version 9.0\n.target sm_90a\n.address_size 64\n";

/// An entry k(out, in) around a few instructions. r0 is the thread in its block; d0 and d1 are the
/// addresses of out and in, d2 and d3 those of the thread's own words in them.
std::string entry(const std::string& body) {
  return R"(.visible .entry k(.param .u64 out, .param .u64 in) {
.reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<32>; .reg .b64 %d<16>; .reg .f32 %f<8>;
ld.param.u64 %d0, [out]; ld.param.u64 %d1, [in]; mov.u32 %r0, %tid.x;
mad.wide.u32 %d2, %r0, 4, %d0; mad.wide.u32 %d3, %r0, 4, %d1;
)" + body +
         "\nret; }\n";
}

struct Call {
  Grid grid{.threads = {32, 1, 1}};
  Words in = Words(1);
  Words out = {};           // before the kernel; empty: a zero for every thread of a block
  std::string beside = {};  // functions and variables
};
Call threads(unsigned count) { return {.grid = {.threads = {count, 1, 1}}}; }

/// Words in device memory.
class DeviceWords {
 public:
  explicit DeviceWords(const Words& words)
      : bytes_(4 * words.size()), data_(Gpu::instance().memory.allocate(bytes_)) {
    std::memcpy(data_, words.data(), bytes_);
  }
  ~DeviceWords() { Gpu::instance().memory.free(data_); }
  DeviceWords(const DeviceWords&) = delete;
  DeviceWords& operator=(const DeviceWords&) = delete;

  void* data() const { return data_; }
  Words words() const {
    Words words(bytes_ / 4);
    std::memcpy(words.data(), data_, bytes_);
    return words;
  }

 private:
  std::size_t bytes_;
  void* data_;
};

/// What stands in `out` after the kernel.
Words run(const std::string& body, const Call& call = {}) {
  const Module module(kHead + call.beside + entry(body));
  const DeviceWords out(call.out.empty() ? Words(call.grid.threads[0]) : call.out);
  const DeviceWords in(call.in);
  const void* const pointers[] = {out.data(), in.data()};
  std::byte parameters[sizeof pointers];
  std::memcpy(parameters, pointers, sizeof pointers);
  Gpu::instance().run(*module.find("k"), call.grid, parameters);
  return out.words();
}

/// The message of the error that a kernel ends with.
std::string error_of(const std::string& body, const Call& call = {}) {
  try {
    run(body, call);
  } catch (const KernelError& error) {
    return error.what();
  } catch (const PtxError& error) {
    return std::string("PtxError: ") + error.what();
  }
  return "no error";
}
void expect_error(const std::string& piece, const std::string& body, const Call& call = {}) {
  const std::string error = error_of(body, call);
  EXPECT_NE(error.find(piece), std::string::npos) << error << "\ninstead of " << piece;
}

/// Calls f with several seeds of the order in which warps run and copies land.
template <class F>
void on_seeds(F f) {
  for (int seed = 1; seed <= 24; ++seed) {
    setenv("WINNOW_EMULATOR_SEED", std::to_string(seed).c_str(), 1);
    SCOPED_TRACE("seed " + std::to_string(seed));
    f();
  }
  unsetenv("WINNOW_EMULATOR_SEED");
}

Words iota(std::size_t count) {
  Words words(count);
  std::iota(words.begin(), words.end(), 0u);
  return words;
}

// ---- Results

struct Case {
  std::string instructions;  // r3 of r1 and r2
  std::uint32_t a, b, result;
};
void expect_results(const std::vector<Case>& cases) {
  for (const Case& each : cases) {
    const std::string body = "ld.global.u32 %r1, [%d1]; ld.global.u32 %r2, [%d1+4];" +
                             each.instructions + "st.global.u32 [%d2], %r3;";
    EXPECT_EQ(run(body, {.in = {each.a, each.b}}), Words(32, each.result)) << each.instructions;
  }
}

constexpr std::uint32_t kNan = 0x7fc00000, kOne = 0x3f800000, kMinusZero = 0x80000000;

TEST(EmulatorArithmetic, IntegersFollowPtxAtTheirLimits) {
  expect_results({
      {"add.s32 %r3, %r1, %r2;", 0x7fffffff, 1, 0x80000000},
      {"div.u32 %r3, %r1, %r2;", 7, 0, 0xffffffff},
      {"div.s32 %r3, %r1, %r2;", 0x80000000, 0xffffffff, 0x80000000},
      {"div.s32 %r3, %r1, %r2;", static_cast<std::uint32_t>(-7), 2, static_cast<std::uint32_t>(-3)},
      {"shl.b32 %r3, %r1, %r2;", 1, 32, 0},
      {"shr.u32 %r3, %r1, %r2;", 0x80000000, 33, 0},
      {"shr.s32 %r3, %r1, %r2;", 0x80000000, 40, 0xffffffff},
      {"shf.l.wrap.b32 %r3, %r1, %r2, 36;", 0x12345678, 0x9abcdef0, 0xabcdef01},
      {"shf.r.clamp.b32 %r3, %r1, %r2, 36;", 0x12345678, 0x9abcdef0, 0x9abcdef0},
      {"mul.hi.u32 %r3, %r1, %r2;", 0xffffffff, 0xffffffff, 0xfffffffe},
      {"mul.hi.s32 %r3, %r1, %r2;", 0xffffffff, 5, 0xffffffff},
      {"mad.wide.s32 %d4, %r1, %r2, -1; mov.b64 {_, %r3}, %d4;", 0x80000000, 2, 0xfffffffe},
      {"min.s32 %r3, %r1, %r2;", 0xffffffff, 1, 0xffffffff},
      {"bfind.shiftamt.u32 %r3, %r1;", 0x00ffffff, 0, 8},
      {"lop3.b32 %r3, %r1, %r2, 0x0f0f0f0f, 0xe8;", 0xff00ff00, 0x00ffff00, 0x0f0fff00},
  });
}

TEST(EmulatorArithmetic, BitFieldsEndAtTheWord) {
  expect_results({
      {"bfe.u32 %r3, %r1, 28, 8;", 0xabcdef01, 0, 0xa},
      {"bfe.s32 %r3, %r1, 28, 8;", 0xabcdef01, 0, 0xfffffffa},
      {"bfe.s32 %r3, %r1, 4, 0;", 0xffffffff, 0, 0},
      {"bfi.b32 %r3, %r1, %r2, 28, 8;", 0x12, 0, 0x20000000},
      {"bfi.b32 %r3, %r1, %r2, 8, 8;", 0xabcd, 0x11111111, 0x1111cd11},
      {"prmt.b32 %r3, %r1, %r2, 0x0729;", 0x8374ef12, 0x56781134, 0x12567400 | 0xff},
  });
}

TEST(EmulatorArithmetic, FloatsFollowPtxWithNanAndZero) {
  expect_results({
      {"min.f32 %r3, %r1, %r2;", kNan, kOne, kOne},
      {"max.f32 %r3, %r1, %r2;", kOne, kNan, kOne},
      {"max.NaN.f32 %r3, %r1, %r2; setp.nan.f32 %p1, %r3, %r3; selp.b32 %r3, 1, 0, %p1;", kOne,
       kNan, 1},
      {"min.f32 %r3, %r1, %r2;", 0, kMinusZero, kMinusZero},
      {"max.f32 %r3, %r1, %r2;", kMinusZero, 0, 0},
      {"setp.ne.f32 %p1, %r1, %r2; selp.b32 %r3, 1, 0, %p1;", kNan, kOne, 0},
      {"setp.lt.f32 %p1|%p2, %r1, %r2; selp.b32 %r3, 1, 0, %p2;", kNan, kOne, 1},
      {"add.rn.f32 %r3, %r1, %r2;", kOne, 0x33800000, kOne},  // 2^-24: a tie, to even
      {"add.rz.f32 %r3, %r1, %r2;", kOne, 0xb2800000, kOne - 1},
      {"fma.rn.f32 %r3, %r1, %r1, %r2;", kOne + 1, 0xbf800002, 0x28800000},  // not rounded between
      {"div.rn.f32 %r3, %r1, %r2;", kOne, 0, 0x7f800000},
  });
}

TEST(EmulatorArithmetic, ConversionsSaturateAndRound) {
  const std::string to_e4m3 = "cvt.rn.satfinite.e4m3x2.f32 %h0, %r1, %r2; cvt.u32.u16 %r3, %h0;";
  const std::string pair = "mov.b32 {%h0, %h1}, %r1; ";
  expect_results({
      {"cvt.rzi.s32.f32 %r3, %r1;", 0x4f800000, 0, 0x7fffffff},  // 2^32
      {"cvt.rzi.u32.f32 %r3, %r1;", 0xbf800000, 0, 0},           // -1
      {"cvt.rzi.s64.f32 %d4, %r1; mov.b64 {_, %r3}, %d4;", kNan, 0, 0x80000000},
      {"cvt.f64.f32 %d4, %r1; cvt.rzi.s32.f64 %r3, %d4;", kNan, 0, 0x80000000},
      {"cvt.rni.s32.f32 %r3, %r1;", 0x40200000, 0, 2},  // 2.5
      {"cvt.sat.u8.s32 %r3, %r1;", 300, 0, 255},
      {"cvt.sat.u8.s32 %r3, %r1;", 0xffffffff, 0, 0},
      {"cvt.s32.s8 %r3, %r1;", 0x180, 0, 0xffffff80},
      {"cvt.sat.f32.f32 %r3, %r1;", kNan, 0, 0},
      {"cvt.rn.f32.s32 %r3, %r1;", 0x01000001, 0, 0x4b800000},
      // The first operand is the high half.
      {"cvt.rn.bf16x2.f32 %r3, %r1, %r2;", 0x3f808000, 0x40400000, 0x3f804040},
      {"cvt.rn.bf16.f32 %h0, %r1; cvt.u32.u16 %r3, %h0;", 0x3f818000, 0, 0x3f82},
      {pair + "cvt.f32.bf16 %r3, %h1;", 0x3f81ffff, 0, 0x3f810000},
      // e4m3 ends at 448; 2^-9 is its smallest number.
      {to_e4m3, 0x7f800000, kOne, 0x7e38},
      {to_e4m3, 0xbb000000, kNan, 0x817f},
      {to_e4m3, 0x3f880000, 0x3f980000, 0x383a},  // 1.0625 and 1.1875 are ties
      {pair + "cvt.rn.f16x2.e4m3x2 %r3, %h0;", 0x7e01, 0, 0x5f001800},
  });
}

TEST(EmulatorControl, GuardedThreadsAddVectors) {
  const Words sums = run(
      R"(
    mov.u32 %r1, %ctaid.x; mad.lo.u32 %r1, %r1, 64, %r0;
    setp.ge.u32 %p1, %r1, 100;
    @%p1 bra DONE;
    mul.wide.u32 %d4, %r1, 4; add.s64 %d5, %d1, %d4; add.s64 %d6, %d0, %d4;
    ld.global.u32 %r2, [%d5]; ld.global.u32 %r3, [%d5+400];
    add.s32 %r4, %r2, %r3; st.global.u32 [%d6], %r4;
    DONE:)",
      {.grid = {.blocks = {2, 1, 1}, .threads = {64, 1, 1}}, .in = iota(200), .out = Words(128)});
  for (std::uint32_t i = 0; i < 128; ++i) EXPECT_EQ(sums[i], i < 100 ? 2 * i + 100 : 0);
}

TEST(EmulatorControl, LanesMeetAgainBehindBranchesAndLoops) {
  // Lane n goes round n times; all are counted together behind the loop.
  const Words out = run(R"(
    mov.u32 %r1, 0; mov.u32 %r2, %r0;
    ROUND: setp.eq.u32 %p1, %r2, 0; @%p1 bra BEHIND;
    and.b32 %r3, %r2, 1; setp.eq.u32 %p2, %r3, 0; @%p2 bra EVEN;
    add.u32 %r1, %r1, 100; bra NEXT;
    EVEN: add.u32 %r1, %r1, 1;
    NEXT: sub.u32 %r2, %r2, 1; bra ROUND;
    BEHIND: activemask.b32 %r4; popc.b32 %r4, %r4;
    mad.lo.u32 %r1, %r4, 10000, %r1; st.global.u32 [%d2], %r1;)");
  for (std::uint32_t n = 0; n < 32; ++n) EXPECT_EQ(out[n], 320000 + (n + 1) / 2 * 100 + n / 2);
}

TEST(EmulatorControl, FunctionsReturnEarlyAndAreCalledTwice) {
  const std::string function = R"(
    .func (.param .b32 result) next(.param .b32 value) {
      .reg .pred %p<2>; .reg .b32 %r<4>;
      ld.param.b32 %r1, [value]; and.b32 %r2, %r1, 1; setp.ne.u32 %p1, %r2, 0;
      @%p1 bra ODD;
      shr.u32 %r1, %r1, 1; st.param.b32 [result], %r1; ret;
      ODD: mad.lo.u32 %r1, %r1, 3, 1; st.param.b32 [result], %r1; ret; })";
  const std::string call = R"({ .param .b32 a; .param .b32 b; st.param.b32 [a], %r1;
    call.uni (b), next, (a); ld.param.b32 %r1, [b]; })";
  const Words out =
      run("mov.u32 %r1, %r0;" + call + call + "st.global.u32 [%d2], %r1;", {.beside = function});
  const auto next = [](std::uint32_t n) { return n % 2 == 1 ? 3 * n + 1 : n / 2; };
  for (std::uint32_t n = 0; n < 32; ++n) EXPECT_EQ(out[n], next(next(n)));
}

TEST(EmulatorExchange, ShufflesVotesAndReductionsCrossLanes) {
  const auto of_lanes = [](const std::string& instructions) {
    return run(instructions + "st.global.u32 [%d2], %r1;");
  };
  const Words down = of_lanes("shfl.sync.down.b32 %r1|%p1, %r0, 8, 31, -1; @!%p1 mov.u32 %r1, 99;");
  const Words up = of_lanes("shfl.sync.up.b32 %r1, %r0, 1, 0, -1;");
  const Words halves = of_lanes("shfl.sync.idx.b32 %r1, %r0, 3, 0x101f, -1;");  // of 16 lanes
  for (std::uint32_t n = 0; n < 32; ++n) {
    EXPECT_EQ(down[n], n < 24 ? n + 8 : 99);
    EXPECT_EQ(up[n], n == 0 ? 0 : n - 1);
    EXPECT_EQ(halves[n], n / 16 * 16 + 3);
  }
  EXPECT_EQ(of_lanes("setp.lt.u32 %p1, %r0, 5; vote.sync.ballot.b32 %r1, !%p1, -1;"),
            Words(32, 0xffffffe0));
  EXPECT_EQ(of_lanes("sub.s32 %r2, %r0, 9; redux.sync.min.s32 %r1, %r2, -1;"),
            Words(32, static_cast<std::uint32_t>(-9)));
}

TEST(EmulatorExchange, LanesThatNameOthersReduceApart) {
  const Words sums = run(R"(
    setp.lt.u32 %p1, %r0, 16; selp.b32 %r2, 0xffff, 0xffff0000, %p1;
    redux.sync.add.u32 %r1, %r0, %r2; st.global.u32 [%d2], %r1;)");
  for (std::uint32_t n = 0; n < 32; ++n) EXPECT_EQ(sums[n], n < 16 ? 120 : 376);
}

const std::string kShared = ".shared .align 1024 .b8 s[9216];\n";

TEST(EmulatorBarrier, SharedMemoryIsExchangedAcrossWarps) {
  Call call = threads(256);
  call.beside = kShared;
  on_seeds([&] {
    const Words out = run(R"(
      mov.u32 %r1, s; mad.lo.u32 %r2, %r0, 4, %r1; st.shared.u32 [%r2], %r0;
      bar.sync 0;
      sub.u32 %r3, 255, %r0; mad.lo.u32 %r2, %r3, 4, %r1; ld.shared.u32 %r4, [%r2];
      setp.lt.u32 %p1, %r0, 70; bar.red.popc.u32 %r5, 0, %p1;
      mad.lo.u32 %r4, %r5, 1000, %r4; st.global.u32 [%d2], %r4;)",
                          call);
    for (std::uint32_t n = 0; n < 256; ++n) EXPECT_EQ(out[n], 70000 + 255 - n);
  });
}

TEST(EmulatorBarrier, ClustersMeetAcrossBarriersOfTheirBlocks) {
  const Grid grid{.blocks = {2, 1, 1}, .threads = {64, 1, 1}, .cluster = {2, 1, 1}};
  on_seeds([&] {
    EXPECT_EQ(run(R"(
      mov.u32 %r1, %ctaid.x; mul.wide.u32 %d4, %r1, 4; add.s64 %d4, %d0, %d4;
      setp.eq.u32 %p1, %r0, 0; mov.u32 %r2, 1; @%p1 st.global.u32 [%d4], %r2;
      barrier.cluster.arrive.aligned; bar.sync 0; bar.sync 0; barrier.cluster.wait.aligned;
      ld.global.u32 %r3, [%d0]; ld.global.u32 %r4, [%d0+4]; add.u32 %r3, %r3, %r4;
      setp.ne.u32 %p2, %r3, 2; @%p2 trap;)",
                  {.grid = grid, .out = Words(2)}),
              Words(2, 1));
  });
}

TEST(EmulatorMemory, AtomicsLoseNothing) {
  const Words out =
      run(R"(
    atom.global.add.u32 %r1, [%d0], 1; mad.wide.u32 %d4, %r1, 4, %d0; st.global.u32 [%d4+16], 1;
    red.global.max.s32 [%d0+4], %r0; atom.global.cas.b32 %r2, [%d0+8], 0, 7;
    red.global.add.f32 [%d0+12], 0f3F800000;)",
          {.grid = {.blocks = {4, 1, 1}, .threads = {64, 1, 1}}, .out = Words(4 + 256)});
  EXPECT_EQ(Words(out.begin(), out.begin() + 4), (Words{256, 63, 7, 0x43800000}));
  EXPECT_EQ(Words(out.begin() + 4, out.end()), Words(256, 1));
}

TEST(EmulatorMemory, VectorsKeepTheirOrder) {
  EXPECT_EQ(run(R"(
    ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d1]; ld.global.v2.b64 {%d4, %d5}, [%d1];
    mov.b64 {%r5, %r6}, %d5; add.u32 %r1, %r1, %r6; st.global.v4.u32 [%d0], {%r1, %r2, %r3, %r5};)",
                {.in = {1, 2, 3, 4}, .out = Words(4)}),
            (Words{5, 2, 3, 3}));
}

TEST(EmulatorMemory, FreshMemoryIsNotZero) {
  auto* const words = static_cast<std::uint32_t*>(Gpu::instance().memory.allocate(64));
  for (int i = 0; i < 16; ++i) EXPECT_EQ(words[i], kPoison);
  EXPECT_TRUE(Gpu::instance().memory.free(words));
  EXPECT_FALSE(Gpu::instance().memory.free(words));
  EXPECT_EQ(run("ld.shared.u32 %r1, [s+512]; st.global.u32 [%d2], %r1;", {.beside = kShared}),
            Words(32, kPoison));
}

TEST(EmulatorModule, VariablesAndParametersStandWhereTheyAreDeclared) {
  const Module module(kHead + R"(.global .align 4 .u32 x = 1000;
    .global .align 4 .f32 y = 0f3FC00000;
    .const .align 4 .b8 z[8] = {232, 3, 0, 0, 2};
    .visible .entry k(.param .u32 n, .param .u64 .ptr .align 1 p) { ret; })");
  const auto word = [&](const char* name) {
    std::uint32_t value = 0;
    std::memcpy(&value, module.variable(name), sizeof value);
    return value;
  };
  EXPECT_EQ(word("x"), 1000u);
  EXPECT_EQ(word("y"), 0x3fc00000u);
  EXPECT_EQ(word("z"), 1000u);
  EXPECT_EQ(info(*module.find("k")).parameter_offsets, (std::vector<std::size_t>{0, 8}));
  EXPECT_EQ(module.find("l"), nullptr);
}

TEST(EmulatorModule, PlacesInSourceFilesAreSkipped) {
  EXPECT_EQ(run("\n.loc 1 10 5\nst.global.u32 [%d2], 7;", {.beside = ".file 1 \"a.cu\"\n"}),
            Words(32, 7));
}

TEST(EmulatorModule, UnknownInstructionsAreNamedWithTheirLine) {
  expect_error("PTX, line 9: k: unknown instruction frob.b32 %r1, %r2",
               "mov.u32 %r2, 1;\nfrob.b32 %r1, %r2;\nst.global.u32 [%d2], %r1;");
  expect_error("unknown instruction add.sat.s32", "add.sat.s32 %r1, %r0, 1;");
  expect_error("unknown name %q1", "mov.u32 %r1, %q1;");
}

// ---- Errors

TEST(EmulatorErrors, AccessesOutsideOfMemoryAreFound) {
  expect_error("1 bytes, in no allocation", "ld.global.u8 %h0, [%d0+128];");
  expect_error("8 bytes, 120 into an allocation of 124", "ld.global.u64 %d4, [%d0+120];",
               {.out = Words(31)});
  expect_error("in no allocation", "mov.u64 %d4, 0; ld.global.u32 %r1, [%d4];");
  expect_error("in no allocation", "mov.u64 %d4, -4; ld.global.u32 %r1, [%d4];");
  expect_error("lane 31, line", "ld.global.u32 %r1, [%d2+4];");
  Call call;
  call.beside = kShared;
  expect_error("shared memory at 9216, 4 bytes, of 9216", "ld.shared.u32 %r1, [s+9216];", call);
  expect_error("shared memory at -4,", "mov.u32 %r1, s; st.shared.u32 [%r1+-4], %r0;", call);
  expect_error("shared memory at", "mov.u32 %r1, 0; ld.shared.u32 %r1, [%r1+-4];", call);
}

TEST(EmulatorErrors, MisalignedAddressesAreFound) {
  expect_error("not a multiple of 4", "ld.global.u32 %r1, [%d0+2];");
  expect_error("not a multiple of 16", "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d0+8];");
}

TEST(EmulatorErrors, LanesThatDoNotTakePartAreFound) {
  expect_error("a shuffle reads a lane that does not take part", R"(
    setp.ge.u32 %p1, %r0, 16; @%p1 bra DONE;
    shfl.sync.idx.b32 %r1, %r0, 20, 31, 0xffff;
    DONE:)");
  expect_error("a lane is not among those that it names",
               "shfl.sync.idx.b32 %r1, %r0, 3, 31, 0xffff;");
}

TEST(EmulatorErrors, BarriersThatNotAllReachAreFound) {
  const std::string half = "setp.lt.u32 %p1, %r0, 16;";
  expect_error("not all lanes execute", half + "@%p1 bar.sync 0;");
  expect_error("lanes wait for each other at different instructions",
               half + "@%p1 bra A; bar.warp.sync -1; bra B; A: bar.sync 0; B:");
  const std::string first_warp = "setp.lt.u32 %p1, %r0, 32; @!%p1 bra OTHER;";
  expect_error("nothing goes on", first_warp + "bar.sync 1, 64; OTHER:", threads(64));
  expect_error("at which others wait for",
               first_warp + "bar.sync 1, 64; bra DONE; OTHER: bar.sync 1, 96; DONE:", threads(64));
}

TEST(EmulatorErrors, WrongUsesOfMbarriersAreFound) {
  Call call;
  call.beside = kShared;
  const std::string one = "setp.eq.u32 %p1, %r0, 0; @!%p1 bra DONE; mov.u32 %r1, s;";
  const std::string init = one + "mbarrier.init.shared.b64 [%r1], 2;";
  const auto expect = [&](const std::string& piece, const std::string& body) {
    expect_error(piece, body + "\nDONE:", call);
  };
  expect("an mbarrier that was not initialised", one + "mbarrier.arrive.shared.b64 _, [%r1];");
  expect("more arrivals at an mbarrier", init + "mbarrier.arrive.shared.b64 _, [%r1], 3;");
  expect("nothing goes on", init + R"(mbarrier.arrive.shared.b64 _, [%r1];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra WAIT;)");
  expect("no error", init + R"(mbarrier.arrive.shared.b64 _, [%r1], 2;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra WAIT;)");
}

TEST(EmulatorErrors, OperandsOfWgmmaThatChangeBeforeTheWaitAreFound) {
  const std::string product = R"(
    mov.u32 %r1, s; shr.u32 %r2, %r1, 4; cvt.u64.u32 %d4, %r2;
    or.b64 %d4, %d4, 0x4000004000010000; add.s64 %d5, %d4, 512;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %d4, %d5, 0, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;)";
  const std::string write = "st.shared.u32 [%r1+8192], %r0;";
  const std::string wait = "wgmma.wait_group.sync.aligned 0;";
  Call call = threads(128);
  call.beside = kShared;
  int found = 0;
  on_seeds([&] {
    const std::string error = error_of(product + write + wait, call);
    if (error.find("operand B was overwritten before the wgmma") != std::string::npos) ++found;
    EXPECT_EQ(error_of(product + wait + "bar.sync 0;" + write, call), "no error");
  });
  EXPECT_GT(found, 0);
}

// ---- Proxies

/// A call whose `in` is a tensor map of 32 words, which are one box.
Call with_map_of(const DeviceWords& words, unsigned threads) {
  TensorMap map;
  map.address = reinterpret_cast<std::uint64_t>(words.data());
  map.rank = 2;
  map.element_bytes = 4;
  map.type = CU_TENSOR_MAP_DATA_TYPE_UINT32;
  map.sizes = {32, 1, 1, 1, 1};
  map.stride_bytes = {4, 128};
  map.box = {32, 1, 1, 1, 1};
  Words in(32);
  std::memcpy(in.data(), &map, sizeof map);
  return {.grid = {.threads = {threads, 1, 1}}, .in = in, .beside = kShared};
}

/// The first warp executes `read`, of the words at r1, and what follows; then the second one loads
/// words there by TMA. It executes `beside` while the first one reads.
std::string load_over(const std::string& read, const std::string& beside = "") {
  return R"(
    mov.u32 %r1, s; mad.lo.u32 %r2, %r0, 4, %r1; mov.u32 %r4, 0; setp.ne.u32 %p1, %r0, 0;
    @%p1 bra MEET;
    mbarrier.init.shared.b64 [%r1+8192], 32; mbarrier.init.shared.b64 [%r1+8200], 1;
    MEET: bar.sync 0; setp.ge.u32 %p1, %r0, 32; @%p1 bra COPY;
    )" + read +
         R"(
    mbarrier.arrive.shared.b64 _, [%r1+8192]; bra DONE;
    COPY: )" +
         beside + R"(setp.ne.u32 %p1, %r0, 32; @%p1 bra DONE;
    FREE: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+8192], 0; @!%p2 bra FREE;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1+8200], 128;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1, {%r4, %r4}], [%r1+8200];
    FULL: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+8200], 0; @!%p2 bra FULL;
    DONE:)";
}

TEST(EmulatorProxies, LoadsThatTmaMayOvertakeAreFound) {
  const DeviceWords words(iota(32));
  const Call call = with_map_of(words, 64);
  const std::string fence = "fence.proxy.async.shared::cta;";
  const std::string error = "TMA writes what was read in line 14 by block 0, warp 0";
  for (const std::string read :
       {"ld.shared.u32 %r3, [%r2];", "atom.shared.add.u32 %r3, [%r2], 1;",
        "cvta.shared.u64 %d4, s; ld.u32 %r3, [%d4];",
        "and.b32 %r2, %r2, -16; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2];"}) {
    SCOPED_TRACE(read);
    on_seeds([&] {
      expect_error(error, load_over(read), call);
      expect_error(error, load_over(fence + read), call);
      expect_error(error, load_over(read, fence), call);
      EXPECT_EQ(error_of(load_over(read + fence), call), "no error");
      EXPECT_EQ(error_of(load_over(read + "bar.sync 0;", "bar.sync 0;"), call), "no error");
    });
  }
  // Other bytes may be read.
  EXPECT_EQ(error_of(load_over("ld.shared.u32 %r3, [%r2+128];"), call), "no error");
}

TEST(EmulatorProxies, WritesThatWgmmaMayNotSeeAreFound) {
  const std::string write = "mov.u32 %r1, s; st.shared.u32 [%r1], %r0;";
  const std::string copy =
      "mov.u32 %r1, s; cp.async.ca.shared.global [%r1], [%d1], 4; cp.async.wait_all;";
  const std::string product = R"(
    shr.u32 %r2, %r1, 4; cvt.u64.u32 %d4, %r2;
    or.b64 %d4, %d4, 0x4000004000010000; add.s64 %d5, %d4, 512; wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %d4, %d5, 0, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;)";
  const std::string fence = "fence.proxy.async;";
  Call call = threads(128);
  call.beside = kShared;
  for (const std::string& before : {write, copy}) {
    SCOPED_TRACE(before);
    on_seeds([&] {
      expect_error("TMA or wgmma reads what was written", before + "bar.sync 0;" + product, call);
      EXPECT_EQ(error_of(before + fence + "bar.sync 0;" + product, call), "no error");
      EXPECT_EQ(error_of(before + "bar.sync 0;" + fence + product, call), "no error");
    });
  }
}

TEST(EmulatorProxies, WritesThatTmaMayNotSeeAreFound) {
  const DeviceWords words(Words(32));
  const Call call = with_map_of(words, 32);
  const std::string write =
      "mov.u32 %r1, s; mad.lo.u32 %r2, %r0, 4, %r1; st.shared.u32 [%r2], %r0;";
  const std::string store = R"(
    bar.sync 0; mov.u32 %r4, 0; setp.ne.u32 %p1, %r0, 0; @%p1 bra DONE;
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {%r4, %r4}], [%r1];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    DONE:)";
  expect_error("TMA or wgmma reads what was written", write + store, call);
  EXPECT_EQ(error_of(write + "fence.proxy.async.shared::cta;" + store, call), "no error");
  EXPECT_EQ(words.words(), iota(32));
}

// ---- Orders

TEST(EmulatorOrder, CopiesAreOnlySureToHaveLandedOnceTheyAreWaitedFor) {
  const std::string copy = R"(
    mov.u32 %r1, s; mad.lo.u32 %r1, %r0, 4, %r1; cp.async.ca.shared.global [%r1], [%d3], 4;
    cp.async.commit_group;)";
  const std::string read = "ld.shared.u32 %r2, [%r1]; st.global.u32 [%d2], %r2;";
  const Call call{.in = iota(32), .beside = kShared};
  std::set<Words> early;
  on_seeds([&] {
    early.insert(run(copy + read, call));
    EXPECT_EQ(run(copy + "cp.async.wait_group 0;" + read, call), call.in);
  });
  EXPECT_EQ(early.count(Words(32, kPoison)), 1u);
}

TEST(EmulatorOrder, OneSeedGivesOneOrder) {
  Call call = threads(256);
  call.out = Words(1);
  const auto race = [&] {  // counts without atomics
    return run(R"(
      mov.u32 %r1, 0;
      ROUND: ld.global.u32 %r2, [%d0]; add.u32 %r2, %r2, 1; st.global.u32 [%d0], %r2;
      add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 100; @%p1 bra ROUND;)",
               call);
  };
  std::set<Words> results;
  on_seeds([&] {
    const Words result = race();
    EXPECT_EQ(race(), result);
    results.insert(result);
  });
  EXPECT_GT(results.size(), 1u);
}

}  // namespace
}  // namespace winnow::tests
