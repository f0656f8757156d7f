// SPDX-License-Identifier: Apache-2.0
// Stands in for the cuda backend in a build without CUDA.
#include "backend.h"

namespace winnow {

const BackendTable* find_cuda_backend() { return nullptr; }

}  // namespace winnow
