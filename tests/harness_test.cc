// SPDX-License-Identifier: Apache-2.0
// Every op on every backend, each of its kernels and every case of the harness, against the
// reference in double; the cpu backend on every SIMD target of this machine.
#include <algorithm>
#include <cctype>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "harness/backends.h"
#include "harness/cases.h"
#include "harness/families.h"
#include "tests/simd_targets.h"

namespace winnow::tests {
namespace {

struct Checked {
  Backend backend;
  std::int64_t target;  // SIMD target of the cpu backend; 0: the best
  const char* kernel;   // null: the backend has one
  std::string_view op;
  const harness::Case* c;
};

/// Cases at the size of a model are for GPUs only, and large cases for the best SIMD target.
bool fits_the_time(Backend backend, std::int64_t target, const harness::Case& c) {
  if (c.full) return backend == Backend::cuda;
  return !c.slow || target == 0;
}

/// The SIMD targets to test; 0 means the default, which is the best one.
std::vector<std::int64_t> targets_of(Backend backend) {
  if (backend != Backend::cpu) return {0};
  std::vector<std::int64_t> targets = simd_targets();
  if (targets.empty()) return {0};
  targets[0] = 0;
  return targets;
}

/// The kernels to test; null means the only one.
std::vector<const char*> kernels_of(std::string_view op, Backend backend) {
  std::vector<const char*> kernels;
  for (const std::string_view kernel : harness::kernels_of(op, backend))
    kernels.push_back(kernel.data());
  return kernels.size() > 1 ? kernels : std::vector<const char*>{nullptr};
}

std::vector<Checked> all_checks(bool slow) {
  std::vector<Checked> checks;
  for (const Backend backend : harness::usable_backends())
    for (const std::int64_t target : targets_of(backend))
      for (const std::string_view op : harness::ops())
        for (const char* const kernel : kernels_of(op, backend))
          for (const harness::Case& c : harness::cases())
            if ((c.slow || c.full) == slow && fits_the_time(backend, target, c) &&
                harness::missing(op, c).empty())
              checks.push_back({backend, target, kernel, op, &c});
  return checks;
}

/// Test names may have letters, digits and underscores only.
std::string test_name(const ::testing::TestParamInfo<Checked>& info) {
  const auto& [backend, target, kernel, op, c] = info.param;
  std::string text(name(backend));
  if (target != 0) text += fmt::format("_{}", hwy::TargetName(target));
  text += fmt::format("_{}", op);
  if (kernel != nullptr) text += fmt::format("_{}", kernel);
  text += fmt::format("_{}", c->name);
  std::replace_if(
      text.begin(), text.end(), [](unsigned char letter) { return !std::isalnum(letter); }, '_');
  return text;
}

void expect_no_error(const Checked& checked) {
  const auto& [backend, target, kernel, op, c] = checked;
  const OnSimdTarget on_target(target);
  ASSERT_TRUE(target == 0 || on_target.reaches_the_backend());
  const std::vector<harness::Report> reports =
      harness::check(op, *c, {.backend = backend, .kernel = kernel}, /*seed=*/1);
  ASSERT_FALSE(reports.empty());
  bool ran = false;
  bool ran_kernel = kernel == nullptr;
  for (const harness::Report& report : reports) {
    EXPECT_TRUE(report.ok) << harness::line(report);
    EXPECT_EQ(report.kernel.empty(), report.skipped) << harness::line(report);
    ran = ran || !report.skipped;
    ran_kernel = ran_kernel || report.kernel == kernel;
  }
  if (!ran) GTEST_SKIP() << harness::line(reports[0]);
  EXPECT_TRUE(ran_kernel) << "only other kernels ran";
}

TEST(Families, CoverEveryOperator) {
  std::set<std::string_view> covered;
  const harness::Case& c = harness::find_case("holes-of-pools");  // it has every op
  for (const std::string_view op : harness::ops())
    for (const harness::Call& call : harness::calls_of(op, c, {}, /*seed=*/1).list)
      covered.insert(call.op);
  for_each_operator([&]<class Args>(std::type_identity<Args>) {
    EXPECT_TRUE(covered.contains(Args::kOperator)) << Args::kOperator;
  });
}

TEST(Families, HaveTheKernelsOfTheirOperators) {
  for (const std::string_view op : harness::ops())
    for (const Backend backend : harness::usable_backends())
      EXPECT_FALSE(harness::kernels_of(op, backend).empty()) << op << " on " << name(backend);
}

class Harness : public ::testing::TestWithParam<Checked> {};
class SlowHarness : public Harness {};

TEST_P(Harness, FindsNoError) { expect_no_error(GetParam()); }

TEST_P(SlowHarness, FindsNoError) { expect_no_error(GetParam()); }

TEST(SimdTargets, OfTheBackendCanBeChosen) {
  // There is at least plain C++ in addition to the best target.
  EXPECT_GE(simd_targets().size(), 2U) << "Highway of the tests is not that of the library";
  const std::string best = describe(Backend::cpu);
  for (const std::int64_t target : simd_targets()) OnSimdTarget{target};
  EXPECT_EQ(describe(Backend::cpu), best);
}

INSTANTIATE_TEST_SUITE_P(All, Harness, ::testing::ValuesIn(all_checks(false)), test_name);
INSTANTIATE_TEST_SUITE_P(All, SlowHarness, ::testing::ValuesIn(all_checks(true)), test_name);

}  // namespace
}  // namespace winnow::tests
