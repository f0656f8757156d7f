// SPDX-License-Identifier: Apache-2.0
// The indexer's score of a key and its gradients, shared by index_topk and dense_index_loss.
#pragma once

#include <cmath>
#include <span>

#include "core/rows.h"
#include "core/threads.h"
#include "reference/linear.h"

namespace winnow::reference {

/// One query row of the indexer and the key that it is scored against.
class IndexRow {
 public:
  static std::size_t bytes(const Tensor& q) {
    return Scratch::bytes<double>(q.shape[1] * q.shape[2]) + Scratch::bytes<double>(q.shape[1]) +
           Scratch::bytes<double>(q.shape[2]);
  }

  IndexRow(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& k_scale,
           Scratch& scratch)
      : q_tensor_(q),
        k_tensor_(k),
        weights_tensor_(weights),
        k_scale_(k_scale),
        heads_(q.shape[1]),
        dim_(q.shape[2]),
        q_(scratch.take<double>(heads_ * dim_)),
        weights_(scratch.take<double>(heads_)),
        key_(scratch.take<double>(dim_)) {}

  void load(std::int64_t t) {
    for (std::int64_t h = 0; h < heads_; ++h) read_row(q_tensor_, {t, h}, row(q_, h, dim_));
    read_row(weights_tensor_, {t}, weights_);
  }
  void load_key(std::int64_t s) {
    read_row(k_tensor_, {s}, key_);
    if (!k_scale_) return;
    const double scale = read(k_scale_, {s});
    for (double& value : key_) value *= scale;
  }

  /// The score of the loaded key.
  double score() const {
    double sum = 0;
    for (std::int64_t h = 0; h < heads_; ++h) sum += weights_[h] * relu(dot_with_key(h));
    return sum;
  }

  /// Adds to d_q [heads, dim] and d_weights [heads] the gradients through the loaded key's score,
  /// whose own gradient is d_score.
  void add_query_gradient(double d_score, std::span<double> d_q,
                          std::span<double> d_weights) const {
    for (std::int64_t h = 0; h < heads_; ++h) {
      const double a = dot_with_key(h);
      d_weights[h] += d_score * relu(a);
      if (a > 0) add_scaled(row(d_q, h, dim_), d_score * weights_[h], key_);
    }
  }
  /// Adds to d_k [dim] the gradient through the same score.
  void add_key_gradient(double d_score, std::span<double> d_k) const {
    for (std::int64_t h = 0; h < heads_; ++h) {
      if (dot_with_key(h) > 0) add_scaled(d_k, d_score * weights_[h], row(q_, h, dim_));
    }
  }

 private:
  static double relu(double a) { return a > 0 || std::isnan(a) ? a : 0; }
  double dot_with_key(std::int64_t h) const { return dot(row(q_, h, dim_), key_); }

  const Tensor& q_tensor_;
  const Tensor& k_tensor_;
  const Tensor& weights_tensor_;
  const Tensor& k_scale_;
  std::int64_t heads_;
  std::int64_t dim_;
  std::span<double> q_, weights_, key_;
};

}  // namespace winnow::reference
