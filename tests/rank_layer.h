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
#include <vector>

#include "harness/models.h"
#include "harness/rank_work.h"
#include "harness/workload.h"
#include "tests/testing.h"

namespace winnow::tests {

using harness::Case;
using harness::LayerKind;
using harness::Lists;
using harness::ShardedBatch;

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
        rows_(static_cast<std::int64_t>(own_rows_.size())),
        cu_seqlens_(
            ints({}, {static_cast<std::int64_t>(batch.cu_seqlens.size())}, batch.cu_seqlens)),
        query_rows_(Device{}, DType::i32, {rows_}) {
    query_rows_.upload(own_rows_);
    forward();
    backward();
  }

  std::map<std::string, double> tensor_bytes;
  std::size_t staged_bytes = 0;      // largest staging of a scatter_key_grads
  std::optional<std::int64_t> seen;  // number of pairs scored by the indexer
  std::int64_t slots = 0;

 private:
  Tensor make(const std::string& name, DType dtype, const Shape& shape) {
    Buffer& buffer = buffers_.emplace(name, Buffer({}, dtype, shape)).first->second;
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
  Tensor of(const std::string& name) const {
    const auto found = buffers_.find(name);
    return found == buffers_.end() ? Tensor{} : found->second.tensor();
  }
  std::int64_t sum_of(const std::string& name) const {
    const Ints values = buffers_.at(name).download_ints();
    return std::accumulate(values.begin(), values.end(), std::int64_t{0});
  }

  template <class Args>
  void call(const Args& args) {
    harness::run(args, kOneThread);
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
    call(KeyWindows{.cu_seqlens = cu_seqlens_.tensor(),
                    .cu_seqlens_padded = {},
                    .query_rows = query_rows_.tensor(),
                    .ratio = c_.ratio,
                    .begin = make("begin", DType::i32, {rows_}),
                    .end = make("end", DType::i32, {rows_})});
    gather(make("index_k_shard", c_.dtype, {own, c_.index_dim}),
           make("index_k", c_.dtype, {all, c_.index_dim}), index_shards());
    call(IndexTopkForward{.q = make("index_q", c_.dtype, {rows_, c_.index_heads, c_.index_dim}),
                          .k = of("index_k"),
                          .weights = make("weights", DType::f32, {rows_, c_.index_heads}),
                          .k_scale = {},
                          .begin = of("begin"),
                          .end = of("end"),
                          .indices = make("selected", DType::i32, {rows_, topk}),
                          .lengths = make("selected_lengths", DType::i32, {rows_}),
                          .scores = make("scores", DType::f32, {rows_, topk})});
    seen = sum_of("end") - sum_of("begin");
  }

  /// Index lists as wide as the longest one. A selection of an earlier layer does not count here.
  void list_keys() {
    if (c_.window == 0 && kind_.has_indexer()) {
      indices_ = of("selected");
      lengths_ = of("selected_lengths");
      slots = sum_of("selected_lengths");
    } else if (c_.window == 0) {
      indices_ = earlier_.emplace_back(Device{}, DType::i32, Shape{rows_, c_.topk}).tensor();
      lengths_ = earlier_.emplace_back(Device{}, DType::i32, Shape{rows_}).tensor();
      Ints lengths;
      for (const std::int32_t row : own_rows_) {
        const auto next = std::upper_bound(batch_.cu_seqlens.begin(), batch_.cu_seqlens.end(), row);
        const bool behind = next == batch_.cu_seqlens.end();
        lengths.push_back(behind ? 0 : std::min<std::int32_t>(row - *(next - 1) + 1, c_.topk));
      }
      earlier_[0].upload(Ints(rows_ * c_.topk, 0));
      earlier_[1].upload(lengths);
      slots = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    } else {
      std::int32_t longest = 0;
      for (std::size_t i = 1; i < batch_.cu_seqlens.size(); ++i)
        longest = std::max(longest, batch_.cu_seqlens[i] - batch_.cu_seqlens[i - 1]);
      const std::int64_t topk =
          kind_.lists == Lists::all_pools ? c_.window + longest / c_.ratio : c_.topk;
      indices_ = make("indices", DType::i32, {rows_, topk});
      lengths_ = make("lengths", DType::i32, {rows_});
      call(WindowIndices{.cu_seqlens = cu_seqlens_.tensor(),
                         .cu_seqlens_padded = {},
                         .query_rows = query_rows_.tensor(),
                         .window = c_.window,
                         .ratio = c_.has_pools() ? c_.ratio : 0,
                         .key_offset = static_cast<std::int32_t>(batch_.tokens),
                         .pool_ids = of("selected"),
                         .indices = indices_,
                         .lengths = lengths_});
      slots = sum_of("lengths");
    }
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
    call(SparseAttentionForward{.q = make("q", c_.dtype, {rows_, c_.heads, c_.qk_dim}),
                                .kv = kv,
                                .indices = indices_,
                                .lengths = lengths_,
                                .sink = of("sink"),
                                .out = make("out", c_.dtype, {rows_, c_.heads, c_.v_dim}),
                                .lse = make("lse", DType::f32, {rows_, c_.heads}),
                                .max_logits = {},
                                .scale = c_.attention_scale()});
    if (c_.head_dim > 0)
      call(
          ValueProjectionForward{.out = of("out"),
                                 .w_v = make("w_v", c_.dtype, {c_.heads, c_.head_dim, c_.v_dim}),
                                 .out_v = make("out_v", c_.dtype, {rows_, c_.heads, c_.head_dim})});
    if (!kind_.has_indexer()) return;
    call(IndexTarget{.q = of("q"),
                     .kv = kv,
                     .indices = of("selected"),
                     .lengths = of("selected_lengths"),
                     .sink = of("sink"),
                     .lse = of("lse"),
                     .target = make("target", DType::f32, {rows_, c_.index_topk()}),
                     .scale = c_.attention_scale(),
                     .key_offset = c_.has_pools() ? static_cast<std::int32_t>(batch_.tokens) : 0});
    call(IndexLoss{.indices = of("selected"),
                   .lengths = of("selected_lengths"),
                   .scores = of("scores"),
                   .target = of("target"),
                   .loss = make("loss", DType::f32, {rows_}),
                   .d_scores = make("d_scores", DType::f32, {rows_, c_.index_topk()})});
  }

  void backward() {
    make("d_out", c_.dtype, {rows_, c_.heads, c_.v_dim});
    if (c_.head_dim > 0)
      call(ValueProjectionBackward{
          .out = of("out"),
          .w_v = of("w_v"),
          .d_out_v = make("d_out_v", c_.dtype, {rows_, c_.heads, c_.head_dim}),
          .d_out = of("d_out"),
          .d_w_v = make("d_w_v", DType::f32, {c_.heads, c_.head_dim, c_.v_dim})});
    if (c_.sink) make("d_sink", DType::f32, {c_.heads});
    const Tensor d_kv = make("d_kv", DType::f32, {batch_.tokens + all_pools(), c_.qk_dim});
    call(SparseAttentionBackward{.q = of("q"),
                                 .kv = of("kv"),
                                 .indices = indices_,
                                 .lengths = lengths_,
                                 .sink = of("sink"),
                                 .out = of("out"),
                                 .lse = of("lse"),
                                 .d_out = of("d_out"),
                                 .d_lse = {},
                                 .d_q = make("d_q", c_.dtype, {rows_, c_.heads, c_.qk_dim}),
                                 .d_kv = d_kv,
                                 .d_sink = of("d_sink"),
                                 .scale = c_.attention_scale()});
    const Tensor d_kv_shard = make("d_kv_shard", c_.dtype, {rows_ + own_pools(), c_.qk_dim});
    scatter(rows_of(d_kv, 0, batch_.tokens), rows_of(d_kv_shard, 0, rows_), batch_.shards);
    if (c_.has_pools())
      scatter(rows_of(d_kv, batch_.tokens, all_pools()), rows_of(d_kv_shard, rows_, own_pools()),
              pools_);
    if (!kind_.has_indexer()) return;
    const auto index_shape = [&](const char* shard) {
      return Shape{of(shard).shape[0], c_.index_dim};
    };
    call(
        IndexTopkBackward{.q = of("index_q"),
                          .k = of("index_k"),
                          .weights = of("weights"),
                          .begin = of("begin"),
                          .end = of("end"),
                          .indices = of("selected"),
                          .lengths = of("selected_lengths"),
                          .d_scores = of("d_scores"),
                          .d_q = make("d_index_q", c_.dtype, {rows_, c_.index_heads, c_.index_dim}),
                          .d_weights = make("d_weights", DType::f32, {rows_, c_.index_heads}),
                          .d_k = make("d_index_k", DType::f32, index_shape("index_k"))});
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
  Buffer cu_seqlens_, query_rows_;
  std::map<std::string, Buffer> buffers_;
  std::vector<Buffer> earlier_;
  Tensor indices_, lengths_;
};

}  // namespace winnow::tests
