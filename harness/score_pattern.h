// SPDX-License-Identifier: Apache-2.0
// The indexer's inputs of a ScorePattern, made from independent ones.
#pragma once

#include <cstdint>

#include "harness/cases.h"
#include "harness/memory.h"

namespace winnow::harness {

/// Whether some keys hold NaN, and whether this one does.
bool has_nan_keys(const Case& c);
bool holds_nan(const Case& c, std::int64_t key);

/// A number that keys share which are the same, or -1 where no two are meant to be.
std::int64_t twin_of(const Case& c, std::int64_t key);

/// A factor of the whole key, which fp8 has in its scale.
double key_factor(const Case& c, std::int64_t key);

/// `keys` are independent ones, without the factor; each line is a key.
Values patterned_keys(const Case& c, Values keys);
/// `keys` are patterned ones; each line is a head of a query row.
Values patterned_queries(const Case& c, Values queries, Values keys);
Values patterned_weights(const Case& c, Values weights);

}  // namespace winnow::harness
