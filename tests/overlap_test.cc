// SPDX-License-Identifier: Apache-2.0
// Arguments that share memory: no output and no workspace may, inputs and interleaved views may.
#include "core/overlap.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <string>

#include "tests/attention_calls.h"
#include "tests/indexer_calls.h"
#include "tests/random_calls.h"

namespace winnow::tests {
namespace {

constexpr char kRefused[] = ": outputs and workspace must not share memory with another argument";

// ---- Two tensors.

/// A tensor of bf16 at an offset in elements.
Tensor view(std::int64_t offset, const Shape& shape, const Shape& stride) {
  constexpr std::uintptr_t kAnywhere = 1 << 20;
  Tensor result{.data = reinterpret_cast<void*>(kAnywhere + 2 * offset),
                .dtype = DType::bf16,
                .device = {},
                .rank = static_cast<std::int32_t>(shape.size())};
  std::copy(shape.begin(), shape.end(), result.shape.begin());
  std::copy(stride.begin(), stride.end(), result.stride.begin());
  return result;
}

/// The addresses of a tensor one by one.
std::set<std::uintptr_t> addresses(const Tensor& tensor) {
  std::set<std::uintptr_t> result = {reinterpret_cast<std::uintptr_t>(tensor.data)};
  for (int d = 0; d < tensor.rank; ++d) {
    std::set<std::uintptr_t> of_all;
    for (const std::uintptr_t address : result)
      for (std::int64_t i = 0; i < tensor.shape[d]; ++i)
        of_all.insert(address + i * tensor.stride[d] * element_bytes(tensor.dtype));
    result = std::move(of_all);
  }
  if (element_bytes(tensor.dtype) > 1) {
    std::set<std::uintptr_t> bytes;
    for (const std::uintptr_t address : result)
      for (std::int64_t i = 0; i < element_bytes(tensor.dtype); ++i) bytes.insert(address + i);
    return bytes;
  }
  return result;
}

Tensor random_view(const Random& random, std::int64_t& draw) {
  const auto below = [&](std::int64_t n) { return random.below(draw++, n); };
  Shape shape, stride;
  for (std::int64_t rank = below(4); rank >= 0; --rank) {
    shape.push_back(below(12) == 0 ? 0 : 1 + below(4));
    stride.push_back(below(3) == 0 ? below(30) : 6 * below(5));
  }
  stride.back() = 1;
  Tensor tensor = view(below(60), shape, stride);
  tensor.dtype = below(2) == 0 ? DType::bf16 : DType::f32;
  return tensor;
}

TEST(SharedMemory, IsFoundByteByByte) {
  const Random random(1, "views");
  std::int64_t draw = 0;
  int shared = 0, interleaved = 0;
  for (int i = 0; i < 20'000; ++i) {
    const Tensor a = random_view(random, draw);
    const Tensor b = random_view(random, draw);
    const std::set<std::uintptr_t> of_a = addresses(a);
    const std::set<std::uintptr_t> of_b = addresses(b);
    const bool expected = std::any_of(of_a.begin(), of_a.end(),
                                      [&](std::uintptr_t byte) { return of_b.contains(byte); });
    ASSERT_EQ(share_memory(a, b), expected) << i;
    ASSERT_EQ(share_memory(b, a), expected) << i;
    shared += expected ? 1 : 0;
    interleaved += !expected && meet(hull_of(a), hull_of(b)) ? 1 : 0;
  }
  EXPECT_GT(shared, 2000);
  EXPECT_GT(interleaved, 2000);
}

TEST(SharedMemory, IsFoundInLargeViews) {
  constexpr std::int64_t kRows = 1'000'000, kHeads = 64, kDim = 576;
  const Shape shape = {kRows, kHeads, kDim};
  const Shape packed = {2 * kHeads * kDim, 2 * kDim, 1};
  const Tensor left = view(0, shape, packed);
  EXPECT_FALSE(share_memory(left, view(kDim, shape, packed)));
  EXPECT_TRUE(share_memory(left, view(kDim - 1, shape, packed)));
  EXPECT_FALSE(share_memory(left, view(kDim + 2 * kDim * kHeads * (kRows / 2), shape, packed)));
  // A contiguous tensor in a gap, and one that is an element too long for it.
  const std::int64_t gap = kDim + 2 * kDim * kHeads * 777;
  EXPECT_FALSE(share_memory(left, view(gap, {kDim}, {1})));
  EXPECT_TRUE(share_memory(left, view(gap, {kDim + 1}, {1})));
  EXPECT_TRUE(share_memory(view(gap - 1, {kDim}, {1}), left));
  // Behind it.
  EXPECT_FALSE(share_memory(left, view(2 * kDim * kHeads * kRows, shape, packed)));
}

TEST(SharedMemory, OfTensorsWithoutElementsIsNone) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const Tensor all = view(0, {100}, {1});
  EXPECT_FALSE(share_memory(all, view(10, {kMost, 0}, {kMost, 1})));
  EXPECT_FALSE(share_memory(all, Tensor()));
  EXPECT_TRUE(share_memory(all, view(10, {}, {})));
}

TEST(SharedMemory, OfTensorsThatRepeatTheirRowsIsThatOfOneRow) {
  const Tensor row = view(8, {1000, 8}, {0, 1});
  EXPECT_TRUE(share_memory(row, view(15, {4}, {1})));
  EXPECT_FALSE(share_memory(row, view(16, {4}, {1})));
  EXPECT_FALSE(share_memory(row, view(0, {4, 8}, {16, 1})));
}

// ---- Calls.

/// Valid calls of all operators; each has several seeds.
template <class Body>
void on_many_calls(Device device, const Body& body) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Call call = make_call(seed, device);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, call.op));
    body(call);
  }
}

