// SPDX-License-Identifier: Apache-2.0
// Tensors of more than 2^31 elements on the cpu backend: rows at the beginning, at the boundary and
// at the end are compared with the reference on those rows alone. The tests of each op with large
// strides have such offsets on every backend; here all rows in between are computed too.
#include <fstream>
#include <string>

#include "tests/attention_calls.h"
#include "tests/far_memory.h"
#include "tests/indexer_calls.h"
#include "tests/sanitized.h"

namespace winnow::tests {
namespace {

constexpr std::int64_t kBoundary = std::int64_t{1} << 31;

/// Available memory of the machine in bytes; 0 if unknown.
std::int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    std::int64_t kib = 0;
    if (word == "MemAvailable:" && file >> kib) return kib * 1024;
  }
  return 0;
}

/// The reason to skip a test that writes so many bytes; empty if it can run.
std::string why_not_large(std::int64_t bytes) {
  if (kSanitized) return "sanitizers need memory of their own";
  // Twice as much, since the machine may be shared.
  const std::int64_t wanted = 2 * bytes;
  if (available_memory() >= wanted) return {};
  return fmt::format("needs {} GiB of free memory, there are {}", wanted >> 30,
                     available_memory() >> 30);
}

/// A contiguous tensor of `rows` rows, of which row places[i] is row i of `small` and all others
/// are zeros, or with `by_turns` the rows of `small` repeated.
class LargeTensor {
 public:
  LargeTensor(const Tensor& small, std::int64_t rows, const std::vector<std::int64_t>& places,
              bool by_turns = false)
      : small_(small),
        places_(places),
        row_bytes_(static_cast<std::size_t>(small.stride[0] * element_bytes(small.dtype))),
        view_(small),
        memory_({}, static_cast<std::size_t>(rows) * row_bytes_) {
    view_.shape[0] = rows;
    view_.data = memory_.data();
    if (!memory_) return;
    for (std::int64_t t = 0; by_turns && t < rows; ++t)
      std::memcpy(large_row(t), small_row(t % small.shape[0]), row_bytes_);
    for (std::size_t i = 0; i < places.size(); ++i)
      std::memcpy(large_row(places[i]), small_row(static_cast<std::int64_t>(i)), row_bytes_);
  }
  explicit operator bool() const { return bool(memory_); }
  const Tensor& tensor() const { return view_; }
  /// Copies the rows at `places` back to `small`.
  void copy_back() const {
    for (std::size_t i = 0; i < places_.size(); ++i)
      std::memcpy(small_row(static_cast<std::int64_t>(i)), large_row(places_[i]), row_bytes_);
  }

 private:
  char* small_row(std::int64_t i) const {
    return static_cast<char*>(small_.data) + i * static_cast<std::int64_t>(row_bytes_);
  }
  char* large_row(std::int64_t t) const {
    return memory_.data() + t * static_cast<std::int64_t>(row_bytes_);
  }

  Tensor small_;
  std::vector<std::int64_t> places_;
  std::size_t row_bytes_;
  Tensor view_;
  FarMemory memory_;
};

/// The first row, the two rows around element 2^31, and the last row.
struct Places {
  explicit Places(std::int64_t row_elements)
      : rows(kBoundary / row_elements + 100),
        list{0, kBoundary / row_elements - 1, kBoundary / row_elements,
             kBoundary / row_elements + 1, rows - 1} {}

  std::int64_t rows;
  std::vector<std::int64_t> list;
};

