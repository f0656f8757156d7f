// SPDX-License-Identifier: Apache-2.0
// Every wgmma variant of src/cuda/hopper/wgmma.cuh against plain loops. The operands are small
// integers, so that the sums are exact.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/quad.cuh"
#include "cuda/hopper/store_matrices.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "tests/hopper_kernels.cuh"

namespace winnow::tests {
namespace {

using namespace winnow::hopper;

constexpr int kRows = 64;  // rows of A and of the product
constexpr int kSteps = 4;  // wgmmas, each over 32 bytes along K: together one row of a tile

/// How an operand is passed to wgmma. `registers` is for A, loaded from row-major memory.
enum class Layout { registers, k_major, mn_major };

struct SharedStorage {
  std::byte a[kRows * kTileRowBytes];
  std::byte b[256 * kTileRowBytes];
};

/// Stores rows of `row_bytes` into adjacent tiles.
__device__ void store_tiles(std::byte* tiles, const void* matrix, int rows, int row_bytes) {
  const int pieces = row_bytes / 16;
  for (int i = static_cast<int>(threadIdx.x); i < rows * pieces; i += kWarpgroup) {
    const int row = i / pieces;
    const int piece = i % pieces;
    std::byte* const tile = tiles + piece / 8 * rows * kTileRowBytes;
    *reinterpret_cast<uint4*>(tile + tile_offset(row, piece % 8)) =
        static_cast<const uint4*>(matrix)[i];
  }
}

/// An operand of `size` rows of A or columns of B, with the K extent of kSteps wgmmas.
template <class T, Layout kLayout>
__device__ void store_operand(std::byte* shared, const T* operand, int size) {
  if constexpr (kLayout == Layout::k_major) {
    store_tiles(shared, operand, size, kTileRowBytes);
  } else if constexpr (kLayout == Layout::mn_major) {
    store_tiles(shared, operand, kTileColumns, size * static_cast<int>(sizeof(T)));
  }
}

template <Layout kLayout>
__device__ std::uint64_t descriptor(const std::byte* shared, int step) {
  const std::uint32_t address = shared_address(shared);
  if constexpr (kLayout == Layout::k_major) {
    return k_major(address) + step * kNextKMajor;
  } else {
    return mn_major(address, kTileColumns * kTileRowBytes) + step * kNextMnMajor;
  }
}

/// The fragments of A that a lane holds: pairs of rows 16w + g and + 8, of columns 2c and 2c + 8.
template <class T>
__device__ void load_fragment(std::uint32_t (&fragment)[4], const T* a, int step) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
  for (int i = 0; i < 4; ++i) {
    fragment[i] = *reinterpret_cast<const std::uint32_t*>(a + (row + i % 2 * 8) * kTileColumns +
                                                          step * 16 + i / 2 * 8 + lane % 4 * 2);
  }
}

/// d = A B, or d += A B. An mn_major operand is stored transposed.
template <class T, int kColumns, Layout kA, Layout kB>
__global__ void product_kernel(const T* a, const T* b, float* d, bool accumulate) {
  constexpr bool kAMnMajor = kA == Layout::mn_major;
  constexpr bool kBMnMajor = kB == Layout::mn_major;
  extern __shared__ __align__(1024) std::byte memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  store_operand<T, kA>(shared.a, a, kRows);
  store_operand<T, kB>(shared.b, b, kColumns);
  std::uint32_t fragments[kSteps][4];
  if constexpr (kA == Layout::registers) {
    for (int step = 0; step < kSteps; ++step) load_fragment(fragments[step], a, step);
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
  const auto element = [&](int i) {
    return d + (row + i / 2 % 2 * 8) * kColumns + i / 4 * 8 + lane % 4 * 2 + i % 2;
  };
  float sums[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sums[i] = *element(i);
  fence_proxy_async();
  sync_warps<1, kWarpgroup>();  // both operands are stored

  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const std::uint64_t to_b = descriptor<kB>(shared.b, step);
    const int adds = accumulate || step > 0;
    if constexpr (kA == Layout::registers && kColumns == 64) {
      multiply_64x64x16<T, kBMnMajor>(sums, fragments[step], to_b, adds);
    } else if constexpr (kA == Layout::registers) {
      multiply_64x256x16<T, kBMnMajor>(sums, fragments[step], to_b, adds);
    } else {
      const std::uint64_t to_a = descriptor<kA>(shared.a, step);
      if constexpr (kColumns == 16) {
        multiply_64x16x16<T, kAMnMajor, kBMnMajor>(sums, to_a, to_b, adds);
      } else if constexpr (kColumns == 32) {
        multiply_64x32x16<T, kAMnMajor, kBMnMajor>(sums, to_a, to_b, adds);
      } else if constexpr (kColumns == 64) {
        multiply_64x64x16<T, kAMnMajor, kBMnMajor>(sums, to_a, to_b, adds);
      } else if constexpr (kAMnMajor || kBMnMajor) {
        multiply_64x256x16<T, kAMnMajor, kBMnMajor>(sums, to_a, to_b, adds);
      } else {
        multiply_64x256_k_major<T>(sums, to_a, to_b, adds);
      }
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) *element(i) = sums[i];
}

Values small_numbers(std::int64_t count, std::string_view stream) {
  return whole_numbers(count, 1, stream, -3, 3);
}

/// An operand in memory; `values` are its rows along K.
template <class T>
Buffer stored(Layout layout, std::int64_t rows, const Values& values) {
  const auto contracted = static_cast<std::int64_t>(values.size()) / rows;
  if (layout != Layout::mn_major) return floats(kDevice, kDType<T>, {rows, contracted}, values);
  Values transposed(values.size());
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t k = 0; k < contracted; ++k)
      transposed[k * rows + row] = values[row * contracted + k];
  return floats(kDevice, kDType<T>, {contracted, rows}, transposed);
}

template <class T, int kColumns, Layout kA, Layout kB>
void expect_product_of_plain_loops() {
  constexpr std::int64_t kContracted = kTileRowBytes / sizeof(T);
  const Values a = small_numbers(kRows * kContracted, "a");
  const Values b = small_numbers(kColumns * kContracted, "b");
  const Values before = small_numbers(kRows * kColumns, "d");
  const Buffer a_stored = stored<T>(kA, kRows, a);
  const Buffer b_stored = stored<T>(kB, kColumns, b);
  for (const bool accumulate : {false, true}) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, accumulate ? "accumulate" : "overwrite");
    // The previous accumulator must not contribute.
    const Buffer d = floats(kDevice, DType::f32, {kRows, kColumns},
                            accumulate ? before : Values(before.size(), kNaN));
    run_block(product_kernel<T, kColumns, kA, kB>, kWarpgroup, sizeof(SharedStorage),
              static_cast<const T*>(a_stored.tensor().data),
              static_cast<const T*>(b_stored.tensor().data), static_cast<float*>(d.tensor().data),
              accumulate);
    Values expected = accumulate ? before : Values(before.size(), 0);
    for (std::int64_t row = 0; row < kRows; ++row)
      for (std::int64_t column = 0; column < kColumns; ++column)
        for (std::int64_t k = 0; k < kContracted; ++k)
          expected[row * kColumns + column] +=
              a[row * kContracted + k] * b[column * kContracted + k];
    EXPECT_TRUE(ok(harness::compare_exactly("d", d.download(), expected)));
    expect_canaries_intact(a_stored, b_stored, d);
  }
}

