// SPDX-License-Identifier: Apache-2.0
// The communicator over MPI: non-blocking collectives on host memory, polled until a time-out.
#include "winnow/mpi.h"

#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <mpi.h>

#include "core/check.h"
#include "core/memory_errors.h"
#include "parallel/agreement.h"
#include "parallel/device.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using parallel::CallKind;
using parallel::Collective;
using parallel::Signature;
using Clock = std::chrono::steady_clock;

void mpi_check(int result, std::string_view what) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(result, text, &length);
  throw Error(ErrorCode::communication, fmt::format("{}: MPI: {}", what, text));
}

bool mpi_is_running() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

/// Waits for a request, up to the deadline. Calling MPI_Test also drives the progress of messages.
void finish(MPI_Request& request, Clock::time_point deadline, std::string_view what) {
  constexpr std::chrono::milliseconds kSpinTime{1};  // after which it sleeps between polls
  const Clock::time_point start = Clock::now();
  for (int done = 0; true;) {
    mpi_check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what);
    if (done != 0) return;
    const Clock::time_point now = Clock::now();
    if (now > deadline) {
      throw Error(ErrorCode::communication,
                  fmt::format("{}: time-out: some rank has not come, or has stopped", what));
    }
    if (now - start < kSpinTime) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

/// An MPI datatype of one row, so that MPI's 32-bit counts are rows and not bytes.
class RowType {
 public:
  RowType(std::int64_t bytes, std::string_view what) {
    mpi_check(MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &type_), what);
    mpi_check(MPI_Type_commit(&type_), what);
  }
  ~RowType() { MPI_Type_free(&type_); }  // pending operations keep their reference to it
  RowType(const RowType&) = delete;
  RowType& operator=(const RowType&) = delete;
  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, std::chrono::milliseconds timeout) : timeout_(timeout) {
    constexpr char kWhat[] = "mpi_communicator";
    auto duplicate = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
    MPI_Request request = MPI_REQUEST_NULL;
    mpi_check(MPI_Comm_idup(comm, duplicate.get(), &request), kWhat);
    try {
      finish(request, Clock::now() + timeout, kWhat);
    } catch (...) {
      duplicate.release();  // leaked on purpose: MPI may still write to it
      throw;
    }
    comm_ = *duplicate;
    mpi_check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), kWhat);
    mpi_check(MPI_Comm_rank(comm_, &rank_), kWhat);
    mpi_check(MPI_Comm_size(comm_, &size_), kWhat);
  }
  ~MpiCommunicator() override {
    if (!mpi_is_running()) return;
    if (!broken_) {
      MPI_Comm_free(&comm_);
    } else {
      in_flight_.release();  // leaked on purpose: a late rank may still write to these buffers
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Traffic traffic() const override { return traffic_; }

  void all_gather(const Tensor& shard, const Tensor& whole, std::span<const std::int64_t> rows,
                  const Execution& execution) override {
    guarded(CallKind::all_gather, [&](std::string_view what) {
      const Collective call = checked(CallKind::all_gather, shard, whole, rows);
      const Clock::time_point deadline = Clock::now() + timeout_;
      agree(call, deadline, what);
      if (call.total * call.row_bytes == 0) return;
      std::byte* const all = buffer(call.total * call.row_bytes);
      to_host(all + call.first[rank_] * call.row_bytes, shard, call.own * call.row_bytes,
              execution);
      const auto& counts = ints(call.rows);
      const auto& offsets = ints(call.first);
      const RowType row(call.row_bytes, what);
      MPI_Request request = MPI_REQUEST_NULL;
      mpi_check(MPI_Iallgatherv(MPI_IN_PLACE, 0, row.get(), all, counts.data(), offsets.data(),
                                row.get(), comm_, &request),
                what);
      finish(request, deadline, what);
      from_host(whole, all, call.total * call.row_bytes, execution);
      traffic_.gathered += call.remote_bytes();
    });
  }

  void reduce_scatter(const Tensor& whole, const Tensor& shard, std::span<const std::int64_t> rows,
                      const Execution& execution) override {
    guarded(CallKind::reduce_scatter, [&](std::string_view what) {
      const Collective call = checked(CallKind::reduce_scatter, shard, whole, rows);
      const Clock::time_point deadline = Clock::now() + timeout_;
      agree(call, deadline, what);
      if (call.total * call.row_bytes == 0) return;
      std::byte* const sent = buffer(call.total * call.row_bytes);
      std::byte* const received = buffer(size_ * call.own * call.row_bytes);
      to_host(sent, whole, call.total * call.row_bytes, execution);
      const auto& counts = ints(call.rows);
      const auto& offsets = ints(call.first);
      const auto& own_counts = ints(std::vector<std::int64_t>(counts.size(), call.own));
      std::vector<std::int64_t> offsets_by_rank;
      for (int r = 0; r < size_; ++r) offsets_by_rank.push_back(r * call.own);
      const auto& own_offsets = ints(offsets_by_rank);
      const RowType row(call.row_bytes, what);
      MPI_Request request = MPI_REQUEST_NULL;
      mpi_check(MPI_Ialltoallv(sent, counts.data(), offsets.data(), row.get(), received,
                               own_counts.data(), own_offsets.data(), row.get(), comm_, &request),
                what);
      finish(request, deadline, what);
      // Summed in the order of ranks, so that results are bitwise reproducible.
      const std::int64_t elements = call.own * call.row_bytes / sizeof(float);
      auto* const sum = reinterpret_cast<float*>(received);
      for (int r = 1; r < size_; ++r) {
        const float* const part = sum + r * elements;
        for (std::int64_t i = 0; i < elements; ++i) sum[i] += part[i];
      }
      from_host(shard, received, call.own * call.row_bytes, execution);
      traffic_.reduced += call.remote_bytes();
    });
  }

  void wait(const Execution&) override { refuse_if_broken(); }  // collectives block

 private:
  Collective checked(CallKind kind, const Tensor& shard, const Tensor& whole,
                     std::span<const std::int64_t> rows) const {
    return parallel::checked_collective(kind, shard, whole, rows, rank_, size_, number_, history());
  }

  void refuse_if_broken() const {
    if (!broken_) return;
    with_memory_errors("the communicator", [&] {
      throw Error(ErrorCode::communication,
                  fmt::format("the communicator is broken since {}", broken_->what()));
    });
  }

  /// Calls body(what), a collective that errors call `what`. Counts the call even if its arguments
  /// are refused, since other ranks may have entered it; any other Error breaks the communicator.
  template <class Body>
  void guarded(CallKind kind, const Body& body) {
    refuse_if_broken();
    ++number_;
    try {
      with_memory_errors(name(kind), [&] {
        body(fmt::format("{} {} on rank {} of {}", name(kind), number_, rank_, size_));
      });
    } catch (const Error& error) {
      if (error.code() != ErrorCode::invalid_argument) broken_ = error;
      throw;
    }
    in_flight_->clear();
  }

  void agree(const Collective& call, Clock::time_point deadline, std::string_view what) {
    constexpr int kBytes = sizeof(Signature);
    const auto& own = keep(call.signature);
    auto& all = keep(std::vector<Signature>(static_cast<std::size_t>(size_)));
    MPI_Request request = MPI_REQUEST_NULL;
    mpi_check(MPI_Iallgather(&own, kBytes, MPI_BYTE, all.data(), kBytes, MPI_BYTE, comm_, &request),
              what);
    finish(request, deadline, what);
    parallel::check_agreement(all);
  }

  // Buffers of a collective are owned by the communicator, since MPI may still use them after a
  // time-out, when the caller's memory may be freed.
  template <class T>
  T& keep(T value) {
    auto kept = std::make_shared<T>(std::move(value));
    in_flight_->push_back(kept);
    return *kept;
  }
  std::byte* buffer(std::int64_t bytes) {
    auto kept = std::make_shared_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes));
    in_flight_->push_back(kept);
    return kept.get();
  }
  const std::vector<int>& ints(const std::vector<std::int64_t>& values) {
    return keep(std::vector<int>(values.begin(), values.end()));
  }

  static void to_host(std::byte* host, const Tensor& from, std::int64_t bytes,
                      const Execution& execution) {
    if (bytes == 0) return;
    const auto size = static_cast<std::size_t>(bytes);
    if (from.device.kind == DeviceKind::cpu) {
      std::memcpy(host, from.data, size);
    } else {
      parallel::download(from.device, host, from.data, size, execution);
    }
  }
  static void from_host(const Tensor& to, const std::byte* host, std::int64_t bytes,
                        const Execution& execution) {
    if (bytes == 0) return;
    const auto size = static_cast<std::size_t>(bytes);
    if (to.device.kind == DeviceKind::cpu) {
      std::memcpy(to.data, host, size);
    } else {
      parallel::upload(to.device, to.data, host, size, execution);
    }
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 0;
  std::chrono::milliseconds timeout_;
  std::uint64_t number_ = 0;     // of the last collective
  std::optional<Error> broken_;  // the error that broke the communicator
  Traffic traffic_;
  using Buffers = std::vector<std::shared_ptr<const void>>;
  std::unique_ptr<Buffers> in_flight_ = std::make_unique<Buffers>();
};

}  // namespace

std::unique_ptr<Communicator> mpi_communicator(const void* comm,
                                               std::chrono::milliseconds timeout) {
  return with_memory_errors("mpi_communicator", [&]() -> std::unique_ptr<Communicator> {
    const Check check("mpi_communicator");
    if (comm == nullptr) check.fail("comm", "null", refusal::absent);
    check.in_range("timeout", timeout.count(), 1, std::numeric_limits<std::int32_t>::max());
    if (!mpi_is_running()) {
      check.fail("comm", "outside MPI", refusal::one_of, "used between MPI_Init and MPI_Finalize");
    }
    const MPI_Comm handle = *static_cast<const MPI_Comm*>(comm);
    if (handle == MPI_COMM_NULL) check.fail("comm", "MPI_COMM_NULL", refusal::absent);
    return std::make_unique<MpiCommunicator>(handle, timeout);
  });
}

}  // namespace winnow
