// SPDX-License-Identifier: Apache-2.0
// KeyFlops: how many operations each call of a layer does, as docs/performance.md counts them.
#pragma once

#include "harness/cases.h"

namespace winnow::harness {

/// For one key: of a window, or in a slot. `project` is for one query.
struct KeyFlops {
  explicit KeyFlops(const Case& c)
      : score(2.0 * c.index_heads * c.index_dim),
        score_backward(3 * score),
        attend(2.0 * c.heads * (c.qk_dim + c.v_dim)),
        attend_backward(2.0 * c.heads * (3 * c.qk_dim + 2 * c.v_dim)),
        target(2.0 * c.heads * c.qk_dim),
        project(2.0 * c.heads * c.head_dim * c.v_dim),
        project_backward(2 * project) {}

  double score, score_backward, attend, attend_backward, target, project, project_backward;
};

}  // namespace winnow::harness
