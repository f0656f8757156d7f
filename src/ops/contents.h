// SPDX-License-Identifier: Apache-2.0
// What index tensors must hold. Looked at in host memory only: on a device the kernels clamp, so
// that no call waits.
#pragma once

#include <cstdint>

#include "core/check.h"

namespace winnow {

/// cu_seqlens starts at 0 and does not decrease; cu_seqlens_padded likewise, with room for every
/// document; query_rows are -1 or more.
void check_documents(const Check& check, const Tensor& cu_seqlens, const Tensor& cu_seqlens_padded,
                     const Tensor& query_rows);
/// 0 <= begin <= end <= keys.
void check_windows(const Check& check, const Tensor& begin, const Tensor& end, std::int64_t keys);
/// 0 <= lengths <= topk.
void check_lengths(const Check& check, const Tensor& lengths, std::int64_t topk);

}  // namespace winnow
