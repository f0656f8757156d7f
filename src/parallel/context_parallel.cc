// SPDX-License-Identifier: Apache-2.0
// gather_keys and scatter_key_grads: collectives work in rank order (one shard after another), and
// rows are permuted from or to global order.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/memory_errors.h"
#include "core/threads.h"
#include "parallel/device.h"
#include "parallel/rows.h"
#include "winnow/parallel.h"

namespace winnow {
namespace {

using parallel::Run;

constexpr DTypes kKeyTypes = {DType::bf16, DType::f16,     DType::f32,
                              DType::f64,  DType::f8_e4m3, DType::i32};
constexpr DTypes kGradientTypes = {DType::bf16, DType::f16, DType::f32};

/// Views a tensor that is contiguous after its first dimension as [rows, width].
Tensor as_rows(const Check& check, const char* argument, const Tensor& tensor) {
  if (!tensor) check.fail(argument, "absent", refusal::absent);
  if (tensor.rank < 1 || tensor.rank > 4) {
    check.fail(argument, describe(tensor), refusal::rank, "1 to 4", "rows, ...");
  }
  Tensor flat = tensor;
  std::int64_t width = 1;
  for (std::int32_t i = tensor.rank - 1; i > 0; --i) {
    if (tensor.shape[i] < 0) check.fail(argument, describe(tensor), refusal::negative_shape);
    if (tensor.shape[i] > 1 && tensor.stride[i] != width) {
      check.fail(argument, describe(tensor), refusal::one_of,
                 "contiguous behind the first dimension");
    }
    if (__builtin_mul_overflow(width, tensor.shape[i], &width)) {
      check.fail(argument, describe(tensor), refusal::too_large);
    }
  }
  flat.rank = 2;
  flat.shape = {tensor.shape[0], width};
  flat.stride = {tensor.stride[0], 1};
  return flat;
}

bool is_contiguous(const Tensor& rows) {
  return rows.shape[0] <= 1 || rows.stride[0] == rows.shape[1];
}

/// A checked call: its tensors as rows, and the permutation from rank order to global order.
struct Plan {
  Tensor shard;                    // [own rows, width]
  Tensor whole;                    // [tokens, width]
  std::vector<std::int64_t> rows;  // of each rank
  std::vector<Run> runs;           // from rank order to global order
  std::int64_t tokens = 0;

