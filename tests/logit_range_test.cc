// SPDX-License-Identifier: Apache-2.0
// sparse_attention and the indexer's losses over the whole range of logits: what 1.45 times is
// finite in fp32. The oracle computes in double.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/attention_calls.h"
#include "tests/dense_loss_calls.h"

namespace winnow::tests {
namespace {

/// Shapes of the models, for which backends have specialised kernels, and one that rows of up to
/// 256 elements fit.
std::vector<Attention> shapes_of(Backend backend) {
  std::vector<Attention> shapes = {{.tokens = 3, .keys = 70, .heads = 5, .topk = 64}};
  if (backend == Backend::reference) return shapes;  // it has a single kernel
  shapes.push_back(
      {.tokens = 2, .keys = 160, .heads = 5, .qk_dim = 576, .v_dim = 512, .topk = 130});
  shapes.push_back(
      {.tokens = 2, .keys = 260, .heads = 4, .qk_dim = 512, .v_dim = 512, .topk = 256});
  return shapes;
}

/// One row with heads in all places of a work item, in several items, and with wide values.
std::vector<Attention> shapes_of_many_heads(Backend) {
  std::vector<Attention> shapes;
  for (const std::int64_t heads : {17, 40})
    shapes.push_back({.tokens = 1, .keys = 70, .heads = heads, .topk = 64});
  for (const std::int64_t heads : {16, 70}) {
    shapes.push_back(
        {.tokens = 1, .keys = 150, .heads = heads, .qk_dim = 576, .v_dim = 512, .topk = 130});
  }
  shapes.push_back(
      {.tokens = 1, .keys = 150, .heads = 9, .qk_dim = 512, .v_dim = 512, .topk = 130});
  shapes.push_back(
      {.tokens = 1, .keys = 40, .heads = 6, .qk_dim = 1024, .v_dim = 1024, .topk = 40});
  return shapes;
}

/// Calls body(execution, attention) for every kernel and the shapes and types that it takes.
template <class Body>
void on_each_type(std::uint64_t seed, const Body& body,
                  std::vector<Attention> (*shapes)(Backend) = shapes_of) {
  on_each_kernel("sparse_attention", [&](const Execution& execution) {
    for (const Attention& shape : shapes(execution.backend)) {
      Attention a = filled(shape, seed);
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        a.dtype = dtype;
        const AttentionForwardWork work(a, harness::device_of(execution.backend));
        if (!is_taken(work.args, execution)) continue;
        SCOPED_TRACE(fmt::format("{}, qk_dim {}", name(dtype), a.qk_dim));
        body(execution, a);
      }
    }
  });
}

/// Makes the logits about normally distributed with this deviation. It comes from q as far as the
/// type can hold that, and from the scale beyond.
Attention with_logits(Attention a, double deviation) {
  const double q_size = deviation / (0.3 * std::sqrt(static_cast<double>(a.qk_dim)));
  const double q_limit = a.dtype == DType::f16 ? 1e3 : 1e37;
  const double q_least = a.dtype == DType::f16 ? 1e-1 : 1e-32;
  const double q_taken = std::clamp(q_size, q_least, q_limit);
  for (double& value : a.q) value *= q_taken;
  a.scale = static_cast<float>(0.3 * q_size / q_taken);
  return a;
}

Attention with_sinks(Attention a, double deviation, std::uint64_t seed) {
  a.sink = as_stored(DType::f32, normals(a.heads, seed, "sink", 3 * deviation));
  return a;
}

/// Makes key 2 i + 1 tie with key 2 i in every row; they differ in the first channels, where q is
/// 0.
Attention with_ties(Attention a) {
  constexpr std::int64_t kDiffering = 8;
  for (std::int64_t row = 0; row < a.rows() * a.heads; ++row)
    std::fill_n(a.q.begin() + row * a.qk_dim, kDiffering, 0.0);
  for (std::int64_t s = 0; s + 1 < a.keys; s += 2) {
    const auto key = a.kv.begin() + s * a.qk_dim;
    std::copy(key + kDiffering, key + a.qk_dim, key + a.qk_dim + kDiffering);
  }
  // Neighbouring slots hold a pair, so that all of the pairs stand in a row together.
  for (std::int64_t i = 0; i < a.rows() * a.topk; ++i) a.indices[i] = i % a.topk ^ 1;
  return a;
}

/// Moves the keys of a pair as far apart as blocks of slots are, into blocks that kernels may give
/// to different warps. There are no keys where pairs are not complete.
Attention with_pairs_apart(Attention a) {
  constexpr std::int64_t kBlock = 64;
  for (std::int64_t i = 0; i < a.rows() * a.topk; ++i) {
    const std::int64_t slot = i % a.topk;
    const std::int64_t pair = slot / (2 * kBlock) * kBlock + slot % kBlock;
    const std::int64_t key = 2 * pair + slot / kBlock % 2;
    a.indices[i] = key / 2 * 2 + 1 < a.keys ? static_cast<std::int32_t>(key) : -1;
  }
  return a;
}

/// Gives every head a sink close to its largest logit, which leads every other one by `lead` and is
/// led by that in all others. Of one row.
Attention with_close_sinks(Attention a, double lead) {
  const Values all_q = as_stored(a.dtype, a.q);
  const Values all_k = as_stored(a.dtype, a.kv);
  Values sinks;
  for (std::int64_t h = 0; h < a.heads; ++h) {
    double largest = -INFINITY;
    for (const std::int32_t key : a.indices) {
      if (key < 0) continue;
      const auto q = all_q.begin() + h * a.qk_dim;
      const auto k = all_k.begin() + key * a.qk_dim;
      largest = std::max(largest, std::inner_product(q, q + a.qk_dim, k, 0.0));
    }
    sinks.push_back(a.scale * largest + (h % 2 == 0 ? -lead : lead));
  }
  a.sink = as_stored(DType::f32, sinks);
  return a;
}

/// Makes two keys lead all others, one of them by 2^-17 of the logit; every product is exact.
Attention with_close_leaders(Attention a, double logit) {
  std::fill(a.q.begin(), a.q.end(), 0.0);
  const std::int64_t channel = a.qk_dim - 2;
  const double q = a.dtype == DType::f16 ? 1.0 : std::exp2(std::round(std::log2(logit)));
  for (std::int64_t row = 0; row < a.rows() * a.heads; ++row)
    a.q[row * a.qk_dim + channel] = a.q[row * a.qk_dim + channel + 1] = q;
  a.scale = static_cast<float>(logit / q);
  for (std::int64_t s = 0; s < a.keys; ++s) {
    a.kv[s * a.qk_dim + channel] = s % 60 == 7 || s % 60 == 40 ? 1 : 0.5;
    a.kv[s * a.qk_dim + channel + 1] = s % 60 == 40 ? 0x1p-17 : 0;
  }
  for (std::int64_t i = 0; i < a.rows() * a.topk; ++i)
    a.indices[i] = static_cast<std::int32_t>(i % 60);
  return a;
}

/// Makes pairs of keys, of which one leads the other by `lead` in every row. Their products with q
/// differ in a single channel, but no sum of them is exact.
Attention with_close_pairs(Attention a, double lead) {
  constexpr std::int64_t kChannel = 8;  // the first that with_ties leaves alone
  a = with_ties(std::move(a));
  const double q = std::exp2(std::round(std::log2(lead / a.scale)));
  for (std::int64_t row = 0; row < a.rows() * a.heads; ++row) a.q[row * a.qk_dim + kChannel] = q;
  for (std::int64_t s = 0; s < a.keys; ++s) a.kv[s * a.qk_dim + kChannel] = s % 2;
  return a;
}

/// Makes the logits rise by steps along the slots, to `height` of the first head, and less with
/// every other head: kernels that keep a running maximum move it, head by head, at different slots.
/// Keys of a step tie.
Attention with_rising_logits(Attention a, double height) {
  const std::int64_t steps = 16;
  const std::int64_t channel = a.qk_dim - 1;
  std::fill(a.q.begin(), a.q.end(), 0.0);
  for (std::int64_t row = 0; row < a.rows() * a.heads; ++row) {
    a.q[row * a.qk_dim + channel] =
        height * static_cast<double>(a.heads - row % a.heads) / static_cast<double>(a.heads);
  }
  a.scale = 1;
  for (std::int64_t s = 0; s < a.keys; ++s) {
    a.kv[s * a.qk_dim + channel] =
        static_cast<double>(std::min(s, a.topk - 1) * steps / a.topk + 1) / steps;
  }
  for (std::int64_t i = 0; i < a.rows() * a.topk; ++i)
    a.indices[i] = static_cast<std::int32_t>(i % a.topk);
  return a;
}

/// The largest deviation keeps 1.45 times a logit of 5 deviations finite.
constexpr double kDeviations[] = {1e-30, 1e-10, 0.1, 1, 1e4, 1e6, 1e8, 1e10, 1e15, 1e25, 1e37};

TEST(LogitRange, ForwardIsRightAtEveryMagnitude) {
  on_each_type(2, [](const Execution& execution, const Attention& whole) {
    for (const double deviation : kDeviations) {
      SCOPED_TRACE(deviation);
      const Attention a = with_logits(whole, deviation);
      expect_close(a, forward(a, execution), plain_attention(a));
      const Attention sinks = with_sinks(a, deviation, 2);
      expect_close(sinks, forward(sinks, execution), plain_attention(sinks));
    }
  });
}

TEST(LogitRange, KeysThatTieShareARowAtEveryMagnitude) {
  on_each_type(3, [](const Execution& execution, const Attention& whole) {
    for (const double deviation : kDeviations) {
      SCOPED_TRACE(deviation);
      const Attention a = with_ties(with_logits(whole, deviation));
      expect_close(a, forward(a, execution), plain_attention(a));
    }
  });
}

TEST(LogitRange, ALeadOfAFewBitsIsSeen) {
  on_each_type(4, [](const Execution& execution, const Attention& whole) {
    for (const double logit : {1e3, 1.3e5, 1e6, 1.7e7, 1e9, 1e12, 1e37}) {
      SCOPED_TRACE(logit);
      const Attention a = with_close_leaders(whole, logit);
      expect_close(a, forward(a, execution), plain_attention(a));
    }
  });
}

// A key that ties with itself in another block of slots, as it would if it stood there.
TEST(LogitRange, KeysThatTieFarApartShareARowAtEveryMagnitude) {
  on_each_type(12, [](const Execution& execution, const Attention& whole) {
    for (const double deviation : {1e4, 1e6, 1e8, 1e10, 1e37}) {
      SCOPED_TRACE(deviation);
      const Attention a = with_pairs_apart(with_ties(with_logits(whole, deviation)));
      expect_close(a, forward(a, execution), plain_attention(a));
    }
  });
}

// In fp32 the sums of products are off by some 2^-22 of the logit. In double they are exact. No
// logit exceeds 8 deviations, so that leads of 2^-15 of one are at least 2^-18 of it.
bool rounds_products(const Execution& execution, const Attention& a) {
  return execution.backend != Backend::cuda || a.dtype == DType::f32;
}
constexpr double kLead = 0x1p-15;

void expect_rounding_not_to_tell(const Execution& execution, const Attention& whole) {
  if (rounds_products(execution, whole)) return;
  for (const double deviation : {3e3, 1e4, 3e4, 1e5}) {
    SCOPED_TRACE(deviation);
    const Attention a = with_close_pairs(with_logits(whole, deviation), kLead * deviation);
    expect_close(a, forward(a, execution), plain_attention(a));
    const Attention sinks = with_sinks(a, deviation, 10);
    expect_close(sinks, forward(sinks, execution), plain_attention(sinks));
  }
}
TEST(LogitRange, OnCudaTheRoundingOfProductsDoesNotTell) {
  if (!has_cuda()) GTEST_SKIP();
  on_each_type(10, expect_rounding_not_to_tell);
}
TEST(LogitRange, OnCudaTheRoundingOfProductsOfManyHeadsDoesNotTell) {
  if (!has_cuda()) GTEST_SKIP();
  on_each_type(10, expect_rounding_not_to_tell, shapes_of_many_heads);
}

TEST(LogitRange, OnCudaTheRoundingOfProductsDoesNotTellBesideASink) {
  if (!has_cuda()) GTEST_SKIP();
  on_each_type(
      13,
      [](const Execution& execution, const Attention& whole) {
        if (rounds_products(execution, whole)) return;
        for (const double deviation : {3e3, 3e4, 1e5}) {
          SCOPED_TRACE(deviation);
          const Attention a = with_close_sinks(with_logits(whole, deviation), kLead * deviation);
          expect_close(a, forward(a, execution), plain_attention(a));
        }
      },
      shapes_of_many_heads);
}

// Heads of which one key has all are made by the tensor cores alone, whatever others need.
TEST(LogitRange, OnCudaAHeadThatIsSharedLeavesOthersAlone) {
  if (!has_cuda()) GTEST_SKIP();
  on_each_type(
      14,
      [](const Execution& execution, const Attention& whole) {
        if (rounds_products(execution, whole)) return;
        const Attention tied = with_ties(with_logits(whole, 1e5));
        Attention parted = tied;
        const double away = std::abs(*std::max_element(tied.q.begin(), tied.q.end()));
        for (std::int64_t h = 0; h < whole.heads; ++h) parted.q[h * whole.qk_dim] = away;
        const AttentionOutputs expected = forward(parted, execution);
        for (const std::int64_t shared : {std::int64_t{0}, whole.heads / 2, whole.heads - 1}) {
          SCOPED_TRACE(shared);
          Attention one = parted;
          one.q[shared * whole.qk_dim] = 0;
          AttentionOutputs outputs = forward(one, execution);
          expect_close(one, outputs, plain_attention(one));
          const auto copy_head = [&](Values& to, const Values& from, std::int64_t width) {
            std::copy_n(from.begin() + shared * width, width, to.begin() + shared * width);
          };
          copy_head(outputs.out, expected.out, whole.v_dim);
          copy_head(outputs.lse, expected.lse, 1);
          copy_head(outputs.max_logits, expected.max_logits, 1);
          expect_same_bits(outputs, expected);
        }
      },
      shapes_of_many_heads);
}

TEST(LogitRange, ALogitOfMinusInfinityIsNone) {
  on_each_type(15, [](const Execution& execution, const Attention& whole) {
    if (whole.qk_dim == whole.v_dim) return;  // the value would be infinite, too
    Attention a = with_ties(with_logits(whole, 1e5));
    const std::int64_t channel = a.qk_dim - 1;
    for (std::int64_t row = 0; row < a.rows() * a.heads; ++row) a.q[row * a.qk_dim + channel] = 1;
    for (std::int64_t row = 0; row < a.rows(); ++row)
      a.kv[a.indices[row * a.topk] * a.qk_dim + channel] = -INFINITY;
    expect_close(a, forward(a, execution), plain_attention(a));
  });
}

TEST(LogitRange, RisingLogitsAreRight) {
  on_each_type(6, [](const Execution& execution, const Attention& whole) {
    for (const double height : {4.0, 5.5, 6.0, 8.0, 12.0, 40.0, 700.0, 3000.0}) {
      SCOPED_TRACE(height);
      const Attention a = with_rising_logits(whole, height);
      expect_close(a, forward(a, execution), plain_attention(a));
    }
  });
}

TEST(LogitRange, AHeadDoesNotDependOnWhatOthersReach) {
  on_each_type(7, [](const Execution& execution, const Attention& whole) {
    const std::int64_t last = whole.heads - 1;
    const std::int64_t end = whole.rows() * whole.heads;
    const auto of_last = [&](const AttentionOutputs& outputs) {
      AttentionOutputs result;
      for (std::int64_t row = last; row < end; row += whole.heads) {
        const auto out = outputs.out.begin() + row * whole.v_dim;
        result.out.insert(result.out.end(), out, out + whole.v_dim);
        result.lse.push_back(outputs.lse[row]);
        result.max_logits.push_back(outputs.max_logits[row]);
      }
      return result;
    };
    // What the last head reaches: a maximum that can stay, one that moves, and one that is large.
    for (const double own : {1.0, 8.0, 2000.0}) {
      SCOPED_TRACE(own);
      Attention alike = with_rising_logits(whole, own * static_cast<double>(whole.heads));
      const auto q_of = [&](auto& q, std::int64_t row) { return q.begin() + row * whole.qk_dim; };
      for (std::int64_t row = 0; row < end; ++row) {
        if (row % whole.heads == last) continue;
        std::copy_n(q_of(alike.q, row / whole.heads * whole.heads + last), whole.qk_dim,
                    q_of(alike.q, row));
      }
      const AttentionOutputs expected = of_last(forward(alike, execution));
      for (const double height : {40.0, 3000.0}) {
        SCOPED_TRACE(height);
        Attention mixed = with_rising_logits(whole, height);
        for (std::int64_t row = last; row < end; row += whole.heads)
          std::copy_n(q_of(alike.q, row), whole.qk_dim, q_of(mixed.q, row));
        expect_same_bits(of_last(forward(mixed, execution)), expected);
      }
    }
  });
}

TEST(LogitRange, NegativeScalesAreNoException) {
  on_each_type(5, [](const Execution& execution, const Attention& whole) {
    for (const double deviation : {1.0, 1e10, 1e37}) {
      SCOPED_TRACE(deviation);
      Attention a = with_logits(whole, deviation);
      a.scale = -a.scale;
      expect_close(a, forward(a, execution), plain_attention(a));
    }
  });
}

// Differences of the products overflow, those of the logits are small.
TEST(LogitRange, ProductsMayReachTheEndOfFp32) {
  on_each_type(6, [](const Execution& execution, const Attention& whole) {
    if (whole.dtype == DType::f16) return;
    Attention a = with_logits(whole, 1.5e37);
    a.scale *= 1e-37F;
    expect_close(a, forward(a, execution), plain_attention(a));
  });
}

// ---- Backward.

bool all_finite(const Values& values) {
  return std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); });
}

