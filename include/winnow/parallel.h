// SPDX-License-Identifier: Apache-2.0
// Context parallel: one batch of rows over many ranks. Every rank holds some rows of the batch,
// their queries and their keys; kernels stay those of one rank. Before them the keys of all ranks
// are gathered into global order, after them the gradients of all keys are summed over ranks, in
// fp32.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "winnow/execution.h"
#include "winnow/tensor.h"

struct ncclComm;  // ncclComm_t without its header

namespace winnow {

/// What a communicator has moved since it was made, in bytes of this rank: what it took from and
/// what it gave to other ranks.
struct Traffic {
  std::int64_t gathered = 0;  // received by all_gather
  std::int64_t reduced = 0;   // sent by reduce_scatter
};

/// The ranks that share a batch. Collectives are called by all ranks in the same order; every one
/// of them compares what the ranks ask for, and a difference is an Error on every rank, not a hang.
/// CPU tensors: a call returns when it is done. CUDA tensors: it is enqueued on the stream, and
/// `wait` finds what failed. Tensors are contiguous. Error(invalid_argument) comes before anything
/// is sent; after any other Error a communicator is broken: all later calls throw.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// whole [sum of rows, width] = the shards [rows[r], width] of all ranks r in their order, of any
  /// type.
  virtual void all_gather(const Tensor& shard, const Tensor& whole,
                          std::span<const std::int64_t> rows, const Execution& execution) = 0;
  /// shard [rows[rank], width] = this rank's rows of the sum of all ranks' whole [sum of rows,
  /// width]; f32.
  virtual void reduce_scatter(const Tensor& whole, const Tensor& shard,
                              std::span<const std::int64_t> rows, const Execution& execution) = 0;
  /// Blocks until what was enqueued on the stream is done. Throws Error(communication) if it
  /// failed, or if a rank did not answer within the time-out that the communicator was made with.
  virtual void wait(const Execution& execution) = 0;
  virtual Traffic traffic() const = 0;

  /// Mixes a number into the history of this rank, which every collective compares: for what ranks
  /// must agree on beside its arguments.
  void remember(std::uint64_t what);

 protected:
  std::uint64_t history() const { return history_; }

 private:
  std::uint64_t history_ = 0;
};

inline constexpr std::chrono::milliseconds kCommunicationTimeout{20'000};

/// Over an NCCL communicator of the caller, for CUDA tensors. libnccl is opened at run time. The
/// time-out counts from `wait`. A broken communicator has been given to ncclCommAbort: it must not
/// be destroyed again. NCCL connects ranks in the first collective; one that may find a rank
/// missing then needs a communicator that does not block (ncclConfig_t.blocking = 0).
/// Throws Error(unsupported) if this build has no CUDA or the machine no libnccl.
std::unique_ptr<Communicator> nccl_communicator(
    ncclComm* comm, std::chrono::milliseconds timeout = kCommunicationTimeout);
/// Over a pointer to an MPI_Comm of the caller, which is duplicated; all ranks make theirs
/// together. CUDA tensors go through host memory. The time-out counts for every collective. Once it
/// has passed, MPI_Finalize would wait for the missing rank: end the job with MPI_Abort. Throws
/// Error(unsupported) if this build has no MPI.
std::unique_ptr<Communicator> mpi_communicator(
    const void* comm, std::chrono::milliseconds timeout = kCommunicationTimeout);

enum class Sharding : std::int32_t {
  contiguous,  // rank r of n holds the rows [r*T/n, (r+1)*T/n)
  zigzag       // rank r holds the chunks r and 2n-1-r of the 2n of each document: equal causal work
};

/// The global rows of every rank, ascending; rows[rank] is what KeyWindows::query_rows takes.
struct Shards {
  std::vector<std::vector<std::int32_t>> rows;
};

/// Cuts the rows of a batch, once per batch and the same on every rank. Chunk sizes of a document
/// differ by at most one row, or by one `multiple` where chunks are asked to begin at multiples of
/// so many rows of their document (pools). Rows past the last document, up to `tokens`, count as
/// one more document.
Shards shard_rows(std::span<const std::int32_t> cu_seqlens, std::int64_t tokens, int ranks,
                  Sharding sharding, int multiple = 1);

/// whole [tokens, ...] = the rows of all ranks' shards in global order. Dimensions behind the first
/// are contiguous. Rows that change their order go through the execution's workspace, or through
/// memory of the call where that is too small.
void gather_keys(Communicator& communicator, const Tensor& shard, const Tensor& whole,
                 const Shards& shards, const Execution& execution = {});
/// Its backward: shard = this rank's rows of the sum over ranks of whole (f32), rounded once to the
/// type of shard.
void scatter_key_grads(Communicator& communicator, const Tensor& whole, const Tensor& shard,
                       const Shards& shards, const Execution& execution = {});

}  // namespace winnow
