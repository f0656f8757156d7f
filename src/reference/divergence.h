// SPDX-License-Identifier: Apache-2.0
// The KL divergence of index_loss and dense_index_loss, for one row.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>

#include "reference/softmax.h"

namespace winnow::reference {

/// KL(target / sum target || softmax(scores)) over the entries whose score is not -inf; d_scores is
/// its gradient, 0 elsewhere. Both are 0 where there are fewer than two entries or the target sums
/// to 0.
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

  const double log_sum = log_sum_exp(scores);
  double loss = 0;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    if (scores[j] == kMinusInfinity) continue;
    const double wanted = target[j] / sum;
    if (wanted != 0) loss += wanted * (std::log(wanted) - (scores[j] - log_sum));
    d_scores[j] = std::exp(scores[j] - log_sum) - wanted;
  }
  return loss;
}

}  // namespace winnow::reference
