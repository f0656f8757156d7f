// SPDX-License-Identifier: Apache-2.0
// Index lists as an indexer selects them.
#pragma once

#include <cstdint>
#include <vector>

namespace winnow::harness {

/// Lists [rows, topk] of the last `rows` rows of a document of `keys` rows whose keys change
/// slowly, over some 300 rows, and whose queries are like the keys of their own rows: what
/// index_topk selects for each among the keys up to its own. Ascending; -1 where there are fewer.
/// Of 2048 keys neighbouring rows share 0.8 (8k keys) to 0.6 (128k), rows that are 66 apart 0.6 to
/// 0.35. Rows in front of the document see its first key, and rows of which too few keys have a
/// positive score take the first ones for the others. With a `ratio` keys are pools of so many
/// rows.
std::vector<std::int32_t> selected_lists(std::uint64_t seed, std::int64_t rows, std::int64_t keys,
                                         std::int64_t topk, std::int64_t ratio = 1);

}  // namespace winnow::harness
