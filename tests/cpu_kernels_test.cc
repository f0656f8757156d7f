// SPDX-License-Identifier: Apache-2.0
// The kernels of the cpu backend for one operator round differently. Where two gave the same bits,
// one would be doing the other's work: also by what it falls back to in rows that it does not suit.
#include "tests/attention_calls.h"
#include "tests/indexer_calls.h"

namespace winnow::tests {
namespace {

/// Calls body(execution) for the kernels of an operator on the cpu backend that take such a call.
template <class Args, class Body>
void on_each_cpu_kernel(const Args& args, const Body& body) {
  for (const std::string_view kernel : kernels<Args>(Backend::cpu)) {
    const Execution execution{.backend = Backend::cpu, .kernel = kernel.data()};
    if (why_not(args, execution).empty()) body(execution);
  }
}

void expect_all_different(const std::vector<Values>& results) {
  for (std::size_t i = 0; i < results.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(results[i], results[j]) << i << " and " << j;
}

TEST(CpuKernels, OfAttentionDifferInTheirLastBits) {
  for (const Attention& shape :
       {Attention{},
        Attention{
            .tokens = 4, .keys = 160, .heads = 5, .qk_dim = 576, .v_dim = 512, .topk = 130}}) {
    SCOPED_TRACE(fmt::format("qk_dim {}", shape.qk_dim));
    const Attention a = filled(shape, 1);
    const AttentionForwardWork work(a, {});
    std::vector<Values> out, d_q, d_kv;
    const AttentionOutputs outputs = forward(a, on(Backend::reference));
    on_each_cpu_kernel(
        work.args, [&](const Execution& execution) { out.push_back(forward(a, execution).out); });
    on_each_cpu_kernel(AttentionBackwardWork(a, outputs, {}).args, [&](const Execution& execution) {
      const AttentionGradients gradients = backward(a, outputs, execution);
      d_q.push_back(gradients.d_q);
      d_kv.push_back(gradients.d_kv);
    });
    expect_all_different(out);
    expect_all_different(d_q);
    expect_all_different(d_kv);
  }
}

TEST(CpuKernels, OfTheIndexerDifferInTheirLastBits) {
  for (const DType dtype : {DType::bf16, DType::f8_e4m3}) {
    SCOPED_TRACE(name(dtype));
    Indexer ix =
        filled({.tokens = 4, .keys = 300, .heads = 32, .dim = 128, .topk = 300, .dtype = dtype}, 2);
    if (dtype == DType::f8_e4m3) {
      ix.k_scale = whole_numbers(ix.keys, 2, "k_scale", 1, 100);
      for (double& scale : ix.k_scale) scale /= 37;
    }
    std::vector<Values> scores;
    const IndexForwardWork work(ix, {}, false);
    on_each_cpu_kernel(work.args, [&](const Execution& execution) {
      scores.push_back(select(ix, execution).scores);
    });
    expect_all_different(scores);
  }
}

}  // namespace
}  // namespace winnow::tests
