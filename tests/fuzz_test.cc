// SPDX-License-Identifier: Apache-2.0
// Valid and mutated calls of every op must give correct results, or be refused by name with
// nothing written. At the end every refusal message must have been seen.
#include "tests/fuzz.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "tests/attention_calls.h"
#include "tests/fuzz_batches.h"
#include "tests/indexer_calls.h"
#include "tests/refusal_coverage.h"

namespace winnow::tests {
namespace {

constexpr int kCalls = 4000;       // a fifth of them valid
constexpr int kSlowCalls = 20000;  // these included
constexpr int kMaxFailures = 20;   // failures after which the test stops

RefusalCoverage coverage;

/// Failures of the running test so far.
int failures() {
  const ::testing::TestResult& result =
      *::testing::UnitTest::GetInstance()->current_test_info()->result();
  int count = 0;
  for (int i = 0; i < result.total_part_count(); ++i)
    count += result.GetTestPartResult(i).failed() ? 1 : 0;
  return count;
}

// ---- The fuzz.

/// Makes the calls with these seeds: each is computed right, or refused by name.
void expect_right_or_refused(std::uint64_t begin, std::uint64_t end) {
  on_each_backend([&](Backend backend) {
    Fuzz fuzz(backend);
    for (std::uint64_t seed = begin; seed < end && failures() < kMaxFailures; ++seed)
      fuzz.call(seed, [](const Error& error) { coverage.record(error.what()); });
    // Both outcomes must be frequent, or the test would be void. Refusals are rarer on a device,
    // where the contents of index tensors are clamped.
    EXPECT_GT(fuzz.computed, (end - begin) / 5);
    EXPECT_GT(fuzz.refused, (end - begin) * (backend == Backend::cuda ? 4 : 5) / 10);
  });
}

TEST(Refusals, OfSpoiltCallsNameTheArgument) { expect_right_or_refused(0, kCalls); }

TEST(Refusals, OfSpoiltBatchesAreOfTheCallersMistakes) {
  BatchFuzz fuzz;
  for (std::uint64_t seed = 0; seed < kCalls && failures() < kMaxFailures; ++seed) fuzz.call(seed);
  EXPECT_GT(fuzz.computed, kCalls / 5);
  EXPECT_GT(fuzz.refused, kCalls / 5);
}

TEST(SlowFuzz, ManyMoreCallsAreComputedRightOrRefusedByName) {
  expect_right_or_refused(kCalls, kSlowCalls);
}

// ---- Directed errors. Messages do not depend on the backend, which is chosen after the checks.

const Execution kReference = on(Backend::reference);
const Device kCuda{DeviceKind::cuda, 0};

template <class Run>
void expect_refused(const Run& run, const std::string& expected) {
  const std::string text = refusal_of(run);
  coverage.record(text);
  EXPECT_EQ(text, expected);
}

/// Mutates a valid sparse_attention_forward of q bf16[6, 3, 24], kv bf16[20, 24], indices i32[6,
/// 9].
template <class Spoil>
void expect_forward_refused(const Spoil& spoil, const std::string& expected,
                            const Execution& execution = kReference) {
  AttentionForwardWork work(filled(Attention{}, 1), {});
  spoil(work.args);
  expect_refused([&] { sparse_attention_forward(work.args, execution); },
                 "sparse_attention_forward: " + expected);
  EXPECT_TRUE(all_equal(work.out.download(), kNaN)) << "written to, then refused";
}

using Forward = SparseAttentionForward;

TEST(Refusals, OfTensors) {
  expect_forward_refused([](Forward& a) { a.kv = {}; }, "kv absent: must be given");
  expect_forward_refused([](Forward& a) { a.kv.rank = 1; },
                         "kv bf16[20]: must have 2 dimensions, [keys, qk_dim]");
  expect_forward_refused([](Forward& a) { a.q.dtype = DType::i32; },
                         "q i32[6, 3, 24]: dtype must be bf16, f16, f32 or f64");
  expect_forward_refused([](Forward& a) { a.kv.dtype = DType::f32; },
                         "kv f32[20, 24]: dtype must be bf16");
  expect_forward_refused([](Forward& a) { a.q.device.kind = static_cast<DeviceKind>(9); },
                         "q device kind 9 bf16[6, 3, 24]: device must be cpu or cuda");
  expect_forward_refused([](Forward& a) { a.kv.device = kCuda; },
                         "kv cuda:0 bf16[20, 24]: must be on cpu, as q");
  expect_forward_refused([](Forward& a) { a.q.shape[0] = -6; },
                         "q bf16[-6, 3, 24]: no dimension may be negative");
  expect_forward_refused([](Forward& a) { a.q.stride[0] = std::int64_t{1} << 62; },
                         "q bf16[6, 3, 24]: extends past what 64-bit offsets can address");
  expect_forward_refused([](Forward& a) { a.q.data = nullptr; },
                         "q bf16[6, 3, 24]: data must not be null");
  expect_forward_refused([](Forward& a) { a.q.data = static_cast<char*>(a.q.data) + 1; },
                         "q bf16[6, 3, 24]: data must be aligned to 2 bytes");
  expect_forward_refused([](Forward& a) { a.q.stride[2] = 2; },
                         "q bf16[6, 3, 24]: the last stride must be 1");
  expect_forward_refused([](Forward& a) { a.q.stride[0] = -72; },
                         "q bf16[6, 3, 24]: strides must not be negative");
  expect_forward_refused([](Forward& a) { a.out.stride[0] = 0; },
                         "out bf16[6, 3, 16]: elements of an output must not overlap");
  expect_forward_refused(
      [](Forward& a) { a.out.data = a.kv.data; },
      "out overlaps kv: outputs and workspace must not share memory with another argument");
}

TEST(Refusals, OfSizes) {
  expect_forward_refused([](Forward& a) { a.kv.shape[1] = 16; },
                         "kv bf16[20, 16]: qk_dim must be 24, as in q");
  expect_forward_refused([](Forward& a) { a.indices.shape[1] = 0; },
                         "indices i32[6, 0]: topk must be at least 1");
  expect_forward_refused([](Forward& a) { a.indices.shape[1] = (1 << 30) + 1; },
                         "indices i32[6, 1073741825]: topk must be at most 1073741824");
  expect_forward_refused([](Forward& a) { a.q.shape[2] = a.kv.shape[1] = 1032; },
                         "q bf16[6, 3, 1032]: qk_dim must be at most 1024");
  expect_forward_refused([](Forward& a) { a.q.shape[2] = a.kv.shape[1] = 20; },
                         "q bf16[6, 3, 20]: qk_dim must be a multiple of 8");
  expect_forward_refused([](Forward& a) { a.out.shape[2] = 12; },
                         "out bf16[6, 3, 12]: v_dim must be a multiple of 8");
}

TEST(Refusals, OfListsThatNoWorkspaceHolds) {
  AttentionForwardWork work(filled(Attention{}, 1), {});
  Forward& a = work.args;
  for (Tensor* tensor : {&a.q, &a.indices, &a.out, &a.lse, &a.max_logits}) tensor->shape[0] = 0;
  a.indices.shape[1] = 1 << 30;
  const std::string text = refusal_of([&] { sparse_attention_forward(a, kReference); });
  coverage.record(text);
  EXPECT_TRUE(
      text.starts_with("sparse_attention_forward: the reference backend's kernel loops needs a "
                       "workspace_limit of at least "))
      << text;
  EXPECT_TRUE(text.ends_with(" bytes for this call, the limit is 268435456")) << text;
}

TEST(Refusals, OfNumbers) {
  expect_forward_refused([](Forward& a) { a.scale = std::nanf(""); }, "scale nan: must be finite");
  expect_forward_refused([](Forward& a) { a.scale = -HUGE_VALF; }, "scale -inf: must be finite");
  expect_forward_refused(
      [](Forward& a) { a.scale = 0; },
      "scale 0: must be given: there is no default where v_dim and qk_dim differ");
  const Attention a = filled(Attention{}, 2);
  AttentionBackwardWork work(a, plain_attention(a), {});
  work.args.max_heads_per_pass = -1;
  expect_refused([&] { sparse_attention_backward(work.args); },
                 "sparse_attention_backward: max_heads_per_pass -1: must be at least 0");
  IndexForwardWork index(filled(Indexer{}, 2), {}, false);
  index.args.order = static_cast<SlotOrder>(2);
  expect_refused([&] { index_topk_forward(index.args); },
                 "index_topk_forward: order 2: must be at most 1");
  auto target = work.forward.memory.arguments<IndexTarget>();
  target.target = index.args.scores;
  expect_refused([&] { index_target(target); },
                 "index_target: target f32[5, 8]: tokens must be 6, as in q");
  const Buffer scores({}, DType::f32, {a.tokens, a.topk});
  target.target = scores.tensor();
  expect_refused([&] { index_target(target); },
                 "index_target: scale 0: must be given, as to sparse_attention");
}

TEST(Refusals, OfOneArgumentBesideAnother) {
  IndexForwardWork index(filled(Indexer{}, 3), {}, false);
  const Buffer k_scale({}, DType::f32, {40});
  IndexTopkForward args = index.args;
  args.k_scale = k_scale.tensor();
  expect_refused([&] { index_topk_forward(args); },
                 "index_topk_forward: k_scale f32[40]: must be absent unless q is f8_e4m3");
  args = index.args;
  args.q.dtype = args.k.dtype = DType::f8_e4m3;
  expect_refused([&] { index_topk_forward(args); },
                 "index_topk_forward: k_scale absent: must be given where q is f8_e4m3");
  args = index.args;
  args.replay = true;
  args.scores = {};
  expect_refused([&] { index_topk_forward(args); },
                 "index_topk_forward: scores absent: must be given with replay");
  const Attention a = with_sink(filled(Attention{}, 3), 3);
  AttentionBackwardWork work(a, plain_attention(a), {});
  work.args.sink = {};
  expect_refused([&] { sparse_attention_backward(work.args); },
                 "sparse_attention_backward: d_sink f32[3]: must be absent without sink");
}

TEST(Refusals, OfContents) {
  const Buffer tokens_out({}, DType::i32, {3});
  const Buffer tokens_out_too({}, DType::i32, {3});
  const auto windows = [&](const Ints& offsets, const Ints& padded, const Ints& rows,
                           const std::string& expected) {
    const Buffer cu_seqlens = ints({}, {static_cast<std::int64_t>(offsets.size())}, offsets);
    const Buffer cu_padded =
        padded.empty() ? Buffer() : ints({}, {static_cast<std::int64_t>(padded.size())}, padded);
    const Buffer query_rows = rows.empty() ? Buffer() : ints({}, {3}, rows);
    expect_refused(
        [&] {
          key_windows({.cu_seqlens = cu_seqlens.tensor(),
                       .cu_seqlens_padded = cu_padded.tensor(),
                       .query_rows = query_rows.tensor(),
                       .begin = tokens_out.tensor(),
                       .end = tokens_out_too.tensor()});
        },
        "key_windows: " + expected);
  };
  windows({1, 3}, {}, {}, "cu_seqlens[0] 1: must be 0");
  windows({0, 3, 2}, {}, {}, "cu_seqlens[2] 2: must be at least 3, as cu_seqlens[1]");
  windows({0, 3}, {0, 2}, {},
          "cu_seqlens_padded[1] 2: must be at least 3, as document 0 has 3 real rows");
  windows({0, 3}, {}, {0, -2, 1}, "query_rows[1] -2: must be at least -1");

  const auto selection = [&](std::int32_t begin, std::int32_t end, const std::string& expected) {
    Indexer ix = filled(Indexer{}, 4);
    ix.begin[2] = begin;
    ix.end[2] = end;
    const IndexForwardWork work(ix, {}, false);
    expect_refused([&] { index_topk_forward(work.args); }, "index_topk_forward: " + expected);
  };
  selection(-1, 4, "begin[2] -1: must be at least 0");
  selection(5, 4, "end[2] 4: must be at least 5, as begin[2]");
  selection(0, 41, "end[2] 41: must be at most 40, as keys");

  Attention a = filled(Attention{}, 4);
  a.lengths = {0, 9, 10, 3, 3, 3};
  const AttentionForwardWork work(a, {});
  expect_refused([&] { sparse_attention_forward(work.args); },
                 "sparse_attention_forward: lengths[2] 10: must be at most 9, as topk");
}

TEST(Refusals, OfLists) {
  const Buffer cu_seqlens = ints({}, {2}, {0, 8});
  const Buffer pool_ids = ints({}, {8, 2}, Ints(16, 0));
  const Buffer indices({}, DType::i32, {8, 5});
  const Buffer lengths({}, DType::i32, {8});
  WindowIndices args{.cu_seqlens = cu_seqlens.tensor(),
                     .cu_seqlens_padded = {},
                     .query_rows = {},
                     .window = 4,
                     .ratio = 4,
                     .key_offset = 8,
                     .pool_ids = {},
                     .indices = indices.tensor(),
                     .lengths = lengths.tensor()};
  const auto refused = [&](const std::string& expected) {
    expect_refused([&] { window_indices(args); }, "window_indices: " + expected);
  };
  refused("indices i32[8, 5]: topk must be at least 6, the longest list");
  args.pool_ids = pool_ids.tensor();
  refused("indices i32[8, 5]: topk must be at least 6");
  args.window = kMaxInt32;
  refused("window 2147483647: must be at most 1073741822");
  args.ratio = 0;
  refused("pool_ids i32[8, 2]: must be absent where ratio is 0");
  args.ratio = 1;
  refused("ratio 1: must be 0 or at least 2");
  args.ratio = 4;
  args.window = 3;
  args.key_offset = 7;
  refused("key_offset 7: must be at least 8, as there are rows");
  args.key_offset = kMaxInt32;
  refused("key_offset 2147483647: must be at most 2147483645");
  args.indices.shape[0] = args.lengths.shape[0] = args.pool_ids.shape[0] = 0;
  args.pool_ids.shape[1] = std::numeric_limits<std::int64_t>::max();
  refused("pool_ids i32[0, 9223372036854775807]: pool_topk must be at most 1073741824");
  expect_refused([] { quantize_fp8({}); }, "quantize_fp8: x absent: must be given");
  expect_refused([&] { quantize_fp8({.x = lengths.tensor(), .values = {}, .scale = {}}); },
                 "quantize_fp8: x i32[8]: must have 2 or 3 dimensions");
}

TEST(Refusals, OfF64OutsideTheReference) {
  const AttentionForwardWork work(filled(Attention{.dtype = DType::f64}, 1), {});
  const std::string text =
      refusal_of([&] { sparse_attention_forward(work.args, on(Backend::cpu)); });
  coverage.record(text);
  EXPECT_EQ(text,
            "sparse_attention_forward: the cpu backend's kernel avx512_bf16 takes bf16; the cpu "
            "backend's kernel simd does not take f64: it computes in fp32");
}

TEST(Refusals, OfExecution) {
  const auto nothing = [](Forward&) {};
  expect_forward_refused(nothing, "backend 17: must be automatic, reference, cpu or cuda",
                         on(static_cast<Backend>(17)));
  expect_forward_refused(nothing, "threads -1: must be at least 0", {.threads = -1});
  expect_forward_refused(nothing, "threads 1025: must be at most 1024", {.threads = 1025});
  expect_forward_refused(nothing, "workspace null: must be given where workspace_bytes is not 0",
                         {.workspace_bytes = 64});
  const AttentionForwardWork work(filled(Attention{}, 1), {});
  const std::size_t needed = workspace_bytes(work.args, kReference);
  alignas(16) std::array<std::byte, 32> small{};
  expect_forward_refused(
      nothing,
      fmt::format("workspace of 32 bytes: must be at least {} bytes, as workspace_bytes says",
                  needed),
      {.backend = Backend::reference, .workspace = small.data(), .workspace_bytes = 32});
  const std::string text = refusal_of([&] {
    sparse_attention_forward(work.args, {.workspace = small.data() + 8, .workspace_bytes = 8});
  });
  coverage.record(text);
  EXPECT_TRUE(text.starts_with("sparse_attention_forward: workspace 0x")) << text;
  EXPECT_TRUE(text.ends_with(": data must be aligned to 16 bytes")) << text;
}

TEST(Refusals, OfBackends) {
  expect_refused([] { backend_from_name("gpu"); },
                 "backend_from_name: name 'gpu': must be automatic, reference, cpu or cuda");
  for (const Backend backend :
       {Backend::automatic, Backend::reference, Backend::cpu, Backend::cuda})
    EXPECT_EQ(backend_from_name(name(backend)), backend);
  EXPECT_EQ(why_not(Backend::reference), "");
  EXPECT_NE(describe(Backend::reference), "");

  for (const Backend backend : {Backend::cpu, Backend::cuda}) {
    const std::string reason = why_not(backend);
    if (reason.empty()) continue;
    EXPECT_EQ(describe(backend), "");
    expect_forward_refused([](Forward&) {}, reason, on(backend));
    const AttentionForwardWork work(filled(Attention{}, 1), {});
    EXPECT_EQ(why_not(work.args, on(backend)), reason);
  }

  // These addresses must not be accessed: the reference backend cannot reach the device and says
  // so.
  expect_forward_refused(
      [](Forward& a) {
        std::uintptr_t address = 0;
        for (Tensor* tensor : {&a.q, &a.kv, &a.indices, &a.out, &a.lse, &a.max_logits}) {
          tensor->data = reinterpret_cast<void*>(address += 0x10000);
          tensor->device = kCuda;
        }
      },
      "the reference backend cannot reach tensors on cuda:0");
}

TEST(Refusals, OfKernels) {
  expect_forward_refused([](Forward&) {}, "kernel 'fast': must be one of loops",
                         {.backend = Backend::reference, .kernel = "fast"});
  const AttentionForwardWork work(filled(Attention{}, 1), {});
  std::vector<std::string> reasons;
  for (const Candidate& candidate : explain(work.args, {.kernel = "loops"}))
    if (!candidate.kernel.empty()) reasons.push_back(candidate.why_not);
  const std::string other = refusal::other_kernel;
  EXPECT_EQ(reasons, (std::vector<std::string>{other, other, ""}));
  coverage.record(": " + other);
}

TEST(Refusals, HaveTheCodeOfTheirKind) {
  const AttentionForwardWork work(filled(Attention{}, 1), {});
  const auto code = [&](const Forward& args, const Execution& execution) {
    try {
      sparse_attention_forward(args, execution);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode{};
  };
  Forward absent = work.args;
  absent.q = {};
  EXPECT_EQ(code(absent, {}), ErrorCode::invalid_argument);
  EXPECT_EQ(code(work.args, {.threads = -1}), ErrorCode::invalid_argument);
  EXPECT_EQ(code(work.args, {.backend = Backend::reference, .workspace_limit = 1}),
            ErrorCode::unsupported);
  EXPECT_EQ(code(work.args, {}), ErrorCode{});
}

struct DLTensor {
  void* data;
  struct {
    std::int32_t device_type, device_id;
  } device;
  std::int32_t ndim;
  struct {
    std::uint8_t code, bits;
    std::uint16_t lanes;
  } dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

TEST(Refusals, OfDlpack) {
  const DLTensor good{nullptr, {1, 0}, 0, {2, 32, 1}, nullptr, nullptr, 0};
  DLTensor source = good;
  source.dtype.bits = 17;
  EXPECT_THROW(from_dlpack(source), Error);
  coverage.record(refusal_of([&] { from_dlpack(source); }));
  source = good;
  source.device.device_type = 4;
  EXPECT_THROW(from_dlpack(source), Error);
  coverage.record(refusal_of([&] { from_dlpack(source); }));
  source = good;
  source.ndim = 5;
  EXPECT_THROW(from_dlpack(source), Error);
  coverage.record(refusal_of([&] { from_dlpack(source); }));
}

TEST(Refusals, OfShapesThatDoNotFitTheirValues) {
  std::vector<float> values(6);
  coverage.record(refusal_of([&] { tensor_of(values, {2, 4}); }));
}

TEST(Refusals, OfThdBatches) {
  const std::vector<std::int64_t> lengths = {3, -2, -1000, 4};
  const auto layout = [&](std::int64_t rows, std::size_t first, std::int64_t chunks) {
    const auto two = std::span(lengths).subspan(first, 2);
    thd_layout({.rows = rows, .row_tokens = 4, .seq_lens = two, .seq_lens_padded = two}, chunks);
  };
  expect_refused(
      [&] { layout(1, 0, 1); },
      "thd_batch: seq_lens[0][1] -2: must be at least 0, or -1000 behind the last length");
  expect_refused([&] { layout(1, 2, 1); },
                 "thd_batch: seq_lens[0][1] 4: must be -1000, as seq_lens[0][0]");
  expect_refused([&] { layout(3, 0, 2); }, "thd_batch: rows 3: must be a multiple of 2, as chunks");
}

// ---- The last test: which messages the others of its suite have seen.

TEST(Refusals, AreAllReached) {
  const ::testing::TestSuite& suite = *::testing::UnitTest::GetInstance()->current_test_suite();
  if (suite.test_to_run_count() != suite.total_test_count())
    GTEST_SKIP() << "needs all tests of this suite";
  for (const std::string& sentence : coverage.missing()) {
    // Messages of backends that lack an op or are not in this build.
    if (sentence == refusal::no_such_op) continue;
    if (sentence == refusal::not_built && why_not(Backend::cpu).empty() &&
        why_not(Backend::cuda).find(refusal::not_built) == std::string::npos)
      continue;
    ADD_FAILURE() << "no test was refused with: " << sentence;
  }
}

}  // namespace
}  // namespace winnow::tests
