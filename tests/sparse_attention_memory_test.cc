// SPDX-License-Identifier: Apache-2.0
// sparse_attention: tensor layouts, workspaces, many rows and large offsets.
#include "tests/attention_calls.h"
#include "tests/far_memory.h"

namespace winnow::tests {
namespace {

/// A workspace of exactly `bytes` between canaries, on the device.
Buffer workspace_of(Device device, std::size_t bytes) {
  return {device, DType::i32, {static_cast<std::int64_t>((bytes + 3) / 4)}};
}

Execution with_workspace(Backend backend, const Buffer& workspace, std::size_t bytes) {
  return {.backend = backend,
          .workspace = workspace.tensor().data,
          .workspace_bytes = bytes,
          .deterministic = true};
}

// ---- Layouts.

TEST(SparseAttentionMemory, StridedRowsGiveTheSame) {
  on_each_attention(51, [](Backend backend, const Attention& a) {
    const AttentionOutputs outputs = forward(a, on(backend));
    const AttentionGradients gradients = backward(a, outputs, on(backend));
    for (const std::int64_t padding : {1, 3, 8}) {  // an odd one also misaligns rows
      Attention strided = a;
      strided.row_padding = padding;
      expect_close(a, forward(strided, on(backend)), outputs);
      expect_close(a, backward(strided, outputs, on(backend)), gradients);
    }
  });
}

/// A view with its first two dimensions swapped.
Tensor swapped(Tensor tensor) {
  std::swap(tensor.shape[0], tensor.shape[1]);
  std::swap(tensor.stride[0], tensor.stride[1]);
  return tensor;
}

/// [tokens, heads, dim] -> [heads, tokens, dim]
Values heads_first(const Values& values, std::int64_t tokens, std::int64_t heads) {
  const std::int64_t dim = static_cast<std::int64_t>(values.size()) / (tokens * heads);
  Values result;
  for (std::int64_t h = 0; h < heads; ++h)
    for (std::int64_t t = 0; t < tokens; ++t) {
      const Values row = part(values, (t * heads + h) * dim, dim);
      result.insert(result.end(), row.begin(), row.end());
    }
  return result;
}

TEST(SparseAttentionMemory, HeadsMayComeFirst) {
  on_each_attention(52, [](Backend backend, const Attention& a) {
    const Device device = harness::device_of(backend);
    const AttentionOutputs expected = forward(a, on(backend));
    AttentionForwardWork work(a, device);
    const Buffer q =
        floats(device, a.dtype, {a.heads, a.tokens, a.qk_dim}, heads_first(a.q, a.tokens, a.heads));
    const Buffer out(device, a.dtype, {a.heads, a.tokens, a.v_dim});
    work.args.q = swapped(q.tensor());
    work.args.out = swapped(out.tensor());
    sparse_attention_forward(work.args, on(backend));
    expect_canaries_intact(q, out);
    expect_close(a,
                 {heads_first(out.download(), a.heads, a.tokens), work.lse.download(),
                  work.max_logits.download()},
                 expected);
  });
}

TEST(SparseAttentionMemory, OneRowMayServeForAll) {
  // Stride 0: the same query and the same index list for every token.
  on_each_attention(53, [](Backend backend, const Attention& whole) {
    Attention a = whole;
    for (std::int64_t i = 0; i < a.tokens * a.topk; ++i) a.indices[i] = a.indices[i % a.topk];
    for (std::size_t i = 0; i < a.q.size(); ++i) a.q[i] = a.q[i % (a.heads * a.qk_dim)];
    const AttentionForwardWork expanded(a, harness::device_of(backend));
    SparseAttentionForward args = expanded.args;
    args.q.stride[0] = 0;
    args.indices.stride[0] = 0;
    sparse_attention_forward(args, on(backend));
    expect_close(a, expanded.outputs(), plain_attention(a));
  });
}

// ---- Workspaces.

TEST(SparseAttentionMemory, AWorkspaceOfTheSizeAskedForServes) {
  on_each_attention(54, [](Backend backend, const Attention& a) {
    const Device device = harness::device_of(backend);
    const AttentionForwardWork forward_work(a, device);
    std::size_t bytes = workspace_bytes(forward_work.args, on(backend));
    Buffer workspace = workspace_of(device, bytes);
    sparse_attention_forward(forward_work.args, with_workspace(backend, workspace, bytes));
    expect_canaries_intact(workspace);
    const AttentionOutputs outputs = forward_work.outputs();
    expect_same_bits(outputs, forward(a, on(backend)));

    const AttentionBackwardWork backward_work(a, outputs, device);
    Execution execution{.backend = backend, .deterministic = true};
    bytes = workspace_bytes(backward_work.args, execution);
    workspace = workspace_of(device, bytes);
    sparse_attention_backward(backward_work.args, with_workspace(backend, workspace, bytes));
    expect_canaries_intact(workspace);
    expect_same_bits(backward_work.gradients(), backward(a, outputs, execution));
  });
}

TEST(SparseAttentionMemory, AWorkspaceTooSmallIsRefusedWithBothSizes) {
  on_each_attention(55, [](Backend backend, const Attention& a) {
    const Device device = harness::device_of(backend);
    const AttentionForwardWork work(a, device);
    const std::size_t bytes = workspace_bytes(work.args, on(backend));
    if (bytes == 0) return;
    const Buffer workspace = workspace_of(device, bytes);
    const std::string text = refusal_of([&] {
      sparse_attention_forward(work.args, with_workspace(backend, workspace, bytes - 1));
    });
    EXPECT_EQ(text, fmt::format("sparse_attention_forward: workspace of {} bytes: must be at least "
                                "{} bytes, as workspace_bytes says",
                                bytes - 1, bytes));
    EXPECT_TRUE(all_equal(work.out.download(), kNaN)) << "out was written";
  });
}

TEST(SparseAttentionMemory, TheWorkspaceLimitHoldsOrIsNamed) {
  on_each_attention(56, [](Backend backend, const Attention& a) {
    const Device device = harness::device_of(backend);
    const AttentionOutputs outputs = forward(a, on(backend));
    const AttentionGradients gradients =
        backward(a, outputs, {.backend = backend, .deterministic = true});
    for (std::size_t limit = 1; limit <= std::size_t{256} << 20; limit *= 4) {
      const Execution execution{
          .backend = backend, .workspace_limit = limit, .deterministic = true};
      const AttentionForwardWork forward_work(a, device);
      std::string reason = why_not(forward_work.args, execution);
      if (reason.empty()) {
        EXPECT_LE(workspace_bytes(forward_work.args, execution), limit);
        expect_same_bits(forward(a, execution), outputs);
      } else {
        EXPECT_NE(reason.find("needs a workspace_limit of at least"), std::string::npos) << reason;
        EXPECT_LT(limit, std::size_t{256} << 20);
      }
      const AttentionBackwardWork backward_work(a, outputs, device);
      reason = why_not(backward_work.args, execution);
      if (reason.empty()) {
        EXPECT_LE(workspace_bytes(backward_work.args, execution), limit);
        expect_close(a, backward(a, outputs, execution), gradients);
      } else {
        EXPECT_NE(reason.find("needs a workspace_limit of at least"), std::string::npos) << reason;
        EXPECT_LT(limit, std::size_t{256} << 20);
      }
    }
  });
}

TEST(SparseAttentionMemory, ALimitThatIsNamedIsEnough) {
  on_each_attention(57, [](Backend backend, const Attention& a) {
    const AttentionForwardWork work(a, harness::device_of(backend));
    const std::string reason = why_not(work.args, {.backend = backend, .workspace_limit = 1});
    if (reason.empty()) return;  // it needs no workspace
    const std::string before = "at least ";
    const std::size_t least = std::stoull(reason.substr(reason.find(before) + before.size()));
    EXPECT_EQ(why_not(work.args, {.backend = backend, .workspace_limit = least}), "");
    EXPECT_NE(why_not(work.args, {.backend = backend, .workspace_limit = least - 1}), "");
    expect_same_bits(forward(a, {.backend = backend, .workspace_limit = least}),
                     forward(a, on(backend)));
  });
}

// ---- Size.

TEST(SparseAttentionMemory, TakesMoreThan65535Rows) {
  on_each_backend([](Backend backend) {
    Attention a{.tokens = 70000, .keys = 100, .heads = 1, .qk_dim = 8, .v_dim = 8, .topk = 2};
    a.q = normals(a.tokens * 8, 58, "q");
    a.kv = normals(a.keys * 8, 58, "kv");
    a.d_out = normals(a.tokens * 8, 58, "d_out");
    for (std::int64_t i = 0; i < a.tokens * a.topk; ++i)
      a.indices.push_back(static_cast<std::int32_t>(i * 37 % a.keys));
    const AttentionOutputs outputs = forward(a, on(backend));
    const AttentionGradients gradients = backward(a, outputs, on(backend));
    for (const std::int64_t t : {0, 32768, 65535, 65536, 69999}) {
      SCOPED_TRACE(t);
      const Attention row = rows_of(a, t, 1);
      expect_same_bits(forward(row, on(backend)), rows_of(a, outputs, t, 1));
      EXPECT_TRUE(same_bits(backward(row, rows_of(a, outputs, t, 1), on(backend)).d_q,
                            part(gradients.d_q, t * 8, 8)));
    }
  });
}

TEST(SparseAttentionMemory, ElementsMayLiePast31Bits) {
  on_each_backend([](Backend backend) {
    const Attention a = filled({.tokens = 3, .keys = 5, .qk_dim = 16, .v_dim = 8, .topk = 4}, 59);
    const Device device = harness::device_of(backend);
    const AttentionOutputs expected = forward(a, on(backend));
    const AttentionGradients expected_gradients = backward(a, expected, on(backend));

    const AttentionForwardWork work(a, device);
    {
      const FarTensor q(work.args.q), kv(work.args.kv), out(work.args.out);
      if (!q || !kv || !out) GTEST_SKIP() << "no room for a large range of addresses";
      SparseAttentionForward far = work.args;
      far.q = q.tensor();
      far.kv = kv.tensor();
      far.out = out.tensor();
      sparse_attention_forward(far, on(backend));
      out.download_all();
    }
    expect_close(a, work.outputs(), expected);

    const AttentionBackwardWork gradients(a, expected, device);
    {
      const FarTensor q(gradients.args.q), kv(gradients.args.kv), d_q(gradients.args.d_q),
          d_kv(gradients.args.d_kv);
      if (!q || !kv || !d_q || !d_kv) GTEST_SKIP() << "no room for a large range of addresses";
      SparseAttentionBackward far = gradients.args;
      far.q = q.tensor();
      far.kv = kv.tensor();
      far.d_q = d_q.tensor();
      far.d_kv = d_kv.tensor();
      sparse_attention_backward(far, on(backend));
      d_q.download_all();
      d_kv.download_all();
    }
    expect_close(a, gradients.gradients(), expected_gradients);
  });
}

}  // namespace
}  // namespace winnow::tests
