// SPDX-License-Identifier: Apache-2.0
// Every op on every backend and every case of the harness, against the reference in double.
#include <algorithm>
#include <cctype>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "harness/backends.h"
#include "harness/cases.h"
#include "harness/checks.h"
#include "harness/workloads.h"

namespace winnow::tests {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

struct Checked {
  Backend backend;
  std::string_view op;
  const harness::Case* c;
};

/// A model's own size is for GPUs; large cases are left out where sanitizers make them too long.
bool fits_the_time(Backend backend, const harness::Case& c) {
  if (c.full) return backend == Backend::cuda;
  return !c.slow || !kSanitized;
}

std::vector<Checked> all_checks() {
  std::vector<Checked> checks;
  for (const Backend backend : harness::usable_backends())
    for (const std::string_view op : harness::ops())
      for (const harness::Case& c : harness::cases())
        if (fits_the_time(backend, c) && harness::missing(op, c).empty())
          checks.push_back({backend, op, &c});
  return checks;
}

/// GoogleTest allows letters, digits and underscores.
std::string test_name(const ::testing::TestParamInfo<Checked>& info) {
  std::string text = std::string(name(info.param.backend)) + "_" + std::string(info.param.op) +
                     "_" + info.param.c->name;
  std::replace_if(
      text.begin(), text.end(), [](unsigned char letter) { return !std::isalnum(letter); }, '_');
  return text;
}

class Harness : public ::testing::TestWithParam<Checked> {};

TEST_P(Harness, FindsNoError) {
  const auto& [backend, op, c] = GetParam();
  const std::vector<harness::Report> reports =
      harness::check(op, *c, {.backend = backend}, /*seed=*/1);
  ASSERT_FALSE(reports.empty());
  bool ran = false;
  for (const harness::Report& report : reports) {
    EXPECT_TRUE(report.ok) << harness::line(report);
    ran = ran || !report.skipped;
  }
  if (!ran) GTEST_SKIP() << harness::line(reports[0]);
}

INSTANTIATE_TEST_SUITE_P(All, Harness, ::testing::ValuesIn(all_checks()), test_name);

}  // namespace
}  // namespace winnow::tests