bool has_elements(const Argument& argument) { return hull_of(*argument.tensor).bytes > 0; }

TEST(Overlap, OfAnOutputIsRefusedByName) {
  on_each_backend([](Backend backend) {
    std::set<std::string_view> operators;
    on_many_calls(harness::device_of(backend), [&](Call& call) {
      for (const Argument& output : call.arguments) {
        if (!output.is_output || !has_elements(output)) continue;
        for (const Argument& other : call.arguments) {
          if (&other == &output || !has_elements(other)) continue;
          const Tensor before = *output.tensor;
          output.tensor->data = other.tensor->data;
          const bool first = !other.is_output || &output < &other;
          EXPECT_EQ(refusal_of([&] { call.run(on(backend)); }),
                    fmt::format("{}: {} overlaps {}{}", call.op, first ? output.name : other.name,
                                first ? other.name : output.name, kRefused));
          *output.tensor = before;
          operators.insert(call.op);
        }
      }
      EXPECT_EQ(refusal_of([&] { call.run(on(backend)); }), "");
    });
    EXPECT_EQ(operators.size(), std::tuple_size_v<Operators>);
  });
}

TEST(Overlap, OfTheWorkspaceIsRefusedByName) {
  on_each_backend([](Backend backend) {
    on_many_calls(harness::device_of(backend), [&](Call& call) {
      for (const Argument& argument : call.arguments) {
        if (!has_elements(argument)) continue;
        const Execution execution{
            .backend = backend, .workspace = argument.begin(), .workspace_bytes = 1 << 20};
        const std::string expected =
            fmt::format("{}: workspace overlaps {}{}", call.op, argument.name, kRefused);
        // The memory of other tensors may be within that megabyte too.
        const Execution small{
            .backend = backend, .workspace = argument.begin(), .workspace_bytes = 1};
        EXPECT_EQ(refusal_of([&] { call.run(small); }), expected);
        EXPECT_NE(refusal_of([&] { call.run(execution); }).find(kRefused), std::string::npos);
      }
    });
  });
}

TEST(Overlap, OfInputsIsAllowed) {
  on_each_backend([](Backend backend) {
    const Attention a = filled(Attention{.tokens = 20, .heads = 1}, 5);
    AttentionForwardWork work(a, harness::device_of(backend));
    work.args.q = work.args.kv;  // [keys, qk_dim] as [tokens, 1, qk_dim]
    work.args.q.rank = 3;
    work.args.q.shape = {20, 1, work.args.kv.shape[1]};
    work.args.q.stride = {work.args.kv.stride[0], work.args.kv.shape[1], 1};
    EXPECT_EQ(refusal_of([&] { sparse_attention_forward(work.args, on(backend)); }), "");
  });
}

TEST(Overlap, OfReplayedIndicesIsThatOfInputs) {
  on_each_backend([](Backend backend) {
    IndexForwardWork work(filled(Indexer{}, 6), harness::device_of(backend), false);
    IndexTopkForward args = work.args;
    args.lengths = args.begin;
    EXPECT_EQ(refusal_of([&] { index_topk_forward(args, on(backend)); }),
              std::string("index_topk_forward: lengths overlaps begin") + kRefused);
    const Buffer lengths = ints(harness::device_of(backend), {args.q.shape[0]},
                                Ints(static_cast<std::size_t>(args.q.shape[0]), 0));
    args.replay = true;
    args.lengths = args.begin = args.end = lengths.tensor();
    EXPECT_EQ(refusal_of([&] { index_topk_forward(args, on(backend)); }), "");
    args.scores.data = args.indices.data;
    EXPECT_EQ(refusal_of([&] { index_topk_forward(args, on(backend)); }),
              std::string("index_topk_forward: scores overlaps indices") + kRefused);
  });
}

