// SPDX-License-Identifier: Apache-2.0
// Whether a sanitizer makes this build slow and its memory large.
#pragma once

namespace winnow::tests {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace winnow::tests
