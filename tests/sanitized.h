// SPDX-License-Identifier: Apache-2.0
// Whether the library of this build has sanitizers, which make it slow and its memory large.
#pragma once

namespace winnow::tests {

#if defined(WINNOW_SANITIZED_LIBRARY) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace winnow::tests