TEST(SlowLargeTensors, OfAttentionAreReadAndWrittenPast31Bits) {
  Attention a = filled({.tokens = 5,
                        .keys = 40,
                        .heads = 64,
                        .qk_dim = 576,
                        .v_dim = 16,
                        .topk = 4,
                        .scale = 0.0625F},
                       1);
  const Places places(a.heads * a.qk_dim);
  const std::string reason = why_not_large(places.rows * a.heads * a.qk_dim * 2);  // of d_q
  if (!reason.empty()) GTEST_SKIP() << reason;
  const AttentionOutputs expected = forward(a, on(Backend::reference));
  const AttentionGradients expected_gradients = backward(a, expected, on(Backend::reference));

  // For queries of zeros out is the mean of their keys; with d_out and d_lse 0 they do not change
  // d_kv.
  const AttentionForwardWork work(a, {});
  const AttentionBackwardWork gradients(a, expected, {});
  const LargeTensor q(work.args.q, places.rows, places.list);
  const LargeTensor indices(work.args.indices, places.rows, places.list, /*by_turns=*/true);
  const LargeTensor out(work.args.out, places.rows, places.list);
  const LargeTensor lse(work.args.lse, places.rows, places.list);
  const LargeTensor max_logits(work.args.max_logits, places.rows, places.list);
  const LargeTensor d_out(gradients.args.d_out, places.rows, places.list);
  const LargeTensor d_lse(gradients.args.d_lse, places.rows, places.list);
  const LargeTensor d_q(gradients.args.d_q, places.rows, places.list);
  ASSERT_TRUE(q && indices && out && lse && max_logits && d_out && d_lse && d_q);
  SparseAttentionForward large = work.args;
  large.q = q.tensor();
  large.indices = indices.tensor();
  large.out = out.tensor();
  large.lse = lse.tensor();
  large.max_logits = max_logits.tensor();
  sparse_attention_forward(large, on(Backend::cpu));
  for (const LargeTensor* output : {&out, &lse, &max_logits}) output->copy_back();
  expect_close(a, work.outputs(), expected);

  SparseAttentionBackward large_backward = gradients.args;
  large_backward.q = q.tensor();
  large_backward.indices = indices.tensor();
  large_backward.out = out.tensor();
  large_backward.lse = lse.tensor();
  large_backward.d_out = d_out.tensor();
  large_backward.d_lse = d_lse.tensor();
  large_backward.d_q = d_q.tensor();
  sparse_attention_backward(large_backward, on(Backend::cpu));
  d_q.copy_back();
  expect_close(a, gradients.gradients(), expected_gradients);
}

TEST(SlowLargeTensors, OfTheIndexerAreReadAndWrittenPast31Bits) {
  Indexer ix = filled_exactly({.tokens = 5, .keys = 24, .heads = 32, .dim = 128, .topk = 4}, 2);
  const Places places(ix.heads * ix.dim);
  const std::string reason = why_not_large(places.rows * ix.heads * ix.dim * 2);  // of d_q
  if (!reason.empty()) GTEST_SKIP() << reason;
  const Selected expected = select(ix, on(Backend::reference));
  ix.indices = expected.indices;
  ix.lengths = expected.lengths;
  const IndexGradients expected_gradients = backward(ix, on(Backend::reference));

  // Queries of zeros select the first keys of their window; with d_scores 0 they do not change
  // d_k.
  const IndexForwardWork work(ix, {}, false);
  const IndexBackwardWork gradients(ix, {});
  const LargeTensor q(work.args.q, places.rows, places.list);
  const LargeTensor weights(work.args.weights, places.rows, places.list, /*by_turns=*/true);
  const LargeTensor begin(work.args.begin, places.rows, places.list, /*by_turns=*/true);
  const LargeTensor end(work.args.end, places.rows, places.list, /*by_turns=*/true);
  const LargeTensor indices(work.args.indices, places.rows, places.list);
  const LargeTensor lengths(work.args.lengths, places.rows, places.list);
  const LargeTensor scores(work.args.scores, places.rows, places.list);
  const LargeTensor d_scores(gradients.args.d_scores, places.rows, places.list);
  const LargeTensor d_q(gradients.args.d_q, places.rows, places.list);
  const LargeTensor d_weights(gradients.args.d_weights, places.rows, places.list);
  ASSERT_TRUE(q && weights && begin && end && indices && lengths && scores && d_scores && d_q &&
              d_weights);
  IndexTopkForward large = work.args;
  large.q = q.tensor();
  large.weights = weights.tensor();
  large.begin = begin.tensor();
  large.end = end.tensor();
  large.indices = indices.tensor();
  large.lengths = lengths.tensor();
  large.scores = scores.tensor();
  index_topk_forward(large, on(Backend::cpu));
  for (const LargeTensor* output : {&indices, &lengths, &scores}) output->copy_back();
  expect_selected(work.selected(), expected);

  IndexTopkBackward large_backward = gradients.args;
  large_backward.q = q.tensor();
  large_backward.weights = weights.tensor();
  large_backward.begin = begin.tensor();
  large_backward.end = end.tensor();
  large_backward.indices = indices.tensor();
  large_backward.lengths = lengths.tensor();
  large_backward.d_scores = d_scores.tensor();
  large_backward.d_q = d_q.tensor();
  large_backward.d_weights = d_weights.tensor();
  index_topk_backward(large_backward, on(Backend::cpu));
  d_q.copy_back();
  d_weights.copy_back();
  expect_close(ix, gradients.gradients(), expected_gradients);
}

}  // namespace
}  // namespace winnow::tests