  bool in_order() const { return runs.size() <= 1; }
};

/// Fills plan.runs; refuses shards that are not a permutation of the rows.
void find_runs(const Check& check, const Shards& shards, Plan& plan) {
  std::vector<bool> is_held(static_cast<std::size_t>(plan.tokens), false);
  std::int64_t rank_row = 0;
  for (std::size_t rank = 0; rank < shards.rows.size(); ++rank) {
    const std::vector<std::int32_t>& rows = shards.rows[rank];
    for (std::size_t i = 0; i < rows.size(); ++i, ++rank_row) {
      const std::int64_t row = rows[i];
      const auto refuse = [&](const char* sentence, const auto&... values) {
        check.fail(fmt::format("shards.rows[{}][{}]", rank, i), fmt::to_string(row), sentence,
                   values...);
      };
      if (row < 0) refuse(refusal::at_least, 0);
      if (row >= plan.tokens) refuse(refusal::at_most, plan.tokens - 1);
      if (is_held[static_cast<std::size_t>(row)]) refuse(refusal::one_of, "a row that stands once");
      is_held[static_cast<std::size_t>(row)] = true;
      const bool continues_run =
          !plan.runs.empty() && plan.runs.back().to - plan.runs.back().first == row - rank_row;
      if (!continues_run) plan.runs.push_back({rank_row, rank_row, row});
    }
  }
}

Plan checked(const char* op, const Communicator& communicator, const Tensor& shard,
             const Tensor& whole, const Shards& shards) {
  Check check(op);
  const auto ranks = static_cast<std::size_t>(communicator.size());
  if (shards.rows.size() != ranks) {
    check.fail("shards.rows", fmt::format("[{}]", shards.rows.size()), refusal::dim_differs,
               "ranks", ranks, "communicator");
  }
  Plan plan;
  plan.shard = as_rows(check, "shard", shard);
  plan.whole = as_rows(check, "whole", whole);
  Tensor expected = shard;  // apart from rows and type
  expected.shape[0] = whole.shape[0];
  if (whole.rank != shard.rank ||
      !std::equal(&whole.shape[0], &whole.shape[0] + whole.rank, &expected.shape[0])) {
    expected.dtype = whole.dtype;
    check.fail("whole", describe(whole), refusal::one_of, describe(expected));
  }
  const bool gathers = op == std::string_view("gather_keys");
  if (gathers) {
    check.input("shard", plan.shard, {"own rows", "width"}, kKeyTypes);
    check.output("whole", plan.whole, {"tokens", "width"}, {plan.shard.dtype});
  } else {
    check.input("whole", plan.whole, {"tokens", "width"}, {DType::f32});
    check.output("shard", plan.shard, {"own rows", "width"}, kGradientTypes);
  }
  for (const auto& rows : shards.rows) {
    plan.rows.push_back(static_cast<std::int64_t>(rows.size()));
    plan.tokens += plan.rows.back();
  }
  if (plan.whole.shape[0] != plan.tokens) {
    check.fail("whole", describe(whole), refusal::dim_differs, "rows", plan.tokens, "shards");
  }
  const std::int64_t own = plan.rows[static_cast<std::size_t>(communicator.rank())];
  if (plan.shard.shape[0] != own) {
    check.fail("shard", describe(shard), refusal::dim_differs, "rows", own,
               fmt::format("shards.rows[{}]", communicator.rank()));
  }
  find_runs(check, shards, plan);
  return plan;
}

/// Calls checked() and records in the communicator's history which rows every rank has, or that
/// this rank refused the call, so that ranks that differ find out at the next collective.
Plan agreed(const char* op, Communicator& communicator, const Tensor& shard, const Tensor& whole,
            const Shards& shards) {
  constexpr std::uint64_t kRefused = 1;
  try {
    Plan plan = checked(op, communicator, shard, whole, shards);
    for (const Run& run : plan.runs) {
      communicator.remember(static_cast<std::uint64_t>(run.from));
      communicator.remember(static_cast<std::uint64_t>(run.to));
    }
    return plan;
  } catch (...) {
    communicator.remember(kRefused);
    throw;
  }
}

/// Memory for [rows, width] tensors: the caller's workspace if that is large enough.
class Staging {
 public:
  Staging(Device device, const Execution& execution, std::size_t bytes)
      : device_(device), execution_(execution) {
    if (bytes == 0) return;
    if (execution.workspace != nullptr && execution.workspace_bytes >= bytes + kAlignment) {
      const auto address = reinterpret_cast<std::uintptr_t>(execution.workspace);
      next_ = reinterpret_cast<std::byte*>((address + kAlignment - 1) / kAlignment * kAlignment);
    } else if (device.kind == DeviceKind::cuda) {
      next_ =
          static_cast<std::byte*>(owned_ = parallel::allocate_on_device(device, bytes, execution));
    } else {
      Execution without = execution;
      without.workspace = nullptr;
      host_ = std::make_unique<HostWorkspace>(without, bytes);
      next_ = static_cast<std::byte*>(host_->execution().workspace);
    }
  }
  ~Staging() {
    if (owned_ != nullptr) parallel::free_on_device(device_, owned_, execution_);
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  static std::size_t bytes(std::int64_t rows, std::int64_t width, DType dtype) {
    const std::int64_t raw = rows * width * element_bytes(dtype);
    return (static_cast<std::size_t>(raw) + kAlignment - 1) / kAlignment * kAlignment;
  }
  Tensor take(std::int64_t rows, std::int64_t width, DType dtype) {
    const Tensor taken = tensor(next_, dtype, {rows, width}, device_);
    next_ += bytes(rows, width, dtype);
    return taken;
  }

 private:
  static constexpr std::size_t kAlignment = 256;

  Device device_;
  Execution execution_;
  void* owned_ = nullptr;
  std::unique_ptr<HostWorkspace> host_;
  std::byte* next_ = nullptr;
};

/// `tensor` itself, or, if a copy is needed, staging memory of its shape with type `dtype`.
Tensor staged_if(bool needed, const Tensor& tensor, DType dtype, Staging& staging) {
  return needed ? staging.take(tensor.shape[0], tensor.shape[1], dtype) : tensor;
}

std::size_t bytes_if(bool needed, const Tensor& tensor, DType dtype) {
  return needed ? Staging::bytes(tensor.shape[0], tensor.shape[1], dtype) : 0;
}

constexpr Run kInOrder[] = {{0, 0, 0}};

}  // namespace

void gather_keys(Communicator& communicator, const Tensor& shard, const Tensor& whole,
                 const Shards& shards, const Execution& execution) {
  with_memory_errors("gather_keys", [&] {
    const Plan plan = agreed("gather_keys", communicator, shard, whole, shards);
    const DType dtype = plan.shard.dtype;
    const bool pack = !is_contiguous(plan.shard);
    const bool reorder = !plan.in_order() || !is_contiguous(plan.whole);
    Staging staging(plan.whole.device, execution,
                    bytes_if(pack, plan.shard, dtype) + bytes_if(reorder, plan.whole, dtype));
    const Tensor own = staged_if(pack, plan.shard, dtype, staging);
    const Tensor by_rank = staged_if(reorder, plan.whole, dtype, staging);
    if (pack) copy_rows(plan.shard, own, kInOrder, own.shape[0], execution);
    communicator.all_gather(own, by_rank, plan.rows, execution);
    if (reorder) copy_rows(by_rank, plan.whole, plan.runs, plan.tokens, execution);
  });
}

void scatter_key_grads(Communicator& communicator, const Tensor& whole, const Tensor& shard,
                       const Shards& shards, const Execution& execution) {
  with_memory_errors("scatter_key_grads", [&] {
    Plan plan = agreed("scatter_key_grads", communicator, shard, whole, shards);
    for (Run& run : plan.runs) std::swap(run.from, run.to);
    const bool reorder = !plan.in_order() || !is_contiguous(plan.whole);
    const bool round = plan.shard.dtype != DType::f32 || !is_contiguous(plan.shard);
    Staging staging(
        plan.whole.device, execution,
        bytes_if(reorder, plan.whole, DType::f32) + bytes_if(round, plan.shard, DType::f32));
    const Tensor by_rank = staged_if(reorder, plan.whole, DType::f32, staging);
    const Tensor sum = staged_if(round, plan.shard, DType::f32, staging);
    if (reorder) copy_rows(plan.whole, by_rank, plan.runs, plan.tokens, execution);
    communicator.reduce_scatter(by_rank, sum, plan.rows, execution);
    if (round) copy_rows(sum, plan.shard, kInOrder, sum.shape[0], execution);
  });
}

}  // namespace winnow