TEST(Overlap, OfInterleavedViewsIsNone) {
  on_each_backend([](Backend backend) {
    const Attention a = filled(Attention{}, 7);
    const Device device = harness::device_of(backend);
    AttentionForwardWork apart(a, device);
    sparse_attention_forward(apart.args, on(backend));
    // q and out are the parts of the rows of one tensor.
    AttentionForwardWork together(a, device);
    const Tensor q = together.args.q;
    const std::int64_t width = a.qk_dim + a.v_dim;
    const Buffer packed(device, q.dtype, {a.tokens, a.heads, width});
    Values values = packed.download();
    const Values of_q = apart.memory.find("q").download();
    for (std::int64_t row = 0; row < a.tokens * a.heads; ++row)
      std::copy_n(of_q.begin() + row * a.qk_dim, a.qk_dim, values.begin() + row * width);
    Buffer filled_packed(device, q.dtype, {a.tokens, a.heads, width});
    filled_packed.upload(values);
    const auto part_of = [&](std::int64_t first, std::int64_t count) {
      Tensor part = filled_packed.tensor();
      part.data = static_cast<char*>(part.data) + first * element_bytes(part.dtype);
      part.shape[2] = count;
      return part;
    };
    together.args.q = part_of(0, a.qk_dim);
    together.args.out = part_of(a.qk_dim, a.v_dim);
    sparse_attention_forward(together.args, on(backend));
    const Values after = filled_packed.download();
    const Values expected = apart.out.download();
    for (std::int64_t row = 0; row < a.tokens * a.heads; ++row) {
      EXPECT_TRUE(
          same_bits(part(after, row * width, a.qk_dim), part(values, row * width, a.qk_dim)));
      EXPECT_TRUE(same_bits(part(after, row * width + a.qk_dim, a.v_dim),
                            part(expected, row * a.v_dim, a.v_dim)));
    }
    // One element further they would meet.
    together.args.out = part_of(a.qk_dim - 1, a.v_dim);
    EXPECT_EQ(refusal_of([&] { sparse_attention_forward(together.args, on(backend)); }),
              std::string("sparse_attention_forward: out overlaps q") + kRefused);
  });
}

TEST(Overlap, OfSlicesOfABatchIsRefused) {
  on_each_backend([](Backend backend) {
    // The slices of out and kv lie in turn: one element more, and out of a slice meets kv of the
    // next.
    const Device device = harness::device_of(backend);
    const std::int64_t batch = 3, tokens = 2, heads = 1, dim = 8, keys = 4;
    const std::int64_t slice = keys * dim + tokens * heads * dim;
    const Buffer q = floats(device, DType::bf16, {batch, tokens, heads, dim},
                            Values(static_cast<std::size_t>(batch * tokens * heads * dim), 1));
    const Buffer both = floats(device, DType::bf16, {batch, slice},
                               Values(static_cast<std::size_t>(batch * slice), 1));
    const Buffer indices = ints(device, {batch, tokens, 1}, Ints(batch * tokens, 0));
    const Buffer lse(device, DType::f32, {batch, tokens, heads});
    SparseAttentionForward args{.q = q.tensor(), .indices = indices.tensor(), .lse = lse.tensor()};
    args.kv = args.out = both.tensor();
    args.kv.rank = 3;
    args.kv.shape = {batch, keys, dim};
    args.kv.stride = {slice, dim, 1};
    args.out.rank = 4;
    args.out.shape = {batch, tokens, heads, dim};
    args.out.stride = {slice, heads * dim, dim, 1};
    args.out.data = static_cast<char*>(both.tensor().data) + 2 * keys * dim;
    EXPECT_EQ(refusal_of([&] { sparse_attention_forward(args, on(backend)); }), "");
    args.out.data = static_cast<char*>(both.tensor().data) + 2 * (keys * dim + 1);
    EXPECT_EQ(refusal_of([&] { sparse_attention_forward(args, on(backend)); }),
              std::string("sparse_attention_forward: out overlaps kv") + kRefused);
  });
}

}  // namespace
}  // namespace winnow::tests
