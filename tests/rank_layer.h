// SPDX-License-Identifier: Apache-2.0
// RankLayer: computes one layer of any kind on one rank, through the public API only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tests/testing.h"
#include "tools/plan/models.h"
#include "tools/plan/rank_work.h"

namespace winnow::tests {

using harness::Case;
using plan::LayerKind;
using plan::Lists;
using plan::ShardedBatch;

inline Tensor rows_of(Tensor tensor, std::int64_t first, std::int64_t count) {
  tensor.data =
      static_cast<std::byte*>(tensor.data) + first * tensor.stride[0] * element_bytes(tensor.dtype);
  tensor.shape[0] = count;
  return tensor;
}

inline double bytes_of(const Tensor& tensor) {
  std::int64_t bytes = element_bytes(tensor.dtype);
  for (std::int32_t i = 0; i < tensor.rank; ++i) bytes *= tensor.shape[i];
  return static_cast<double>(bytes);
}

/// Runs forward and backward and counts the bytes of its tensors, the staging memory of its
/// collectives and the entries of its index lists.
class RankLayer {
 public:
  RankLayer(const LayerKind& kind, const ShardedBatch& batch, const Shards& pools,
            Communicator& communicator)
      : kind_(kind),
        c_(kind.c),
        batch_(batch),
        pools_(pools),
        communicator_(communicator),
        own_rows_(batch.shards.rows[communicator.rank()]),
        rows_(static_cast<std::int64_t>(own_rows_.size())) {
    const auto documents = static_cast<std::int64_t>(batch.cu_seqlens.size());
    buffers_.add("cu_seqlens", ints({}, {documents}, batch.cu_seqlens));
    buffers_.add("query_rows", ints({}, {rows_}, own_rows_));
    forward();
    backward();
  }

  std::map<std::string, double> tensor_bytes;
  std::size_t staged_bytes = 0;      // largest staging of a scatter_key_grads
  std::optional<std::int64_t> seen;  // number of pairs scored by the indexer
  std::int64_t slots = 0;

 private:
  Tensor make(const std::string& name, DType dtype, const Shape& shape) {
    Buffer& buffer = buffers_.add(name, Buffer({}, dtype, shape));
    if (dtype != DType::i32)
      buffer.fill([&](std::int64_t line, std::span<double> values) {
        const Random random(1, name);
        for (std::size_t i = 0; i < values.size(); ++i)
          values[i] = random.normal(line * static_cast<std::int64_t>(values.size()) +
                                    static_cast<std::int64_t>(i));
      });
    tensor_bytes[name] = bytes_of(buffer.tensor());
    return buffer.tensor();
  }
  Tensor of(std::string_view name) const { return buffers_.find(name).tensor(); }
  std::int64_t sum_of(std::string_view name) const {
    const Ints values = buffers_.find(name).download_ints();
    return std::accumulate(values.begin(), values.end(), std::int64_t{0});
  }

  /// Runs the operator on tensors that were made before; set(args) sets its options.
  template <class Args, class Set>
  void call(const Set& set) {
    auto args = buffers_.layer_arguments<Args>();
    set(args);
    run(args, kOneThread);
  }
  template <class Args>
  void call() {
    call<Args>([](Args&) {});
  }

  void gather(const Tensor& shard, const Tensor& whole, const Shards& shards) {
    gather_keys(communicator_, shard, whole, shards, kOneThread);
  }

  /// Measures how much of a large workspace the call writes to.
  void scatter(const Tensor& whole, const Tensor& shard, const Shards& shards) {
    constexpr auto kUntouched = std::byte{0xA5};
    std::vector<std::byte> workspace(1 << 20, kUntouched);
    Execution execution = kOneThread;
    execution.workspace = workspace.data();
    execution.workspace_bytes = workspace.size();
    scatter_key_grads(communicator_, whole, shard, shards, execution);
    const auto end = std::find_if(workspace.rbegin(), workspace.rend(),
                                  [&](std::byte each) { return each != kUntouched; });
    staged_bytes = std::max(staged_bytes, static_cast<std::size_t>(workspace.rend() - end));
  }

  std::int64_t own_pools() const {
    return static_cast<std::int64_t>(pools_.rows[communicator_.rank()].size());
  }
  std::int64_t all_pools() const {
    std::size_t sum = 0;
    for (const auto& pools : pools_.rows) sum += pools.size();
    return static_cast<std::int64_t>(sum);
  }
  const Shards& index_shards() const { return c_.has_pools() ? pools_ : batch_.shards; }

  void select() {
    const std::int64_t own = c_.has_pools() ? own_pools() : rows_;
    const std::int64_t all = c_.has_pools() ? all_pools() : batch_.tokens;
    const std::int64_t topk = c_.index_topk();
    make("begin", DType::i32, {rows_});
    make("end", DType::i32, {rows_});
    call<KeyWindows>([&](KeyWindows& args) { args.ratio = c_.ratio; });
    gather(make("index_k_shard", c_.dtype, {own, c_.index_dim}),
           make("index_k", c_.dtype, {all, c_.index_dim}), index_shards());
    make("index_q", c_.dtype, {rows_, c_.index_heads, c_.index_dim});
    make("weights", DType::f32, {rows_, c_.index_heads});
    make("selected", DType::i32, {rows_, topk});
    make("selected_lengths", DType::i32, {rows_});
    make("scores", DType::f32, {rows_, topk});
    call<IndexTopkForward>();
    seen = sum_of("end") - sum_of("begin");
  }

