// SPDX-License-Identifier: Apache-2.0
// Training steps of one sparse layer: forward, the gradients of attention, the loss that teaches
// the indexer which keys attention uses, and its gradients. Plain gradient descent makes both fall.
#include <cmath>
#include <cstdio>
#include <vector>

#include "winnow/winnow.h"

namespace {

constexpr int kTokens = 96, kHeads = 4, kDim = 64, kIndexHeads = 2, kIndexDim = 32, kTopk = 8;
constexpr float kScale = 0.125f;  // of the logits: 1 / sqrt(kDim)

/// Memory, and the tensor that winnow sees.
template <class T>
struct Array {
  explicit Array(std::initializer_list<std::int64_t> shape) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    values.resize(count);
    tensor = winnow::tensor_of(values, shape);
  }
  operator winnow::Tensor() const { return tensor; }

  std::vector<T> values;
  winnow::Tensor tensor;
};
using Floats = Array<float>;
using Ints = Array<std::int32_t>;

/// Any numbers, the same every time, in place of a model's projections.
void fill(Floats& array, float frequency) {
  for (std::size_t i = 0; i < array.values.size(); ++i)
    array.values[i] = std::sin(frequency * static_cast<float>(i * i % 1009));
}

/// Gradients of keys are added to what is there, so each is set back to 0.
void descend(Floats& array, Floats& gradient, float rate) {
  for (std::size_t i = 0; i < array.values.size(); ++i) {
    array.values[i] -= rate * gradient.values[i];
    gradient.values[i] = 0;
  }
}

}  // namespace

int main() {
  Floats q({kTokens, kHeads, kDim}), kv({kTokens, kDim}), weights({kTokens, kIndexHeads});
  Floats index_q({kTokens, kIndexHeads, kIndexDim}), index_k({kTokens, kIndexDim});
  fill(q, 0.1f), fill(kv, 0.3f), fill(index_q, 0.7f), fill(index_k, 0.9f);
  weights.values.assign(weights.values.size(), 0.2f);
  Ints cu_seqlens({3}), begin({kTokens}), end({kTokens});
  cu_seqlens.values = {0, 36, kTokens};  // two documents
  winnow::key_windows({.cu_seqlens = cu_seqlens, .begin = begin, .end = end});

  Ints indices({kTokens, kTopk}), lengths({kTokens});
  Floats scores({kTokens, kTopk}), target({kTokens, kTopk}), index_loss({kTokens});
  Floats out({kTokens, kHeads, kDim}), lse({kTokens, kHeads});
  Floats d_q({kTokens, kHeads, kDim}), d_kv({kTokens, kDim}), d_scores({kTokens, kTopk});
  Floats d_index_q({kTokens, kIndexHeads, kIndexDim}), d_index_k({kTokens, kIndexDim});
  Floats d_weights({kTokens, kIndexHeads});

  double first = 0, last = 0, first_of_indexer = 0, last_of_indexer = 0;
  for (int step = 0; step <= 20; ++step) {
    winnow::IndexTopkForward selection = {.q = index_q, .k = index_k, .weights = weights};
    selection.begin = begin, selection.end = end;
    selection.indices = indices, selection.lengths = lengths, selection.scores = scores;
    winnow::index_topk_forward(selection);
    winnow::SparseAttentionForward attention = {.q = q, .kv = kv, .indices = indices};
    attention.lengths = lengths, attention.scale = kScale;
    attention.out = out, attention.lse = lse;
    winnow::sparse_attention_forward(attention);

    // The loss of attention is sum(out^2) / 2, so that d_out is out.
    winnow::SparseAttentionBackward backward = {.q = q, .kv = kv, .indices = indices};
    backward.lengths = lengths, backward.scale = kScale;
    backward.out = out, backward.lse = lse, backward.d_out = out;
    backward.d_q = d_q, backward.d_kv = d_kv;
    winnow::sparse_attention_backward(backward);

    winnow::IndexTarget shares = {.q = q, .kv = kv, .indices = indices, .lengths = lengths};
    shares.lse = lse, shares.scale = kScale, shares.target = target;
    winnow::index_target(shares);
    winnow::IndexLoss loss = {.indices = indices, .lengths = lengths, .scores = scores};
    loss.target = target, loss.loss = index_loss, loss.d_scores = d_scores;
    winnow::index_loss(loss);
    winnow::IndexTopkBackward indexer = {.q = index_q, .k = index_k, .weights = weights};
    indexer.begin = begin, indexer.end = end;
    indexer.indices = indices, indexer.lengths = lengths, indexer.d_scores = d_scores;
    indexer.d_q = d_index_q, indexer.d_weights = d_weights, indexer.d_k = d_index_k;
    winnow::index_topk_backward(indexer);

    last = last_of_indexer = 0;
    for (const float value : out.values) last += 0.5 * value * value;
    for (const float row : index_loss.values) last_of_indexer += row;
    if (step == 0) first = last, first_of_indexer = last_of_indexer;
    descend(q, d_q, 0.01f), descend(kv, d_kv, 0.01f);
    descend(index_q, d_index_q, 0.1f), descend(index_k, d_index_k, 0.1f);
  }
  std::printf("attention: loss %.2f, after 20 steps %.2f\n", first, last);
  std::printf("indexer:   loss %.2f, after 20 steps %.2f\n", first_of_indexer, last_of_indexer);
  return last < first && last_of_indexer < first_of_indexer ? 0 : 1;
}
