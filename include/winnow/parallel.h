// SPDX-License-Identifier: Apache-2.0
// Context parallel: one batch of rows over many ranks. Every rank holds a shard of the rows, with
// their queries and keys. The keys of all ranks are gathered into global order before an operator,
// and the gradients of all keys are reduced over ranks in fp32 after it; the operators are those of
// a single rank.
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

/// Bytes that this rank has exchanged with other ranks since its communicator was created.
struct Traffic {
  std::int64_t gathered = 0;  // received by all_gather
  std::int64_t reduced = 0;   // sent by reduce_scatter
};

/// The ranks that share a batch. All ranks must call the same collectives in the same order; each
/// collective compares the arguments of the ranks, and a difference is an Error on every rank, not
/// a hang. With CPU tensors a call returns when it is done. With CUDA tensors it is enqueued on the
/// stream, and `wait` reports errors. Tensors are contiguous. Error(invalid_argument) is thrown
/// before anything is sent; after any other Error the communicator is broken and all later calls
/// throw.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// whole [sum of rows, width] = the shards [rows[r], width] of all ranks r, concatenated in rank
  /// order; any type.
  virtual void all_gather(const Tensor& shard, const Tensor& whole,
                          std::span<const std::int64_t> rows, const Execution& execution) = 0;
  /// shard [rows[rank], width] = the rows of this rank of `whole` [sum of rows, width] summed over
  /// ranks; f32.
  virtual void reduce_scatter(const Tensor& whole, const Tensor& shard,
                              std::span<const std::int64_t> rows, const Execution& execution) = 0;
  /// Blocks until the collectives enqueued on the stream are done. Throws Error(communication) if
  /// one failed, or if a rank did not respond within the time-out of the communicator.
  virtual void wait(const Execution& execution) = 0;
  virtual Traffic traffic() const = 0;

  /// Mixes a value into the history hash of this rank. Every collective compares these hashes, so
  /// ranks find out if they disagree on more than its arguments.
  void remember(std::uint64_t what);

 protected:
  std::uint64_t history() const { return history_; }

 private:
  std::uint64_t history_ = 0;
};

inline constexpr std::chrono::milliseconds kCommunicationTimeout{20'000};

/// A communicator over an NCCL communicator of the caller, for CUDA tensors. libnccl is loaded at
/// run time. The time-out starts with the call of `wait`. If the communicator is broken, comm has
/// been passed to ncclCommAbort and must not be destroyed again. NCCL connects the ranks in the
/// first collective; to get a time-out if a rank is missing there, comm must be non-blocking
/// (ncclConfig_t.blocking = 0).
/// Throws Error(unsupported) if this build has no CUDA or the machine has no libnccl.
std::unique_ptr<Communicator> nccl_communicator(
    ncclComm* comm, std::chrono::milliseconds timeout = kCommunicationTimeout);

enum class Sharding : std::int32_t {
  contiguous,  // rank r of n holds the rows [r*T/n, (r+1)*T/n)
  zigzag       // rank r holds chunks r and 2n-1-r of the 2n of each document: equal causal work
};

/// The global rows of every rank, ascending; rows[rank] is the KeyWindows::query_rows of that rank.
struct Shards {
  std::vector<std::vector<std::int32_t>> rows;
};

/// Splits the rows of a batch over ranks. Called once per batch; gives the same result on every
/// rank. The chunks of a document differ by at most one row. With `multiple` > 1 chunks begin at
/// multiples of so many rows of their document, so that pools are not split, and differ by at most
/// `multiple` rows. Rows after the last document, up to `tokens`, count as one more document.
Shards shard_rows(std::span<const std::int32_t> cu_seqlens, std::int64_t tokens, int ranks,
                  Sharding sharding, int multiple = 1);

/// whole [tokens, ...] = the rows of the shards of all ranks in global order. Tensors are
/// contiguous after their first dimension. If rows are permuted, they are staged in
/// execution.workspace, or, if that is too small, in memory allocated by the call.
void gather_keys(Communicator& communicator, const Tensor& shard, const Tensor& whole,
                 const Shards& shards, const Execution& execution = {});
/// The backward of gather_keys: shard = the rows of this rank of `whole` (f32) summed over ranks,
/// rounded once to the type of shard.
void scatter_key_grads(Communicator& communicator, const Tensor& whole, const Tensor& shard,
                       const Shards& shards, const Execution& execution = {});

}  // namespace winnow
