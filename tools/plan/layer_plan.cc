// SPDX-License-Identifier: Apache-2.0
// The formulas of docs/scaling.md: tensors, messages and calls of one rank in one layer.
#include "tools/plan/layer_plan.h"

#include <initializer_list>
#include <utility>

#include "harness/key_flops.h"

namespace winnow::plan {
namespace {

using harness::Case;
using harness::KeyFlops;
using harness::Shape;

constexpr double kSumBytes = 4;  // gradients of keys are fp32 until they are summed over ranks

/// The tensors of one layer on one rank.
class Tensors {
 public:
  Tensors(const LayerKind& kind, const WholeKeys& whole, const RankWork& work)
      : kind_(kind), c_(kind.c), whole_(whole), work_(work), rows_(work.rows) {
    if (kind.has_indexer()) add_indexer();
    add_lists();
    add_attention();
    add_keys("kv", whole.rows + whole.pools, rows_ + work.pools, c_.qk_dim);
  }

  /// Sums over the named tensors; one that the layer does not have counts nothing.
  double bytes(std::initializer_list<std::string_view> names) const {
    double sum = 0;
    for (const std::string_view name : names)
      for (const PlannedTensor& each : list)
        if (each.name == name) sum += each.bytes();
    return sum;
  }

  std::vector<PlannedTensor> list;

 private:
  void add(std::string_view name, std::string_view part, Kept kept, DType dtype, Shape shape) {
    list.push_back({name, part, kept, dtype, std::move(shape)});
  }

  void add_indexer() {
    const std::int64_t topk = c_.index_topk();
    add("begin", "lists", Kept::within_layer, DType::i32, {rows_});  // all such layers share them
    add("end", "lists", Kept::within_layer, DType::i32, {rows_});
    add("selected", "lists", Kept::until_backward, DType::i32, {rows_, topk});
    add("selected_lengths", "lists", Kept::until_backward, DType::i32, {rows_});
    add("scores", "lists", Kept::within_layer, DType::f32, {rows_, topk});
    const Shape index_q{rows_, c_.index_heads, c_.index_dim};
    const Shape weights{rows_, c_.index_heads};
    add("index_q", "queries", Kept::until_backward, c_.dtype, index_q);
    add("weights", "queries", Kept::until_backward, DType::f32, weights);
    add("target", "outputs", Kept::within_layer, DType::f32, {rows_, topk});
    add("loss", "outputs", Kept::within_layer, DType::f32, {rows_});
    add("d_scores", "gradients", Kept::until_backward, DType::f32, {rows_, topk});
    add("d_index_q", "gradients", Kept::within_layer, c_.dtype, index_q);
    add("d_weights", "gradients", Kept::within_layer, DType::f32, weights);
    add_keys("index_k", c_.has_pools() ? whole_.pools : whole_.rows,
             c_.has_pools() ? work_.pools : rows_, c_.index_dim);
  }

  /// Only layers with a sliding window make lists of their own: others use `selected`, theirs or
  /// that of an earlier layer.
  void add_lists() {
    if (c_.window == 0) return;
    const std::int64_t topk =
        kind_.lists == Lists::all_pools ? c_.window + whole_.most_pools : c_.topk;
    const Kept kept = kind_.has_indexer() ? Kept::until_backward : Kept::within_layer;
    add("indices", "lists", kept, DType::i32, {rows_, topk});
    add("lengths", "lists", kept, DType::i32, {rows_});
  }

  void add_attention() {
    const Shape q{rows_, c_.heads, c_.qk_dim};
    const Shape out{rows_, c_.heads, c_.v_dim};
    add("q", "queries", Kept::until_backward, c_.dtype, q);
    add("out", "outputs", Kept::until_backward, c_.dtype, out);
    add("lse", "outputs", Kept::until_backward, DType::f32, {rows_, c_.heads});
    add("d_out", "gradients", Kept::within_layer, c_.dtype, out);
    add("d_q", "gradients", Kept::within_layer, c_.dtype, q);
    if (c_.sink) {
      add("sink", "parameters", Kept::until_backward, DType::f32, {c_.heads});
      add("d_sink", "parameters", Kept::until_backward, DType::f32, {c_.heads});
    }
    if (c_.head_dim == 0) return;
    const Shape out_v{rows_, c_.heads, c_.head_dim};
    const Shape w_v{c_.heads, c_.head_dim, c_.v_dim};
    add("w_v", "parameters", Kept::until_backward, c_.dtype, w_v);
    add("d_w_v", "parameters", Kept::until_backward, DType::f32, w_v);
    add("out_v", "outputs", Kept::within_layer, c_.dtype, out_v);
    add("d_out_v", "gradients", Kept::within_layer, c_.dtype, out_v);
  }

