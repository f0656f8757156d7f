// SPDX-License-Identifier: Apache-2.0
#include "harness/local_communicator.h"

#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "winnow/error.h"

namespace winnow::harness {
namespace {

/// What the ranks share: where each of them is, and what it brought.
class Group {
 public:
  Group(int ranks, std::chrono::milliseconds timeout)
      : size(ranks), timeout_(timeout), calls_(ranks), tensors_(ranks) {}

  const int size;

  /// Waits until all ranks are here with the same call; the tensors of all of them.
  const std::vector<Tensor>& meet(int rank, const std::string& call, const Tensor& tensor) {
    {
      const std::lock_guard lock(mutex_);
      if (!broken_.empty()) throw Error(ErrorCode::communication, broken_);
      calls_[rank] = call;
      tensors_[rank] = tensor;
    }
    arrive(rank);
    for (int r = 1; r < size; ++r) {
      if (calls_[r] != calls_[0])
        fail(fmt::format("rank {} calls {}, rank 0 {}: all ranks must call the same", r, calls_[r],
                         calls_[0]));
    }
    return tensors_;
  }

  /// Waits until all ranks are here: before that nobody may touch what he brought.
  void arrive(int rank) {
    std::unique_lock lock(mutex_);
    if (!broken_.empty()) throw Error(ErrorCode::communication, broken_);
    const std::int64_t round = round_;
    if (++arrived_ == size) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
      return;
    }
    changed_.wait_for(lock, timeout_, [&] { return round_ != round || !broken_.empty(); });
    if (round_ != round) return;
    if (broken_.empty()) broken_ = fmt::format("rank {} of {}: time-out", rank, size);
    changed_.notify_all();
    throw Error(ErrorCode::communication, broken_);
  }

  /// Breaks the group. What all ranks see at once does not depend on who comes first.
  [[noreturn]] void fail(const std::string& why) {
    const std::lock_guard lock(mutex_);
    broken_ = why;
    changed_.notify_all();
    throw Error(ErrorCode::communication, why);
  }

 private:
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;  // of all that follows; calls and tensors are read between two arrivals
  std::condition_variable changed_;
  int arrived_ = 0;
  std::int64_t round_ = 0;
  std::string broken_;
  std::vector<std::string> calls_;
  std::vector<Tensor> tensors_;
};

std::string text_of(const char* call, const Tensor& tensor, std::span<const std::int64_t> rows,
                    std::uint64_t history) {
  return fmt::format("{} of {} by {} channels, rows {}, after {:x}", call, name(tensor.dtype),
                     tensor.shape[1], fmt::join(rows, " "), history);
}

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(std::shared_ptr<Group> group, int rank)
      : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size; }
  Traffic traffic() const override { return traffic_; }
  void wait(const Execution&) override {}

  void all_gather(const Tensor& shard, const Tensor& whole, std::span<const std::int64_t> rows,
                  const Execution&) override {
    const std::vector<Tensor>& shards =
        group_->meet(rank_, text_of("all_gather", shard, rows, history()), shard);
    const std::int64_t row_bytes = shard.shape[1] * element_bytes(shard.dtype);
    auto* to = static_cast<std::byte*>(whole.data);
    for (int r = 0; r < size(); ++r) {
      const std::int64_t bytes = rows[r] * row_bytes;
      if (bytes > 0) std::memcpy(to, shards[r].data, static_cast<std::size_t>(bytes));
      to += bytes;
      if (r != rank_) traffic_.gathered += bytes;
    }
    group_->arrive(rank_);
  }

  void reduce_scatter(const Tensor& whole, const Tensor& shard, std::span<const std::int64_t> rows,
                      const Execution&) override {
    const std::vector<Tensor>& wholes =
        group_->meet(rank_, text_of("reduce_scatter", whole, rows, history()), whole);
    const std::int64_t width = whole.shape[1];
    std::int64_t first = 0;
    for (int r = 0; r < rank_; ++r) first += rows[r];
    auto* const sum = static_cast<float*>(shard.data);
    for (std::int64_t i = 0; i < rows[rank_] * width; ++i) {
      float value = 0;
      for (const Tensor& each : wholes)
        value += static_cast<const float*>(each.data)[first * width + i];
      sum[i] = value;
    }
    for (int r = 0; r < size(); ++r)
      if (r != rank_)
        traffic_.reduced += rows[r] * width * static_cast<std::int64_t>(sizeof(float));
    group_->arrive(rank_);
  }

 private:
  std::shared_ptr<Group> group_;
  int rank_;
  Traffic traffic_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> local_communicators(int ranks,
                                                               std::chrono::milliseconds timeout) {
  const auto group = std::make_shared<Group>(ranks, timeout);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int rank = 0; rank < ranks; ++rank)
    communicators.push_back(std::make_unique<LocalCommunicator>(group, rank));
  return communicators;
}

void on_local_ranks(int ranks, const std::function<void(Communicator&)>& body,
                    std::chrono::milliseconds timeout) {
  const auto communicators = local_communicators(ranks, timeout);
  std::vector<std::exception_ptr> errors(communicators.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < communicators.size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          body(*communicators[r]);
        } catch (...) {
          errors[r] = std::current_exception();
        }
      });
    }
  }
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace winnow::harness
