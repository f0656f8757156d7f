// SPDX-License-Identifier: Apache-2.0
// The communicator over NCCL. Collectives are only enqueued on the stream: the signatures of the
// ranks are exchanged ahead of the data, and `wait` compares them.
#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include "core/check.h"
#include "core/memory_errors.h"
#include "core/refusals.h"
#include "cuda/common/runtime.h"
#include "parallel/agreement.h"
#include "winnow/error.h"
#include "winnow/parallel.h"

namespace winnow {
namespace {

using cuda::cuda_check;
using cuda::DeviceGuard;
using parallel::CallKind;
using parallel::Collective;
using parallel::Signature;
using Clock = std::chrono::steady_clock;

// Constants of NCCL 2, as defined in nccl.h.
constexpr int kSuccess = 0, kInProgress = 7;
constexpr int kUint8 = 1, kFloat32 = 7;
constexpr int kSum = 0;

/// The functions of libnccl that are used here.
struct Nccl {
  int (*CommCount)(ncclComm*, int*);
  int (*CommUserRank)(ncclComm*, int*);
  int (*CommCuDevice)(ncclComm*, int*);
  int (*CommGetAsyncError)(ncclComm*, int*);
  int (*CommAbort)(ncclComm*);
  int (*GroupStart)();
  int (*GroupEnd)();
  int (*AllGather)(const void*, void*, std::size_t, int, ncclComm*, cudaStream_t);
  int (*ReduceScatter)(const void*, void*, std::size_t, int, int, ncclComm*, cudaStream_t);
  int (*Broadcast)(const void*, void*, std::size_t, int, int, ncclComm*, cudaStream_t);
  int (*Reduce)(const void*, void*, std::size_t, int, int, int, ncclComm*, cudaStream_t);
  const char* (*GetErrorString)(int);
};

Nccl open_nccl() {
  constexpr char kLibrary[] = "libnccl.so.2";
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Error(ErrorCode::unsupported, fmt::format(refusal::no_library, kLibrary, dlerror()));
  }
  Nccl nccl{};
  const auto find = [&](const char* name, auto& function) {
    void* const symbol = dlsym(library, name);
    if (symbol == nullptr) {
      throw Error(ErrorCode::unsupported, fmt::format(refusal::no_function, kLibrary, name));
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  find("ncclCommCount", nccl.CommCount);
  find("ncclCommUserRank", nccl.CommUserRank);
  find("ncclCommCuDevice", nccl.CommCuDevice);
  find("ncclCommGetAsyncError", nccl.CommGetAsyncError);
  find("ncclCommAbort", nccl.CommAbort);
  find("ncclGroupStart", nccl.GroupStart);
  find("ncclGroupEnd", nccl.GroupEnd);
  find("ncclAllGather", nccl.AllGather);
  find("ncclReduceScatter", nccl.ReduceScatter);
  find("ncclBroadcast", nccl.Broadcast);
  find("ncclReduce", nccl.Reduce);
  find("ncclGetErrorString", nccl.GetErrorString);
  return nccl;
}

/// Loads libnccl at the first call; it stays loaded.
const Nccl& nccl() {
  static const Nccl opened = open_nccl();
  return opened;
}

bool has_equal_shards(const Collective& call) {
  return call.own * static_cast<std::int64_t>(call.rows.size()) == call.total &&
         std::adjacent_find(call.rows.begin(), call.rows.end(), std::not_equal_to<>()) ==
             call.rows.end();
}

/// Signatures of the collectives that have not been waited for, in pinned host memory and on the
/// device. A slot holds the signature of this rank, followed by those of all ranks.
class Signatures {
 public:
  Signatures(int ranks, Device device) : ranks_(static_cast<std::size_t>(ranks)) {
    const DeviceGuard guard(device);
    void* memory = nullptr;
    cuda_check(cudaMallocHost(&memory, bytes()));
    host_.reset(static_cast<Signature*>(memory));
    cuda_check(cudaMalloc(&memory, bytes()));
    on_device_.reset(static_cast<Signature*>(memory));
    for (auto& event : done_) {
      cudaEvent_t made = nullptr;
      cuda_check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
      event.reset(made);
    }
  }

  static constexpr std::size_t kSlots = 64;
  Signature* own(std::size_t slot) const { return host_.get() + slot * stride(); }
  std::span<Signature> all(std::size_t slot) const { return {own(slot) + 1, ranks_}; }
  Signature* own_on_device(std::size_t slot) const { return on_device_.get() + slot * stride(); }
  Signature* all_on_device(std::size_t slot) const { return own_on_device(slot) + 1; }
  cudaEvent_t done(std::size_t slot) const { return done_[slot].get(); }

 private:
  struct FreeHost {
    void operator()(Signature* memory) const { cudaFreeHost(memory); }
  };
  struct FreeDevice {
    void operator()(Signature* memory) const { cudaFree(memory); }
  };
  struct FreeEvent {
    using pointer = cudaEvent_t;
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };
  std::size_t stride() const { return ranks_ + 1; }
  std::size_t bytes() const { return kSlots * stride() * sizeof(Signature); }

  std::size_t ranks_;
  std::unique_ptr<Signature, FreeHost> host_;
  std::unique_ptr<Signature, FreeDevice> on_device_;
  std::array<std::unique_ptr<cudaEvent_t, FreeEvent>, kSlots> done_;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(ncclComm* comm, std::chrono::milliseconds timeout)
      : comm_(comm),
        timeout_(timeout),
        rank_(query(nccl().CommUserRank)),
        size_(query(nccl().CommCount)),
        device_{DeviceKind::cuda, query(nccl().CommCuDevice)},
        signatures_(size_, device_) {
    for (std::size_t slot = 0; slot < Signatures::kSlots; ++slot) free_slots_.push_back(slot);
  }

  /// Waits for pending collectives, since they use our memory; after the time-out they are aborted.
  ~NcclCommunicator() override {
    if (broken_) return;
    try {
      guarded("~Communicator", [&] { finish_pending(); });
    } catch (const Error&) {
      // guarded() has aborted the communicator; a destructor cannot report the error.
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Traffic traffic() const override { return traffic_; }

  void all_gather(const Tensor& shard, const Tensor& whole, std::span<const std::int64_t> rows,
                  const Execution& execution) override {
    refuse_if_broken();
    guarded(name(CallKind::all_gather), [&] {
      const Collective call = begin(CallKind::all_gather, shard, whole, rows);
      enqueue_agreement(call, execution.stream);
      if (has_equal_shards(call)) {
        check(nccl().AllGather(shard.data, whole.data, bytes(call, call.own), kUint8, comm_,
                               execution.stream));
      } else {
        for_each_rank(call, [&](int r, std::int64_t first, std::int64_t rows_of_rank) {
          std::byte* const part = static_cast<std::byte*>(whole.data) + first * call.row_bytes;
          return nccl().Broadcast(r == rank_ ? shard.data : part, part, bytes(call, rows_of_rank),
                                  kUint8, r, comm_, execution.stream);
        });
      }
      mark_done(execution.stream);
      traffic_.gathered += call.remote_bytes();
    });
  }

  void reduce_scatter(const Tensor& whole, const Tensor& shard, std::span<const std::int64_t> rows,
                      const Execution& execution) override {
    refuse_if_broken();
    guarded(name(CallKind::reduce_scatter), [&] {
      const Collective call = begin(CallKind::reduce_scatter, shard, whole, rows);
      enqueue_agreement(call, execution.stream);
      if (has_equal_shards(call)) {
        check(nccl().ReduceScatter(whole.data, shard.data, bytes(call, call.own) / sizeof(float),
                                   kFloat32, kSum, comm_, execution.stream));
      } else {
        for_each_rank(call, [&](int r, std::int64_t first, std::int64_t rows_of_rank) {
          const std::byte* const part =
              static_cast<const std::byte*>(whole.data) + first * call.row_bytes;
          return nccl().Reduce(part, shard.data, bytes(call, rows_of_rank) / sizeof(float),
                               kFloat32, kSum, r, comm_, execution.stream);
        });
      }
      mark_done(execution.stream);
      traffic_.reduced += call.remote_bytes();
    });
  }

  void wait(const Execution& execution) override {
    refuse_if_broken();
    guarded("wait", [&] { wait_and_compare(execution.stream); });
  }

 private:
  struct Pending {
    std::size_t slot;
    cudaStream_t stream;
  };

  int query(int (*function)(ncclComm*, int*)) const {
    int value = 0;
    const int result = function(comm_, &value);
    if (result != kSuccess) {
      throw Error(ErrorCode::communication,
                  fmt::format("nccl_communicator: NCCL: {}", nccl().GetErrorString(result)));
    }
    return value;
  }

  /// Throws if a NCCL call failed. On a non-blocking communicator a call may be in progress; waits
  /// for it, since NCCL allows the next call only after that.
  void check(int result) const {
    const Clock::time_point deadline = Clock::now() + timeout_;
    while (result == kInProgress) {
      if (Clock::now() > deadline) fail("time-out: some rank has not come");
      std::this_thread::yield();
      if (nccl().CommGetAsyncError(comm_, &result) != kSuccess) break;
    }
    if (result != kSuccess) fail(nccl().GetErrorString(result));
  }

  [[noreturn]] void fail(std::string_view why) const {
    throw Error(
        ErrorCode::communication,
        fmt::format("NCCL, rank {} of {}, after collective {}: {}", rank_, size_, number_, why));
  }

  Collective begin(CallKind kind, const Tensor& shard, const Tensor& whole,
                   std::span<const std::int64_t> rows) {
    // Counts the call even if its arguments are refused, since other ranks may have entered it.
    ++number_;
    const Collective call =
        parallel::checked_collective(kind, shard, whole, rows, rank_, size_, number_, history());
    if (shard.device != device_) {
      const Check arguments(name(kind));
      arguments.fail("shard", winnow::describe(shard), refusal::device, describe(device_),
                     "the communicator");
    }
    if (free_slots_.empty()) wait_and_compare(pending_.front().stream);
    return call;
  }

  void refuse_if_broken() const {
    if (!broken_) return;
    with_memory_errors("the communicator", [&] {
      throw Error(ErrorCode::communication,
                  fmt::format("the communicator is broken since: {}", broken_->what()));
    });
  }

  /// Any Error but that of a refused argument breaks the communicator.
  template <class Body>
  void guarded(std::string_view function, const Body& body) {
    try {
      with_memory_errors(function, [&] {
        const DeviceGuard guard(device_);
        body();
      });
    } catch (const Error& error) {
      if (error.code() == ErrorCode::invalid_argument) throw;
      broken_ = error;
      abort();
      throw;
    }
  }

  /// Aborts what still runs on the device. That may block on the caller's work ahead of it in the
  /// stream, so a thread does it, which the destructor joins, unless none can be started.
  void abort() {
    const auto abort_on_device = [comm = comm_, device = device_.index] {
      cudaSetDevice(device);
      nccl().CommAbort(comm);
    };
    try {
      abort_ = std::jthread(abort_on_device);
    } catch (const std::exception&) {
      const DeviceGuard guard(device_);
      abort_on_device();
    }
  }

  static std::size_t bytes(const Collective& call, std::int64_t rows) {
    return static_cast<std::size_t>(rows * call.row_bytes);
  }

  /// Makes one NCCL call for each rank that has rows, all in one group.
  template <class CallOfRank>
  void for_each_rank(const Collective& call, const CallOfRank& call_of_rank) {
    check(nccl().GroupStart());
    int result = kSuccess;
    for (int r = 0; r < size_ && result == kSuccess; ++r) {
      const std::int64_t rows = call.rows[static_cast<std::size_t>(r)];
      if (rows > 0) result = call_of_rank(r, call.first[static_cast<std::size_t>(r)], rows);
    }
    const int ended = nccl().GroupEnd();
    check(result == kInProgress ? kSuccess : result);
    check(ended);
  }

  /// Enqueues the exchange of signatures, which wait_and_compare() reads.
  void enqueue_agreement(const Collective& call, cudaStream_t stream) {
    const std::size_t slot = free_slots_.back();
    free_slots_.pop_back();
    *signatures_.own(slot) = call.signature;
    cuda_check(cudaMemcpyAsync(signatures_.own_on_device(slot), signatures_.own(slot),
                               sizeof(Signature), cudaMemcpyHostToDevice, stream));
    check(nccl().AllGather(signatures_.own_on_device(slot), signatures_.all_on_device(slot),
                           sizeof(Signature), kUint8, comm_, stream));
    const std::span<Signature> all = signatures_.all(slot);
    cuda_check(cudaMemcpyAsync(all.data(), signatures_.all_on_device(slot), all.size_bytes(),
                               cudaMemcpyDeviceToHost, stream));
    pending_.push_back({slot, stream});
  }

  void mark_done(cudaStream_t stream) {
    cuda_check(cudaEventRecord(signatures_.done(pending_.back().slot), stream));
  }

  /// Waits for all collectives by their events, since their streams may have been destroyed.
  void finish_pending() {
    const Clock::time_point deadline = Clock::now() + timeout_;
    for (const Pending& pending : pending_) {
      while (cudaEventQuery(signatures_.done(pending.slot)) == cudaErrorNotReady) {
        if (Clock::now() > deadline) fail("time-out: some rank has not come, or has stopped");
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
  }

  /// Waits for a stream, up to the time-out, and compares the signatures exchanged on it.
  void wait_and_compare(cudaStream_t stream) {
    const Clock::time_point deadline = Clock::now() + timeout_;
    for (cudaError_t state = cudaStreamQuery(stream); state != cudaSuccess;
         state = cudaStreamQuery(stream)) {
      if (state != cudaErrorNotReady) cuda_check(state);
      int result = kSuccess;
      nccl().CommGetAsyncError(comm_, &result);
      if (result != kSuccess && result != kInProgress) fail(nccl().GetErrorString(result));
      if (Clock::now() > deadline) fail("time-out: some rank has not come, or has stopped");
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    for (const Pending& pending : std::exchange(pending_, {})) {
      if (pending.stream != stream) {
        pending_.push_back(pending);
        continue;
      }
      free_slots_.push_back(pending.slot);
      parallel::check_agreement(signatures_.all(pending.slot));
    }
  }

  ncclComm* comm_;
  std::chrono::milliseconds timeout_;
  std::uint64_t number_ = 0;  // of the last collective
  int rank_;
  int size_;
  Device device_;
  std::optional<Error> broken_;  // the error that broke the communicator
  Traffic traffic_;
  Signatures signatures_;
  std::vector<std::size_t> free_slots_;
  std::vector<Pending> pending_;
  std::jthread abort_;  // declared last: joined before memory that the device may use is freed
};

}  // namespace

std::unique_ptr<Communicator> nccl_communicator(ncclComm* comm, std::chrono::milliseconds timeout) {
  return with_memory_errors("nccl_communicator", [&]() -> std::unique_ptr<Communicator> {
    const Check check("nccl_communicator");
    if (comm == nullptr) check.fail("comm", "null", refusal::absent);
    check.in_range("timeout", timeout.count(), 1, std::numeric_limits<std::int32_t>::max());
    return std::make_unique<NcclCommunicator>(comm, timeout);
  });
}

}  // namespace winnow