  void add_keys(std::string_view name, std::int64_t whole, std::int64_t local, std::int64_t width) {
    const bool kv = name == "kv";
    add(name, "keys", Kept::unless_regathered, c_.dtype, {whole, width});
    add(kv ? "kv_shard" : "index_k_shard", "keys", Kept::until_backward, c_.dtype, {local, width});
    add(kv ? "d_kv" : "d_index_k", "gradients of keys", Kept::within_layer, DType::f32,
        {whole, width});
    add(kv ? "d_kv_shard" : "d_index_k_shard", "gradients of keys", Kept::within_layer, c_.dtype,
        {local, width});
    if (!kv) return;  // the staging of kv, whose rows are the widest, serves all keys
    if (whole_.reordered)
      add("by_rank", "staging", Kept::within_layer, DType::f32, {whole_.rows, width});
    add("sum", "staging", Kept::within_layer, DType::f32, {rows_, width});
  }

  const LayerKind& kind_;
  const Case& c_;
  const WholeKeys& whole_;
  const RankWork& work_;
  std::int64_t rows_;
};

std::vector<PlannedMessage> messages_of(const LayerKind& kind, const WholeKeys& whole,
                                        const RankWork& work) {
  const Case& c = kind.c;
  const auto row_bytes = static_cast<double>(element_bytes(c.dtype));
  std::vector<PlannedMessage> messages;
  const auto add = [&](std::string_view keys, std::int64_t others, std::int64_t width) {
    const auto elements = static_cast<double>(others * width);
    messages.push_back({keys, false, elements * row_bytes});
    messages.push_back({keys, true, elements * kSumBytes});
  };
  const std::int64_t other_rows = whole.rows - work.rows;
  const std::int64_t other_pools = whole.pools - work.pools;
  if (kind.has_indexer()) add("index_k", c.has_pools() ? other_pools : other_rows, c.index_dim);
  add("kv", other_rows, c.qk_dim);
  if (c.has_pools()) add("pools of kv", other_pools, c.qk_dim);
  return messages;
}

std::vector<PlannedCall> calls_of(const LayerKind& kind, const WholeKeys& whole,
                                  const RankWork& work, const Tensors& tensors) {
  const Case& c = kind.c;
  const KeyFlops each(c);
  const auto rows = static_cast<double>(work.rows);
  const auto seen = static_cast<double>(work.seen);
  const auto chosen = static_cast<double>(work.chosen);
  const auto slots = static_cast<double>(work.slots());
  const double mean = rows > 0 ? 1 / rows : 0;
  const double index_keys = seen * mean;
  const double keys = (seen + static_cast<double>(work.sliding)) * mean;
  const auto row_bytes = static_cast<double>(element_bytes(c.dtype));
  const double kv_bytes = row_bytes * static_cast<double>(c.qk_dim);
  const double index_bytes = row_bytes * static_cast<double>(c.index_dim);
  // Adding to a gradient reads and writes it, and the key itself is read too.
  const double added = 1 + 2 * kSumBytes / row_bytes;
  const double beside = 1 + kSumBytes / row_bytes;
  const auto bytes = [&](std::initializer_list<std::string_view> names) {
    return tensors.bytes(names);
  };

  // Gathered keys are written once; where the order of ranks is not that of the batch, they are
  // read and written once more. Gradients are zeroed, reordered in the same way, and read once.
  const double passes = whole.reordered ? 3 : 1;
  std::vector<PlannedCall> calls{
      {.name = "copies of gather_keys", .bytes = passes * bytes({"kv", "index_k"})}};
  if (kind.has_indexer())
    calls.push_back(
        {.name = "index_topk_forward",
         .flops = each.score * seen,
         // Scores are written to the workspace once and read once.
         .bytes = bytes({"index_q", "weights", "index_k", "selected", "scores"}) + 8 * seen,
         .keys = index_keys});
  if (c.window > 0)
    calls.push_back({.name = "window_indices", .bytes = bytes({"selected", "indices"})});
  calls.push_back({.name = "sparse_attention_forward",
                   .flops = each.attend * slots,
                   .bytes = bytes({"q", "out", "lse", "indices"}),
                   .listed_bytes = kv_bytes * slots,
                   .keys = keys,
                   .key_bytes = kv_bytes});
  if (c.head_dim > 0)
    calls.push_back({.name = "value_projection_forward",
                     .flops = each.project * rows,
                     .bytes = bytes({"out", "w_v", "out_v"})});
  if (kind.has_indexer()) {
    calls.push_back({.name = "index_target",
                     .flops = each.target * chosen,
                     .bytes = bytes({"q", "lse", "selected", "target"}),
                     .listed_bytes = kv_bytes * chosen,
                     .keys = index_keys,
                     .key_bytes = kv_bytes});
    calls.push_back({.name = "index_loss",
                     .bytes = bytes({"selected", "scores", "target", "loss", "d_scores"})});
  }
  if (c.head_dim > 0)
    calls.push_back({.name = "value_projection_backward",
                     .backward = true,
                     .flops = each.project_backward * rows,
                     .bytes = bytes({"out", "w_v", "d_out_v", "d_out", "d_w_v"})});
  calls.push_back({.name = "sparse_attention_backward",
                   .backward = true,
                   .flops = each.attend_backward * slots,
                   .bytes = bytes({"q", "out", "lse", "indices", "d_out", "d_q"}),
                   .listed_bytes = added * kv_bytes * slots,
                   .keys = keys,
                   .key_bytes = beside * kv_bytes});
  if (kind.has_indexer())
    calls.push_back(
        {.name = "index_topk_backward",
         .backward = true,
         .flops = each.score_backward * chosen,
         .bytes = bytes({"index_q", "weights", "selected", "d_scores", "d_index_q", "d_weights"}),
         .listed_bytes = added * index_bytes * chosen,
         .keys = index_keys,
         .key_bytes = beside * index_bytes});
  calls.push_back({.name = "copies of scatter_key_grads",
                   .backward = true,
                   .bytes = (1 + passes) * bytes({"d_kv", "d_index_k"})});
  return calls;
}

}  // namespace

double PlannedTensor::bytes() const {
  auto bytes = static_cast<double>(element_bytes(dtype));
  for (const std::int64_t size : shape) bytes *= static_cast<double>(size);
  return bytes;
}

std::string_view name(Bound bound) {
  switch (bound) {
    case Bound::compute:
      return "compute";
    case Bound::memory:
      return "memory";
    default:
      return "network";
  }
}

double PlannedCall::memory_bytes(const DeviceRates& device) const {
  // Lists that draw evenly from more bytes than the L2 cache holds miss it in that proportion.
  const double reached = keys * key_bytes;
  const double missing = reached > device.cache_bytes ? 1 - device.cache_bytes / reached : 0;
  return bytes + reached + missing * listed_bytes;
}

double PlannedCall::seconds(const DeviceRates& device, std::string_view model) const {
  if (flops == 0) return memory_bytes(device) / device.memory_rate.value;
  return flops / call_rate(device, name, model, keys);
}

Bound PlannedCall::bound(const DeviceRates& device) const {
  return memory_bytes(device) / device.memory_rate.value > flops / device.matrix_product.value
             ? Bound::memory
             : Bound::compute;
}

LayerPlan plan_layer(const LayerKind& kind, const WholeKeys& whole, const RankWork& work) {
  Tensors tensors(kind, whole, work);
  LayerPlan plan;
  plan.calls = calls_of(kind, whole, work, tensors);
  plan.messages = messages_of(kind, whole, work);
  plan.tensors = std::move(tensors.list);
  return plan;
}

}  // namespace winnow::plan