template <int kColumns, Layout kA, Layout kB>
void expect_products_of_two_byte_types() {
  expect_product_of_plain_loops<__nv_bfloat16, kColumns, kA, kB>();
  expect_product_of_plain_loops<__half, kColumns, kA, kB>();
}

class Wgmma : public OnHopper {};

TEST_F(Wgmma, Of16ColumnsTakesAInEitherOrder) {
  expect_products_of_two_byte_types<16, Layout::k_major, Layout::k_major>();
  expect_products_of_two_byte_types<16, Layout::mn_major, Layout::k_major>();
}

TEST_F(Wgmma, Of32ColumnsTakesAInEitherOrderAndHalfOfAnMnMajorTile) {
  expect_products_of_two_byte_types<32, Layout::k_major, Layout::k_major>();
  expect_products_of_two_byte_types<32, Layout::mn_major, Layout::k_major>();
  expect_products_of_two_byte_types<32, Layout::mn_major, Layout::mn_major>();
}

TEST_F(Wgmma, Of64ColumnsTakesAFromRegisters) {
  expect_products_of_two_byte_types<64, Layout::registers, Layout::k_major>();
  expect_products_of_two_byte_types<64, Layout::registers, Layout::mn_major>();
}

TEST_F(Wgmma, Of64ColumnsTakesEachOperandInEitherOrder) {
  expect_products_of_two_byte_types<64, Layout::k_major, Layout::k_major>();
  expect_products_of_two_byte_types<64, Layout::k_major, Layout::mn_major>();
  expect_products_of_two_byte_types<64, Layout::mn_major, Layout::k_major>();
  expect_products_of_two_byte_types<64, Layout::mn_major, Layout::mn_major>();
}

