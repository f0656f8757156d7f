// SPDX-License-Identifier: Apache-2.0
// Index lists of a sliding window and pooled entries.
//
// A warp makes the list of a row, 32 slots at a time: consecutive rows, then the pool entries in
// the row's window, compacted by a ballot, then -1. The limit is the bandwidth of writing the
// lists.
#include "backend_operators.h"
#include "cuda/windows/documents.cuh"

namespace winnow::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kRowsPerBlock = 8;
constexpr unsigned kAllLanes = 0xffffffffu;

struct Parameters {
  bool has_pool_ids;
  const std::int32_t* pool_ids;  // [tokens, pool_topk]
  std::int64_t pool_ids_stride;
  std::int64_t pool_topk;
  std::int32_t* indices;  // [tokens, topk]
  std::int64_t indices_stride;
  std::int32_t* lengths;  // [tokens]
  std::int64_t tokens;
  std::int64_t topk;
  std::int32_t window;
  std::int32_t ratio;
  std::int32_t key_offset;
};

/// Writes first, first + 1, ... to `count` slots.
__device__ void append_range(std::int32_t* slots, std::int64_t first, std::int64_t count,
                             int lane) {
  for (std::int64_t i = lane; i < count; i += kLanes) {
    slots[i] = static_cast<std::int32_t>(first + i);
  }
}

/// Appends the entries of `ids` in [begin, end) after `length` slots, up to topk, and returns the
/// new length.
__device__ std::int64_t append_chosen(const Parameters& parameters, std::int32_t* list,
                                      std::int64_t length, const std::int32_t* ids,
                                      std::int64_t begin, std::int64_t end, int lane) {
  for (std::int64_t first = 0; first < parameters.pool_topk; first += kLanes) {
    const std::int64_t entry = first + lane < parameters.pool_topk ? ids[first + lane] : -1;
    const bool is_chosen = entry >= begin && entry < end;
    const unsigned chosen = __ballot_sync(kAllLanes, is_chosen);
    const std::int64_t slot = length + __popc(chosen & ((1u << lane) - 1));
    if (is_chosen && slot < parameters.topk) {
      list[slot] = static_cast<std::int32_t>(parameters.key_offset + entry);
    }
    length += __popc(chosen);
  }
  return clamp(length, 0, parameters.topk);
}

__global__ void __launch_bounds__(kRowsPerBlock* kLanes)
    window_indices_kernel(Documents documents, Parameters parameters) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t step = std::int64_t{gridDim.x} * kRowsPerBlock;
  for (std::int64_t t = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kLanes;
       t < parameters.tokens; t += step) {
    std::int32_t* const list = parameters.indices + t * parameters.indices_stride;
    std::int64_t length = 0;
    const std::int64_t row = documents.row(t);
    const RowPlace place = documents.place(row);
    if (place.in_document && place.position < place.real_length) {
      const std::int64_t first_row =
          clamp(row - parameters.window + 1, place.document_begin, row + 1);
      length = clamp(row + 1 - first_row, 0, parameters.topk);
      append_range(list, first_row, length, lane);

      const std::int64_t seen = parameters.ratio > 0 ? (place.position + 1) / parameters.ratio : 0;
      const std::int64_t pool_end =
          clamp(place.pool_begin + seen, 0, kMaxInt32 - parameters.key_offset);
      if (parameters.has_pool_ids) {
        length = append_chosen(parameters, list, length,
                               parameters.pool_ids + t * parameters.pool_ids_stride,
                               place.pool_begin, pool_end, lane);
      } else {
        const std::int64_t count = clamp(pool_end - place.pool_begin, 0, parameters.topk - length);
        append_range(list + length, parameters.key_offset + place.pool_begin, count, lane);
        length += count;
      }
    }
    if (lane == 0) parameters.lengths[t] = static_cast<std::int32_t>(length);
    for (std::int64_t j = length + lane; j < parameters.topk; j += kLanes) list[j] = -1;
  }
}

bool has_pools(const WindowIndices& args) { return args.ratio > 0; }

std::size_t workspace_bytes(const WindowIndices& args, const Execution&) {
  return Workspace::bytes({pool_bytes(args.cu_seqlens, has_pools(args))});
}

std::string why_not(const WindowIndices& args, const Execution& execution) {
  return over_limit(cuda::workspace_bytes(args, execution), execution);
}

void run(const WindowIndices& args, const Execution& execution) {
  const DeviceGuard guard(args.indices.device);
  Workspace workspace(execution, cuda::workspace_bytes(args, execution));
  const Documents documents =
      make_documents(args.cu_seqlens, args.cu_seqlens_padded, args.query_rows, args.ratio,
                     has_pools(args), workspace, execution.stream);
  launch(window_indices_kernel,
         {.blocks = blocks_for(args.indices.shape[0], kRowsPerBlock),
          .threads = kRowsPerBlock * kLanes,
          .stream = execution.stream},
         documents,
         Parameters{.has_pool_ids = bool(args.pool_ids),
                    .pool_ids = data_of<const std::int32_t>(args.pool_ids),
                    .pool_ids_stride = args.pool_ids.stride[0],
                    .pool_topk = args.pool_ids ? args.pool_ids.shape[1] : 0,
                    .indices = data_of<std::int32_t>(args.indices),
                    .indices_stride = args.indices.stride[0],
                    .lengths = data_of<std::int32_t>(args.lengths),
                    .tokens = args.indices.shape[0],
                    .topk = args.indices.shape[1],
                    .window = args.window,
                    .ratio = args.ratio,
                    .key_offset = args.key_offset});
}

}  // namespace

Kernels<WindowIndices> kernels(std::type_identity<WindowIndices>) {
  static constexpr Kernel<WindowIndices> kKernels[] = {{"general", why_not, workspace_bytes, run}};
  return kKernels;
}

}  // namespace winnow::cuda
