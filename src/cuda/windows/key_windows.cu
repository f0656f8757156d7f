// SPDX-License-Identifier: Apache-2.0
// Key windows of packed documents. A thread finds the document of a row by binary search. The limit
// is the latency of that search; a batch makes one such call.
#include "backend_operators.h"
#include "cuda/windows/documents.cuh"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 256;

struct Parameters {
  std::int32_t* begin;  // [tokens]
  std::int32_t* end;    // [tokens]
  std::int64_t tokens;
  std::int32_t ratio;
  bool padding_sees_document;
};

bool has_pools(const KeyWindows& args) { return args.ratio > 1; }

__global__ void __launch_bounds__(kThreads)
    key_windows_kernel(Documents documents, Parameters parameters) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t t = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; t < parameters.tokens;
       t += step) {
    const RowPlace place = documents.place(documents.row(t));
    const bool is_padding = place.position >= place.real_length;
    const bool sees_keys = place.in_document && (!is_padding || parameters.padding_sees_document);
    const std::int64_t first = parameters.ratio == 1 ? place.document_begin : place.pool_begin;
    std::int64_t seen = 0;
    if (sees_keys) {
      seen = clamp(place.position + 1, 0, place.real_length) / parameters.ratio;
      if (is_padding && parameters.ratio == 1 && seen == 0) seen = 1;
    }
    parameters.begin[t] = static_cast<std::int32_t>(first);
    parameters.end[t] = static_cast<std::int32_t>(clamp(first + seen, 0, kMaxInt32));
  }
}

std::size_t workspace_bytes(const KeyWindows& args, const Execution&) {
  return Workspace::bytes({pool_bytes(args.cu_seqlens, has_pools(args))});
}

std::string why_not(const KeyWindows& args, const Execution& execution) {
  return over_limit(cuda::workspace_bytes(args, execution), execution);
}

void run(const KeyWindows& args, const Execution& execution) {
  const DeviceGuard guard(args.begin.device);
  Workspace workspace(execution, cuda::workspace_bytes(args, execution));
  const Documents documents =
      make_documents(args.cu_seqlens, args.cu_seqlens_padded, args.query_rows, args.ratio,
                     has_pools(args), workspace, execution.stream);
  launch(key_windows_kernel,
         {.blocks = blocks_for(args.begin.shape[0], kThreads),
          .threads = kThreads,
          .stream = execution.stream},
         documents,
         Parameters{.begin = data_of<std::int32_t>(args.begin),
                    .end = data_of<std::int32_t>(args.end),
                    .tokens = args.begin.shape[0],
                    .ratio = args.ratio,
                    .padding_sees_document = args.padding_rows == PaddingRows::see_document});
}

}  // namespace

Kernels<KeyWindows> kernels(std::type_identity<KeyWindows>) {
  static constexpr Kernel<KeyWindows> kKernels[] = {{"general", why_not, workspace_bytes, run}};
  return kKernels;
}

}  // namespace winnow::cuda
