// SPDX-License-Identifier: Apache-2.0
// Attention over selected keys. Variables are named as in the formulas of
// winnow/sparse_attention.h.
#include <algorithm>

#include "backend_operators.h"
#include "core/check.h"
#include "core/rows.h"
#include "core/threads.h"
#include "reference/key_gradients.h"
#include "reference/linear.h"
#include "reference/slots.h"
#include "reference/softmax.h"

namespace winnow::reference {
namespace {

struct Sizes {
  std::int64_t tokens, heads, qk_dim, v_dim, keys, topk;
};

template <class Args>
Sizes sizes(const Args& args) {
  return {args.q.shape[0],   args.q.shape[1],  args.q.shape[2],
          args.out.shape[2], args.kv.shape[0], args.indices.shape[1]};
}

/// The inputs of backward for one query row and the key that is loaded.
class GradientRow {
 public:
  static std::size_t bytes(const Sizes& n) {
    return Scratch::bytes<double>(n.heads * n.qk_dim) +
           2 * Scratch::bytes<double>(n.heads * n.v_dim) + 4 * Scratch::bytes<double>(n.heads) +
           Scratch::bytes<double>(n.qk_dim);
  }

  GradientRow(const SparseAttentionBackward& args, Scratch& scratch)
      : args_(args),
        n_(sizes(args)),
        q_(scratch.take<double>(n_.heads * n_.qk_dim)),
        out_(scratch.take<double>(n_.heads * n_.v_dim)),
        d_out_(scratch.take<double>(n_.heads * n_.v_dim)),
        lse_(scratch.take<double>(n_.heads)),
        share_(scratch.take<double>(n_.heads)),
        delta_(scratch.take<double>(n_.heads)),
        d_lse_(scratch.take<double>(n_.heads)),
        key_(scratch.take<double>(n_.qk_dim)) {}

  void load(std::int64_t t) {
    read_row(args_.lse, {t}, lse_);
    std::fill(d_lse_.begin(), d_lse_.end(), 0.0);
    if (args_.d_lse) read_row(args_.d_lse, {t}, d_lse_);
    for (std::int64_t h = 0; h < n_.heads; ++h) {
      read_row(args_.q, {t, h}, q(h));
      read_row(args_.out, {t, h}, row(out_, h, n_.v_dim));
      read_row(args_.d_out, {t, h}, d_out(h));
      const double sink = args_.sink ? read(args_.sink, {h}) : kMinusInfinity;
      share_[h] = sink == kMinusInfinity ? 1 : 1 / (1 + std::exp(sink - lse_[h]));
      delta_[h] = dot(row(out_, h, n_.v_dim), d_out(h));
    }
  }
  void load_key(std::int64_t s) { read_row(args_.kv, {s}, key_); }

  struct Slot {
    double p, dS;
  };
  /// p and dS of head h and the loaded key.
  Slot slot(std::int64_t h) const {
    const double s = args_.scale * dot(q(h), key_);
    const double of_keys = probability(s, lse_[h]);
    const double p = share_[h] * of_keys;
    const double dP = dot(d_out(h), value());
    return {p, p * (dP - delta_[h]) + of_keys * d_lse_[h]};
  }

  std::span<double> q(std::int64_t h) const { return row(q_, h, n_.qk_dim); }
  std::span<double> d_out(std::int64_t h) const { return row(d_out_, h, n_.v_dim); }
  std::span<const double> key() const { return key_; }
  std::span<const double> value() const { return key_.first(static_cast<std::size_t>(n_.v_dim)); }
  double delta(std::int64_t h) const { return delta_[h]; }

