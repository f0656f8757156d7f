// SPDX-License-Identifier: Apache-2.0
// The number of pool entries before each document.
//
// One block walks over the documents, 256 at a time, and computes a prefix sum of their entries:
// there are few documents beside the rows.
#include <cub/block/block_scan.cuh>

#include "cuda/windows/documents.cuh"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    pool_begins_kernel(Documents documents, std::int32_t ratio, std::int32_t* pool_begins) {
  using Scan = cub::BlockScan<std::int64_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  std::int64_t before = 0;  // entries of the documents of earlier rounds
  for (std::int64_t first = 0; first < documents.count; first += kThreads) {
    const std::int64_t i = first + threadIdx.x;
    std::int64_t begin = i < documents.count ? documents.real_length(i) / ratio : 0;
    std::int64_t entries = 0;
    Scan(storage).ExclusiveSum(begin, begin, entries);
    if (i < documents.count) {
      pool_begins[i] = static_cast<std::int32_t>(clamp(before + begin, 0, kMaxInt32));
    }
    before += entries;
    __syncthreads();  // the next round's scan overwrites storage that this one may still read
  }
}

}  // namespace

Documents make_documents(const Tensor& cu_seqlens, const Tensor& cu_seqlens_padded,
                         const Tensor& query_rows, std::int32_t ratio, bool has_pools,
                         Workspace& workspace, cudaStream_t stream) {
  const Tensor& padded = cu_seqlens_padded ? cu_seqlens_padded : cu_seqlens;
  Documents documents{.real = data_of<const std::int32_t>(cu_seqlens),
                      .padded = data_of<const std::int32_t>(padded),
                      .query_rows = data_of<const std::int32_t>(query_rows),
                      .pool_begins = nullptr,
                      .count = cu_seqlens.shape[0] - 1};
  if (has_pools) {
    auto* const begins = workspace.take<std::int32_t>(cu_seqlens.shape[0]);
    launch(pool_begins_kernel, {.blocks = 1, .threads = kThreads, .stream = stream}, documents,
           ratio, begins);
    documents.pool_begins = begins;
  }
  return documents;
}

}  // namespace winnow::cuda