void expect_finite(const AttentionGradients& gradients) {
  EXPECT_TRUE(all_finite(gradients.d_q));
  EXPECT_TRUE(all_finite(gradients.d_kv));
  EXPECT_TRUE(all_finite(gradients.d_sink));
}

TEST(LogitRange, BackwardIsRightWhereLseIsPrecise) {
  on_each_type(7, [](const Execution& execution, const Attention& whole) {
    for (const double deviation : {1e-30, 1e-10, 0.1, 1.0, 10.0, 1000.0}) {
      // |lse| must be below 2^13, or 2^6 for fp32 inputs; f16 cannot hold the q of the smallest.
      if (whole.dtype == DType::f32 && deviation > 10) continue;
      if (whole.dtype == DType::f16 && deviation < 0.1) continue;
      SCOPED_TRACE(deviation);
      const Attention a = with_sinks(with_logits(whole, deviation), deviation, 7);
      expect_within_magnitudes(a, forward_backward(a, execution), gradients_in_double(a));
    }
  });
}

TEST(LogitRange, BackwardIsFiniteAtEveryMagnitude) {
  on_each_type(8, [](const Execution& execution, const Attention& whole) {
    for (const double deviation : kDeviations) {
      // The scale is a factor of d_q, which f16 could not hold.
      if (whole.dtype == DType::f16 && (deviation < 0.1 || deviation > 1e4)) continue;
      SCOPED_TRACE(deviation);
      Attention a = with_sinks(with_ties(with_logits(whole, deviation)), deviation, 8);
      for (double& value : a.d_out) value *= 0.01;  // q is a factor of d_kv
      expect_finite(forward_backward(a, execution));
      a.sink.clear();
      expect_finite(forward_backward(a, execution));
    }
  });
}

// ---- The dense loss.

TEST(LogitRange, TheDenseLossOfLargeLogitsIsThatOfItsLeaders) {
  on_each_backend([](Backend backend) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      SCOPED_TRACE(name(dtype));
      DenseLoss d = filled(DenseLoss{.dtype = dtype}, 9);
      for (double& value : d.q) value *= 1e4;  // one key has all of a row
      const Values expected = forward(d, on(backend)).loss;
      for (const double factor : {0x1p20, 0x1p40, 0x1p80, 0x1p100}) {
        SCOPED_TRACE(factor);
        DenseLoss larger = d;
        for (double& value : larger.q) value *= factor;
        const DenseLossOutputs outputs = forward(larger, on(backend));
        EXPECT_TRUE(ok(compare("loss", outputs.loss, expected, harness::loss_limit(dtype),
                               harness::at_least_one(expected))));
        const DenseLossGradients gradients = backward(larger, outputs.lse, on(backend));
        EXPECT_TRUE(all_finite(gradients.d_index_q));
        EXPECT_TRUE(all_finite(gradients.d_weights));
        EXPECT_TRUE(all_finite(gradients.d_index_k));
      }
    }
  });
}

}  // namespace
}  // namespace winnow::tests