  /// Index lists as wide as the longest one. A selection of an earlier layer does not count here.
  void list_keys() {
    if (c_.window == 0 && kind_.has_indexer()) {
      buffers_.alias("indices", "selected");
      buffers_.alias("lengths", "selected_lengths");
    } else if (c_.window == 0) {
      Ints lengths;
      for (const std::int32_t row : own_rows_) {
        const auto next = std::upper_bound(batch_.cu_seqlens.begin(), batch_.cu_seqlens.end(), row);
        const bool behind = next == batch_.cu_seqlens.end();
        lengths.push_back(behind ? 0 : std::min<std::int32_t>(row - *(next - 1) + 1, c_.topk));
      }
      buffers_.add("indices", ints({}, {rows_, c_.topk}, Ints(rows_ * c_.topk, 0)));
      buffers_.add("lengths", ints({}, {rows_}, lengths));
    } else {
      std::int32_t longest = 0;
      for (std::size_t i = 1; i < batch_.cu_seqlens.size(); ++i)
        longest = std::max(longest, batch_.cu_seqlens[i] - batch_.cu_seqlens[i - 1]);
      const std::int64_t topk =
          kind_.lists == Lists::all_pools ? c_.window + longest / c_.ratio : c_.topk;
      make("indices", DType::i32, {rows_, topk});
      make("lengths", DType::i32, {rows_});
      call<WindowIndices>([&](WindowIndices& args) {
        args.window = c_.window;
        args.ratio = c_.has_pools() ? c_.ratio : 0;
        args.key_offset = static_cast<std::int32_t>(batch_.tokens);
      });
    }
    slots = sum_of("lengths");
  }

  void forward() {
    if (kind_.has_indexer()) select();
    list_keys();
    const Tensor kv_shard = make("kv_shard", c_.dtype, {rows_ + own_pools(), c_.qk_dim});
    const Tensor kv = make("kv", c_.dtype, {batch_.tokens + all_pools(), c_.qk_dim});
    gather(rows_of(kv_shard, 0, rows_), rows_of(kv, 0, batch_.tokens), batch_.shards);
    if (c_.has_pools())
      gather(rows_of(kv_shard, rows_, own_pools()), rows_of(kv, batch_.tokens, all_pools()),
             pools_);
    if (c_.sink) make("sink", DType::f32, {c_.heads});
    make("q", c_.dtype, {rows_, c_.heads, c_.qk_dim});
    make("out", c_.dtype, {rows_, c_.heads, c_.v_dim});
    make("lse", DType::f32, {rows_, c_.heads});
    call<SparseAttentionForward>(
        [&](SparseAttentionForward& args) { args.scale = c_.attention_scale(); });
    if (c_.head_dim > 0) {
      make("w_v", c_.dtype, {c_.heads, c_.head_dim, c_.v_dim});
      make("out_v", c_.dtype, {rows_, c_.heads, c_.head_dim});
      call<ValueProjectionForward>();
    }
    if (!kind_.has_indexer()) return;
    make("target", DType::f32, {rows_, c_.index_topk()});
    call<IndexTarget>([&](IndexTarget& args) {
      args.scale = c_.attention_scale();
      args.key_offset = c_.has_pools() ? static_cast<std::int32_t>(batch_.tokens) : 0;
    });
    make("loss", DType::f32, {rows_});
    make("d_scores", DType::f32, {rows_, c_.index_topk()});
    call<IndexLoss>();
  }

  void backward() {
    make("d_out", c_.dtype, {rows_, c_.heads, c_.v_dim});
    if (c_.head_dim > 0) {
      make("d_out_v", c_.dtype, {rows_, c_.heads, c_.head_dim});
      make("d_w_v", DType::f32, {c_.heads, c_.head_dim, c_.v_dim});
      call<ValueProjectionBackward>();
    }
    if (c_.sink) make("d_sink", DType::f32, {c_.heads});
    make("d_q", c_.dtype, {rows_, c_.heads, c_.qk_dim});
    const Tensor d_kv = make("d_kv", DType::f32, {batch_.tokens + all_pools(), c_.qk_dim});
    call<SparseAttentionBackward>(
        [&](SparseAttentionBackward& args) { args.scale = c_.attention_scale(); });
    const Tensor d_kv_shard = make("d_kv_shard", c_.dtype, {rows_ + own_pools(), c_.qk_dim});
    scatter(rows_of(d_kv, 0, batch_.tokens), rows_of(d_kv_shard, 0, rows_), batch_.shards);
    if (c_.has_pools())
      scatter(rows_of(d_kv, batch_.tokens, all_pools()), rows_of(d_kv_shard, rows_, own_pools()),
              pools_);
    if (!kind_.has_indexer()) return;
    const auto index_shape = [&](const char* shard) {
      return Shape{of(shard).shape[0], c_.index_dim};
    };
    make("d_index_q", c_.dtype, {rows_, c_.index_heads, c_.index_dim});
    make("d_weights", DType::f32, {rows_, c_.index_heads});
    make("d_index_k", DType::f32, index_shape("index_k"));
    call<IndexTopkBackward>();
    scatter(of("d_index_k"), make("d_index_k_shard", c_.dtype, index_shape("index_k_shard")),
            index_shards());
  }

  static constexpr Execution kOneThread{.threads = 1};

  const LayerKind& kind_;
  const Case& c_;
  const ShardedBatch& batch_;
  const Shards& pools_;  // the pools that end in the rows of each rank
  Communicator& communicator_;
  const Ints& own_rows_;
  std::int64_t rows_;
  NamedBuffers buffers_;
};

}  // namespace winnow::tests