TEST_F(Wgmma, Of256ColumnsTakesAFromRegisters) {
  expect_products_of_two_byte_types<256, Layout::registers, Layout::mn_major>();
}

TEST_F(Wgmma, Of256ColumnsTakesEachOperandInEitherOrder) {
  expect_products_of_two_byte_types<256, Layout::k_major, Layout::mn_major>();
  expect_products_of_two_byte_types<256, Layout::mn_major, Layout::k_major>();
  expect_products_of_two_byte_types<256, Layout::mn_major, Layout::mn_major>();
}

TEST_F(Wgmma, Of256ColumnsTakesKMajorOperandsOfEveryType) {
  expect_products_of_two_byte_types<256, Layout::k_major, Layout::k_major>();
  expect_product_of_plain_loops<__nv_fp8_e4m3, 256, Layout::k_major, Layout::k_major>();
}

/// Stores four 8 x 8 matrices of numbers 64 matrix + 8 row + column by one warp.
template <bool kTransposed>
__global__ void store_kernel(std::int32_t* stored) {
  __shared__ __align__(16) std::uint16_t memory[4 * 64];
  const int lane = static_cast<int>(threadIdx.x);
  std::uint32_t words[4];
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t even = 64 * i + 8 * (lane / 4) + 2 * (lane % 4);
    words[i] = even | (even + 1) << 16;
  }
  const std::uint32_t row = shared_address(memory + 8 * lane);
  if constexpr (kTransposed) {
    store_transposed(row, words);
  } else {
    store_matrices(row, words);
  }
  __syncwarp();
  for (int i = 0; i < 8; ++i) stored[8 * lane + i] = memory[8 * lane + i];
}

TEST_F(Wgmma, FragmentsAreStoredAsMatricesAndTransposed) {
  const Buffer plain = ints(kDevice, {256}, Ints(256, -1));
  const Buffer transposed = ints(kDevice, {256}, Ints(256, -1));
  run_block(store_kernel<false>, 32, 0, static_cast<std::int32_t*>(plain.tensor().data));
  run_block(store_kernel<true>, 32, 0, static_cast<std::int32_t*>(transposed.tensor().data));
  Ints expected(256);
  Ints columns(256);
  for (int i = 0; i < 256; ++i) {
    expected[i] = i;
    columns[i] = i / 64 * 64 + i % 8 * 8 + i / 8 % 8;
  }
  EXPECT_EQ(plain.download_ints(), expected);
  EXPECT_EQ(transposed.download_ints(), columns);
  expect_canaries_intact(plain, transposed);
}

__global__ void quad_kernel(const float* values, float* maxima, float* sums, std::int32_t* words) {
  const int lane = static_cast<int>(threadIdx.x);
  maxima[lane] = quad_max(values[lane]);
  sums[lane] = quad_sum(values[lane]);
  std::uint32_t own[4];
  for (int i = 0; i < 4; ++i) own[i] = static_cast<std::uint32_t>(lane * 4 + i);
  transpose_in_quad(own);
  for (int i = 0; i < 4; ++i) words[lane * 4 + i] = static_cast<std::int32_t>(own[i]);
}

TEST_F(Wgmma, LanesOfAQuadShareARow) {
  const Values values = small_numbers(32, "values");
  const Buffer input = floats(kDevice, DType::f32, {32}, values);
  const Buffer maxima(kDevice, DType::f32, {32});
  const Buffer sums(kDevice, DType::f32, {32});
  const Buffer words(kDevice, DType::i32, {32, 4});
  run_block(quad_kernel, 32, 0, static_cast<const float*>(input.tensor().data),
            static_cast<float*>(maxima.tensor().data), static_cast<float*>(sums.tensor().data),
            static_cast<std::int32_t*>(words.tensor().data));
  Values expected_maxima, expected_sums;
  Ints expected_words;
  for (int lane = 0; lane < 32; ++lane) {
    const double* const quad = values.data() + lane / 4 * 4;
    expected_maxima.push_back(std::max({quad[0], quad[1], quad[2], quad[3]}));
    expected_sums.push_back(quad[0] + quad[1] + quad[2] + quad[3]);
    for (int i = 0; i < 4; ++i) expected_words.push_back((lane / 4 * 4 + i) * 4 + lane % 4);
  }
  EXPECT_TRUE(same_bits(maxima.download(), expected_maxima));
  EXPECT_TRUE(same_bits(sums.download(), expected_sums));
  EXPECT_EQ(words.download_ints(), expected_words);
}

}  // namespace
}  // namespace winnow::tests