 private:
  const SparseAttentionBackward& args_;
  Sizes n_;
  std::span<double> q_, out_, d_out_, lse_;
  std::span<double> share_;  // exp(lse - L), what the sink leaves to the keys
  std::span<double> delta_, d_lse_, key_;
};

std::size_t d_q_scratch_bytes(const SparseAttentionBackward& args) {
  const Sizes n = sizes(args);
  return GradientRow::bytes(n) + Scratch::bytes<double>(n.heads * n.qk_dim);
}

void compute_d_q(const SparseAttentionBackward& args, const Execution& execution) {
  const Sizes n = sizes(args);
  const Slots slots(args.indices, args.lengths, n.keys);
  parallel_for(execution, n.tokens, d_q_scratch_bytes(args), [&](std::int64_t t, Scratch scratch) {
    GradientRow gradient(args, scratch);
    const std::span<double> d_q = scratch.take<double>(n.heads * n.qk_dim);
    std::fill(d_q.begin(), d_q.end(), 0.0);
    gradient.load(t);
    for (std::int64_t j = 0; j < slots.count(t); ++j) {
      const std::int64_t key = slots.key(t, j);
      if (key == kNoKey) continue;
      gradient.load_key(key);
      for (std::int64_t h = 0; h < n.heads; ++h) {
        add_scaled(row(d_q, h, n.qk_dim), args.scale * gradient.slot(h).dS, gradient.key());
      }
    }
    for (std::int64_t h = 0; h < n.heads; ++h) write_row(args.d_q, {t, h}, row(d_q, h, n.qk_dim));
  });
}

// max_heads_per_pass has no effect here: all heads are accumulated in double and rounded once.
void compute_d_kv(const SparseAttentionBackward& args, const Execution& execution) {
  const Sizes n = sizes(args);
  const Slots slots(args.indices, args.lengths, n.keys);
  sum_key_gradients(args.d_kv, accumulation_type(args.q.dtype), GradientRow::bytes(n), execution,
                    [&](const KeySums& d_kv, Scratch scratch) {
                      GradientRow gradient(args, scratch);
                      for (std::int64_t t = 0; t < n.tokens; ++t) {
                        bool loaded = false;
                        for (std::int64_t j = 0; j < slots.count(t); ++j) {
                          const std::int64_t key = slots.key(t, j);
                          if (!d_kv.contain(key)) continue;
                          if (!loaded) gradient.load(t);
                          loaded = true;
                          gradient.load_key(key);
                          const std::span<double> sum = d_kv.of(key);
                          const std::span<double> value_sum =
                              sum.first(static_cast<std::size_t>(n.v_dim));
                          for (std::int64_t h = 0; h < n.heads; ++h) {
                            const auto [p, dS] = gradient.slot(h);
                            add_scaled(sum, args.scale * dS, gradient.q(h));
                            add_scaled(value_sum, p, gradient.d_out(h));
                          }
                        }
                      }
                    });
}

void compute_d_sink(const SparseAttentionBackward& args, const Execution& execution) {
  const Sizes n = sizes(args);
  const Slots slots(args.indices, args.lengths, n.keys);
  parallel_for(execution, n.heads, 2 * Scratch::bytes<double>(n.v_dim),
               [&](std::int64_t h, Scratch scratch) {
                 const std::span<double> out = scratch.take<double>(n.v_dim);
                 const std::span<double> d_out = scratch.take<double>(n.v_dim);
                 const double sink = read(args.sink, {h});
                 double d_sink = 0;
                 for (std::int64_t t = 0; t < n.tokens; ++t) {
                   const double lse = read(args.lse, {t, h});
                   if (!slots.has_key(t) || std::isinf(sink))
                     continue;  // the row has no keys, there is no sink (-inf), or out is 0 (+inf)
                   read_row(args.out, {t, h}, out);
                   read_row(args.d_out, {t, h}, d_out);
                   d_sink -= dot(out, d_out) * std::exp(sink - log_add_exp(lse, sink));
                 }
                 write(args.d_sink, {h}, read(args.d_sink, {h}) + d_sink);
               });
}

}  // namespace

std::size_t scratch_bytes(const SparseAttentionForward& args, const Execution&) {
  const Sizes n = sizes(args);
  return Scratch::bytes<double>(n.heads * n.qk_dim) + Scratch::bytes<double>(n.heads * n.topk) +
         Scratch::bytes<double>(n.heads * n.v_dim) + Scratch::bytes<double>(n.qk_dim);
}

void run(const SparseAttentionForward& args, const Execution& execution) {
  const Sizes n = sizes(args);
  const Slots slots(args.indices, args.lengths, n.keys);
  parallel_for(execution, n.tokens, scratch_bytes(args, execution),
               [&](std::int64_t t, Scratch scratch) {
                 const std::span<double> q = scratch.take<double>(n.heads * n.qk_dim);
                 const std::span<double> s = scratch.take<double>(n.heads * n.topk);  // later p
                 const std::span<double> out = scratch.take<double>(n.heads * n.v_dim);
                 const std::span<double> key = scratch.take<double>(n.qk_dim);

                 for (std::int64_t h = 0; h < n.heads; ++h)
                   read_row(args.q, {t, h}, row(q, h, n.qk_dim));
                 for (std::int64_t j = 0; j < n.topk; ++j) {
                   const std::int64_t i = slots.key(t, j);
                   if (i != kNoKey) read_row(args.kv, {i}, key);
                   for (std::int64_t h = 0; h < n.heads; ++h) {
                     row(s, h, n.topk)[j] =
                         i == kNoKey ? kMinusInfinity : args.scale * dot(row(q, h, n.qk_dim), key);
                   }
                 }

                 for (std::int64_t h = 0; h < n.heads; ++h) {
                   const std::span<double> s_of_head = row(s, h, n.topk);
                   const Softmax softmax(s_of_head);
                   const double sink = args.sink ? read(args.sink, {h}) : kMinusInfinity;
                   write(args.lse, {t, h}, softmax.lse());
                   if (args.max_logits) {
                     double largest = kMinusInfinity;
                     for (const double value : s_of_head)
                       largest = std::fmax(largest, value);  // ignores NaN
                     write(args.max_logits, {t, h}, largest);
                   }
                   for (double& value : s_of_head) value = softmax.probability(value, sink);
                 }

                 std::fill(out.begin(), out.end(), 0.0);
                 for (std::int64_t j = 0; j < n.topk; ++j) {
                   const std::int64_t i = slots.key(t, j);
                   if (i == kNoKey) continue;
                   read_row(args.kv, {i}, key);
                   for (std::int64_t h = 0; h < n.heads; ++h) {
                     add_scaled(row(out, h, n.v_dim), row(s, h, n.topk)[j], key);
                   }
                 }
                 for (std::int64_t h = 0; h < n.heads; ++h)
                   write_row(args.out, {t, h}, row(out, h, n.v_dim));
               });
}

std::size_t scratch_bytes(const SparseAttentionBackward& args, const Execution& execution) {
  return std::max(
      d_q_scratch_bytes(args),
      key_gradient_scratch_bytes(args.d_kv, GradientRow::bytes(sizes(args)), execution));
}

void run(const SparseAttentionBackward& args, const Execution& execution) {
  compute_d_q(args, execution);
  compute_d_kv(args, execution);
  if (args.d_sink) compute_d_sink(args, execution);
}

}  // namespace winnow::reference
