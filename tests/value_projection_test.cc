// SPDX-License-Identifier: Apache-2.0
// value_projection: exact on integers, independence of rows, fp32 and rounded d_w_v.
#include <thread>

#include "tests/testing.h"

namespace winnow::tests {
namespace {

struct Projection {
  std::int64_t tokens = 5;
  std::int64_t heads = 3;
  std::int64_t head_dim = 7;
  std::int64_t v_dim = 16;
  DType dtype = DType::bf16;
  std::int64_t row_padding = 0;
  Values out{}, w_v{}, d_out_v{};
  DType d_w_type = DType::f32;
  Values d_w_before{};  // empty: zeros
};

struct ProjectionGradients {
  Values d_out, d_w_v;
};

/// Integers so small that the sums are exact in every type.
Projection filled(Projection p, std::uint64_t seed) {
  p.out = whole_numbers(p.tokens * p.heads * p.v_dim, seed, "out", -2, 2);
  p.w_v = whole_numbers(p.heads * p.head_dim * p.v_dim, seed, "w_v", -2, 2);
  p.d_out_v = whole_numbers(p.tokens * p.heads * p.head_dim, seed, "d_out_v", -2, 2);
  return p;
}

Projection with_normals(Projection p, std::uint64_t seed) {
  p.out = normals(p.tokens * p.heads * p.v_dim, seed, "out");
  p.w_v = normals(p.heads * p.head_dim * p.v_dim, seed, "w_v");
  p.d_out_v = normals(p.tokens * p.heads * p.head_dim, seed, "d_out_v");
  return p;
}

Projection rows_of(Projection p, std::int64_t first, std::int64_t count) {
  p.out = part(p.out, first * p.heads * p.v_dim, count * p.heads * p.v_dim);
  p.d_out_v = part(p.d_out_v, first * p.heads * p.head_dim, count * p.heads * p.head_dim);
  p.tokens = count;
  return p;
}

Values forward(const Projection& p, const Execution& execution) {
  const Device device = harness::device_of(execution.backend);
  const Buffer out = floats(device, p.dtype, {p.tokens, p.heads, p.v_dim}, p.out, p.row_padding);
  const Buffer w_v = floats(device, p.dtype, {p.heads, p.head_dim, p.v_dim}, p.w_v, p.row_padding);
  const Buffer out_v(device, p.dtype, {p.tokens, p.heads, p.head_dim}, p.row_padding);
  run_where_taken(
      ValueProjectionForward{.out = out.tensor(), .w_v = w_v.tensor(), .out_v = out_v.tensor()},
      execution);
  expect_canaries_intact(out, w_v, out_v);
  return out_v.download();
}

ProjectionGradients backward(const Projection& p, const Execution& execution) {
  const Device device = harness::device_of(execution.backend);
  const Buffer out = floats(device, p.dtype, {p.tokens, p.heads, p.v_dim}, p.out, p.row_padding);
  const Buffer w_v = floats(device, p.dtype, {p.heads, p.head_dim, p.v_dim}, p.w_v, p.row_padding);
  const Buffer d_out_v =
      floats(device, p.dtype, {p.tokens, p.heads, p.head_dim}, p.d_out_v, p.row_padding);
  const Buffer d_out(device, p.dtype, {p.tokens, p.heads, p.v_dim}, p.row_padding);
  Buffer d_w_v(device, p.d_w_type, {p.heads, p.head_dim, p.v_dim}, p.row_padding);
  // A d_w_v that is overwritten is initialised with NaN, so that a missed element shows.
  if (p.d_w_type == DType::f32)
    d_w_v.upload(p.d_w_before.empty() ? Values(p.w_v.size()) : p.d_w_before);
  run_where_taken(ValueProjectionBackward{.out = out.tensor(),
                                          .w_v = w_v.tensor(),
                                          .d_out_v = d_out_v.tensor(),
                                          .d_out = d_out.tensor(),
                                          .d_w_v = d_w_v.tensor()},
                  execution);
  expect_canaries_intact(out, w_v, d_out_v, d_out, d_w_v);
  return {d_out.download(), d_w_v.download()};
}

/// out_v, d_out and d_w_v by the formulas.
struct Plain {
  Values out_v;
  ProjectionGradients gradients;
};

Plain plain(const Projection& p) {
  Plain result{Values(p.d_out_v.size()), {Values(p.out.size()), Values(p.w_v.size())}};
  for (std::int64_t t = 0; t < p.tokens; ++t)
    for (std::int64_t h = 0; h < p.heads; ++h)
      for (std::int64_t d = 0; d < p.head_dim; ++d)
        for (std::int64_t c = 0; c < p.v_dim; ++c) {
          const std::int64_t out = (t * p.heads + h) * p.v_dim + c;
          const std::int64_t out_v = (t * p.heads + h) * p.head_dim + d;
          const std::int64_t w = (h * p.head_dim + d) * p.v_dim + c;
          result.out_v[out_v] += p.w_v[w] * p.out[out];
          result.gradients.d_out[out] += p.w_v[w] * p.d_out_v[out_v];
          result.gradients.d_w_v[w] += p.d_out_v[out_v] * p.out[out];
        }
  return result;
}

/// Calls body(execution) for every kernel.
template <class Body>
void on_each_projection_kernel(const Body& body) {
  on_each_kernel("value_projection", body);
}

/// Calls body(execution, shape) for every kernel and type, with odd shapes and those of the models.
template <class Body>
void on_each_projection(const Body& body) {
  on_each_projection_kernel([&](const Execution& execution) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
      for (const Projection& shape :
           {Projection{.dtype = dtype},
            Projection{.tokens = 1, .heads = 1, .head_dim = 1, .v_dim = 8, .dtype = dtype},
            Projection{.tokens = 0, .dtype = dtype},
            Projection{.tokens = 3, .heads = 2, .head_dim = 128, .v_dim = 512, .dtype = dtype}}) {
        SCOPED_TRACE(fmt::format("{}, {} tokens, {} x {}", name(dtype), shape.tokens,
                                 shape.head_dim, shape.v_dim));
        body(execution, shape);
      }
  });
}

/// Compares a call whose sums are exact with the formulas.
void expect_exact(const Projection& p, const Plain& expected, const Execution& execution) {
  EXPECT_TRUE(ok(harness::compare_exactly("out_v", forward(p, execution),
                                          as_stored(p.dtype, expected.out_v))));
  const ProjectionGradients gradients = backward(p, execution);
  EXPECT_TRUE(ok(harness::compare_exactly("d_out", gradients.d_out,
                                          as_stored(p.dtype, expected.gradients.d_out))));
  EXPECT_TRUE(ok(harness::compare_exactly("d_w_v", gradients.d_w_v,
                                          as_stored(p.d_w_type, expected.gradients.d_w_v))));
}

TEST(ValueProjection, OfWholeNumbersIsExact) {
  on_each_projection([](const Execution& execution, const Projection& shape) {
    const Projection p = filled(shape, 1);
    expect_exact(p, plain(p), execution);
  });
}

/// Several of the tiles that a kernel computes, the last of each dimension a part of one, and
/// tokens enough that d_w_v may be summed in parts.
Projection many_tiles() { return {.tokens = 1030, .heads = 1, .head_dim = 136, .v_dim = 264}; }

TEST(ValueProjection, OfManyTilesIsExact) {
  const Projection p = filled(many_tiles(), 7);
  const Plain expected = plain(p);
  on_each_projection_kernel([&](const Execution& execution) {
    expect_exact(p, expected, execution);
    Projection rounded = p;
    rounded.d_w_type = p.dtype;
    expect_exact(rounded, expected, execution);
  });
}

TEST(ValueProjection, RowsOfManyTilesDoNotDependOnTheirNeighbours) {
  const Projection p = with_normals(many_tiles(), 8);
  constexpr std::int64_t kFirst = 700;
  const std::int64_t count = p.tokens - kFirst;
  on_each_projection_kernel([&](const Execution& execution) {
    const Projection rows = rows_of(p, kFirst, count);
    EXPECT_TRUE(same_bits(forward(rows, execution),
                          part(forward(p, execution), kFirst * p.head_dim, count * p.head_dim)));
    EXPECT_TRUE(same_bits(backward(rows, execution).d_out,
                          part(backward(p, execution).d_out, kFirst * p.v_dim, count * p.v_dim)));
  });
}

TEST(ValueProjection, DWOfTheAccumulationTypeIsAddedToAndOthersOverwritten) {
  on_each_projection([](const Execution& execution, const Projection& shape) {
    Projection p = filled(shape, 2);
    const Values alone = plain(p).gradients.d_w_v;
    p.d_w_before = whole_numbers(static_cast<std::int64_t>(p.w_v.size()), 2, "d_w_v", -9, 9);
    Values sum = alone;
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += p.d_w_before[i];
    EXPECT_TRUE(ok(harness::compare_exactly("d_w_v", backward(p, execution).d_w_v, sum)));
    if (p.dtype == DType::f32) return;
    p.d_w_type = p.dtype;
    EXPECT_TRUE(ok(harness::compare_exactly("d_w_v", backward(p, execution).d_w_v,
                                            as_stored(p.dtype, alone))));
  });
}

TEST(ValueProjection, RowsDoNotDependOnTheirNeighbours) {
  on_each_projection([](const Execution& execution, const Projection& shape) {
    const Projection p = with_normals(shape, 3);
    const Values out_v = forward(p, execution);
    const Values d_out = backward(p, execution).d_out;
    for (std::int64_t t = 0; t < p.tokens; ++t) {
      const Projection row = rows_of(p, t, 1);
      const std::int64_t width = p.heads * p.head_dim;
      EXPECT_TRUE(same_bits(forward(row, execution), part(out_v, t * width, width)));
      EXPECT_TRUE(same_bits(backward(row, execution).d_out,
                            part(d_out, t * p.heads * p.v_dim, p.heads * p.v_dim)));
    }
  });
}

TEST(ValueProjection, ThreadsRepeatsAndTheWorkspaceLimitChangeNoBit) {
  on_each_projection([](Execution execution, const Projection& shape) {
    const Projection p = with_normals(shape, 4);
    execution.deterministic = true;
    const Values out_v = forward(p, execution);
    const ProjectionGradients gradients = backward(p, execution);
    for (const int threads : {0, 1, 2, 5}) {
      for (const std::size_t limit : {std::size_t{4} << 20, std::size_t{256} << 20}) {
        execution.threads = threads;
        execution.workspace_limit = limit;
        EXPECT_TRUE(same_bits(forward(p, execution), out_v));
        EXPECT_TRUE(same_bits(backward(p, execution).d_out, gradients.d_out));
        EXPECT_TRUE(same_bits(backward(p, execution).d_w_v, gradients.d_w_v));
      }
    }
  });
}

TEST(ValueProjection, OfStridedTensorsIsTheSame) {
  on_each_projection([](const Execution& execution, const Projection& shape) {
    Projection p = filled(shape, 5);
    const Values out_v = forward(p, execution);
    const ProjectionGradients gradients = backward(p, execution);
    for (const std::int64_t padding : {3, 8}) {
      p.row_padding = padding;
      EXPECT_TRUE(ok(harness::compare_exactly("out_v", forward(p, execution), out_v)));
      const ProjectionGradients strided = backward(p, execution);
      EXPECT_TRUE(ok(harness::compare_exactly("d_out", strided.d_out, gradients.d_out)));
      EXPECT_TRUE(ok(harness::compare_exactly("d_w_v", strided.d_w_v, gradients.d_w_v)));
    }
  });
}

void scale_rows(Values& values, std::int64_t row_size, std::int64_t step, int exponent) {
  for (std::size_t i = 0; i < values.size(); ++i)
    if (static_cast<std::int64_t>(i) / row_size % step == 0)
      values[i] = std::ldexp(values[i], exponent);
}

TEST(ValueProjection, DenormalsCountInAllRowsOrInSome) {
  on_each_projection_kernel([](const Execution& execution) {
    for (const Projection& shape :
         {Projection{}, Projection{.tokens = 5, .heads = 2, .head_dim = 130, .v_dim = 512}}) {
      for (const std::int64_t step : {1, 2}) {
        SCOPED_TRACE(fmt::format("head_dim {}, every {}", shape.head_dim, step));
        Projection p = filled(shape, 9);
        scale_rows(p.out, p.heads * p.v_dim, step, -130);
        Projection of_weights = p;
        scale_rows(p.d_out_v, p.heads * p.head_dim, step, -130);
        scale_rows(p.w_v, 1, 1, 40);
        expect_exact(p, plain(p), execution);
        scale_rows(of_weights.d_out_v, 1, 1, 40);
        expect_exact(of_weights, plain(of_weights), execution);
        Projection small_weights = filled(shape, 10);
        scale_rows(small_weights.w_v, p.head_dim * p.v_dim, step, -130);
        scale_rows(small_weights.out, 1, 1, 40);
        scale_rows(small_weights.d_out_v, 1, 1, 40);
        expect_exact(small_weights, plain(small_weights), execution);
      }
    }
  });
}

TEST(ValueProjection, DenormalsOfSomeTokensLeaveDWOfTheOthers) {
  on_each_projection_kernel([](const Execution& execution) {
    Projection p = filled({.tokens = 400}, 12);
    for (std::int64_t i = 0; i < 192 * p.heads * p.v_dim; ++i)
      p.out[i] = std::ldexp(p.out[i], -130);
    expect_exact(p, plain(p), execution);
  });
}

/// Rows of `size` values of which the second half are those of the first in reverse, times `sign`.
void mirror_rows(Values& values, std::int64_t size, double sign) {
  for (std::size_t row = 0; row < values.size(); row += size)
    for (std::int64_t i = 0; i < size / 2; ++i) values[row + size - 1 - i] = sign * values[row + i];
}

// Pairs are added in another order: else nothing would show which of the two kernels ran. Rounding
// to bf16 hides it in most sums, but not in those that are 0 but for what was rounded on the way.
TEST(ValueProjection, PairsOfBf16DifferFromFloatsInLastBits) {
  const Execution pairs{.backend = Backend::cpu, .kernel = "avx512_bf16"};
  const Buffer out = floats({}, DType::bf16, {1, 1, 8}, Values(8, 1.0));
  const Buffer w_v = floats({}, DType::bf16, {1, 8, 8}, Values(64, 1.0));
  const Buffer out_v({}, DType::bf16, {1, 1, 8});
  const ValueProjectionForward call{
      .out = out.tensor(), .w_v = w_v.tensor(), .out_v = out_v.tensor()};
  if (!is_taken(call, pairs)) GTEST_SKIP() << why_not(call, pairs);
  const Projection p = with_normals({.tokens = 64, .head_dim = 64, .v_dim = 64}, 13);
  const Execution floats_alone{.backend = Backend::cpu, .kernel = "simd"};
  EXPECT_FALSE(same_bits(backward(p, pairs).d_w_v, backward(p, floats_alone).d_w_v));
  Projection cancelling = p;
  mirror_rows(cancelling.out, p.v_dim, -1);
  mirror_rows(cancelling.w_v, p.v_dim, 1);
  EXPECT_FALSE(same_bits(forward(cancelling, pairs), forward(cancelling, floats_alone)));
}

TEST(ValueProjection, RowsBesideDenormalsAreThoseOfTheRowAlone) {
  on_each_projection_kernel([](const Execution& execution) {
    Projection p = with_normals({.tokens = 200, .heads = 2, .head_dim = 130, .v_dim = 64}, 11);
    scale_rows(p.out, p.heads * p.v_dim, 7, -130);
    scale_rows(p.d_out_v, p.heads * p.head_dim, 7, -130);
    scale_rows(p.w_v, 1, 1, 40);
    const Values out_v = forward(p, execution);
    const Values d_out = backward(p, execution).d_out;
    for (const std::int64_t t : {0, 1, 6, 7, 195, 199}) {
      const Projection row = rows_of(p, t, 1);
      const std::int64_t width = p.heads * p.head_dim;
      EXPECT_TRUE(same_bits(forward(row, execution), part(out_v, t * width, width)));
      EXPECT_TRUE(same_bits(backward(row, execution).d_out,
                            part(d_out, t * p.heads * p.v_dim, p.heads * p.v_dim)));
    }
  });
}

TEST(ValueProjection, RunsOnAThreadThatHasCalledNothingElse) {
  on_each_backend([](Backend backend) {
    const Device device = harness::device_of(backend);
    const Buffer out = floats(device, DType::bf16, {1, 1, 8}, Values(8, 1.0));
    const Buffer w_v = floats(device, DType::bf16, {1, 8, 8}, Values(64, 1.0));
    const Buffer out_v(device, DType::bf16, {1, 1, 8});
    std::thread([&] {
      EXPECT_NO_THROW(value_projection_forward(
          {.out = out.tensor(), .w_v = w_v.tensor(), .out_v = out_v.tensor()}, on(backend)));
    }).join();
    EXPECT_EQ(out_v.download(), Values(8, 8.0));
  });
}

TEST(ValueProjection, KeepsNanToItsOwnHeadAndRow) {
  on_each_projection_kernel([](const Execution& execution) {
    Projection p = filled({}, 6);
    p.out[(2 * p.heads + 1) * p.v_dim] = kNaN;
    const Values out_v = forward(p, execution);
    for (std::int64_t i = 0; i < p.tokens * p.heads * p.head_dim; ++i)
      EXPECT_EQ(std::isnan(out_v[i]), i / p.head_dim == 2 * p.heads + 1) << i;
  });
}

}  // namespace
}  // namespace winnow::tests
