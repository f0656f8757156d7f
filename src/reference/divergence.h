// SPDX-License-Identifier: Apache-2.0
// The KL divergence of one row, for index_loss and dense_index_loss.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>

#include "reference/softmax.h"

namespace winnow::reference {

/// Returns KL(target / sum target || softmax(scores)) over the entries whose score is not -inf, and
/// writes its gradient to d_scores, 0 for all other entries. Loss and gradient are 0 if there are
/// fewer than two such entries or the target sums to 0.
inline double divergence(std::span<const double> scores, std::span<const double> target,
                         std::span<double> d_scores) {
  std::fill(d_scores.begin(), d_scores.end(), 0.0);
  std::size_t valid = 0;
  double sum = 0;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    if (scores[j] == kMinusInfinity) continue;
    ++valid;
    sum += target[j];
  }
  if (valid < 2 || sum == 0) return 0;

  const Softmax softmax(scores);
  double loss = 0;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    if (scores[j] == kMinusInfinity) continue;
    const double p_target = target[j] / sum;
    const double log_softmax = softmax.log_probability(scores[j]);
    if (p_target != 0) loss += p_target * (std::log(p_target) - log_softmax);
    d_scores[j] = std::exp(log_softmax) - p_target;
  }
  return loss;
}

}  // namespace winnow::reference
