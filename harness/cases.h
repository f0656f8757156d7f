// SPDX-License-Identifier: Apache-2.0
// Case: the named shapes on which every op is checked and timed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "winnow/tensor.h"

namespace winnow::harness {

/// How the index lists of a case are drawn.
enum class Slots : std::int32_t {
  ascending,
  shuffled,
  neighbours,   // a row keeps each key of the row before it with probability 0.9; ascending
  selected,     // as an indexer over a smooth sequence selects them; ascending
  with_repeats  // a key may stand more than once in a row
};

/// What the scores of the indexer look like along a row.
enum class ScorePattern : std::int32_t {
  independent,
  smooth10,    // neighbouring keys are alike; a key forgets over 10 rows
  smooth1000,  // or over 1000
  recency,     // later keys score higher
  reversed,    // earlier ones do
  outliers,    // 64 keys score far above the others
  ties,        // there are 64 different keys
  blocks,      // parts of the row have scores of very different magnitudes
  equal,       // all keys are the same
  zero_weights,
  half_nan,  // every other key is NaN
  one_sign,
  clusters,  // a third of the keys is almost the same, far above the others
  last_bits  // scores differ in their last bits alone
};

/// A shape and a character. The defaults are a small latent attention over three packed documents;
/// every awkward case changes what it is about and nothing else.
struct Case {
  std::string name;

  std::int64_t tokens = 48;     // query rows
  std::int64_t rows = 64;       // rows of the packed batch; fewer tokens: those of the last rows
  std::int64_t documents = 3;   // more than one: uneven, one is empty, and rows follow the last
  bool even_documents = false;  // all of one length instead, up to the last row
  std::int64_t batch = 0;  // sparse_attention: slices of a leading dimension; 0: no such dimension
  std::int64_t heads = 4;
  std::int64_t qk_dim = 72;
  std::int64_t v_dim = 64;
  std::int64_t topk = 16;  // slots of attention: window + index_topk()
  std::int64_t index_heads = 4;
  std::int64_t index_dim = 32;
  std::int64_t head_dim = 24;  // of the value projection; 0: none
  std::int32_t ratio = 1;      // rows per index key; more than 1: keys are [rows | pools]
  std::int32_t window = 0;     // sliding window of rows
  float scale = 0.125F;        // 0: the default of sparse_attention
  bool sink = false;
  DType dtype = DType::bf16;

  Slots slots = Slots::ascending;
  bool holes = false;          // some slots are -1 or out of range
  bool no_valid_slot = false;  // all of them are
  bool lengths = false;        // index lists come with lengths
  bool empty_rows = false;     // every third row sees no key
  bool padded = false;         // documents carry padding rows
  bool extreme_sinks = false;  // -inf, +inf and far above the scores
  bool extras = true;          // the optional max_logits and d_lse are there
  bool exact_scores = false;  // indexer inputs are small integers: sums are exact and ties are many
  ScorePattern score_pattern = ScorePattern::independent;
  bool index_scores = true;      // index_topk returns scores too
  bool nan_keys = false;         // some index keys that rows may see hold NaN
  std::int64_t row_padding = 0;  // elements between the end of an innermost row and the next one

  bool full = false;  // a model's own size: only sampled rows are compared
  bool slow = false;  // large in some other way: likewise, and left out of quick runs

  /// Whether queries come with their global rows; otherwise they are the rows 0, 1, 2, ...
  bool has_query_rows() const { return tokens != rows || empty_rows; }
  bool has_pools() const { return ratio > 1; }
  std::int64_t pools() const { return has_pools() ? rows / ratio : 0; }
  std::int64_t keys() const { return rows + pools(); }
  std::int64_t index_keys() const { return has_pools() ? pools() : rows; }
  std::int64_t index_topk() const { return topk - window; }
  /// Where the index keys begin among the keys of attention.
  std::int32_t key_offset() const { return has_pools() ? static_cast<std::int32_t>(rows) : 0; }
  /// `scale`, or what sparse_attention takes for 0.
  float attention_scale() const;
};

const std::vector<Case>& cases();

/// Throws std::invalid_argument that lists the names for one that is none.
const Case& find_case(std::string_view name);

}  // namespace winnow::harness
