// SPDX-License-Identifier: Apache-2.0
// Files of dumped calls: what is read, what is refused, and that no file does harm.
#include <string>
#include <utility>

#include "tests/counted_memory.h"
#include "tests/dump_files.h"
#include "tests/testing.h"
#include "tools/compare/dumped_call.h"
#include "tools/compare/judge.h"
#include "tools/compare/safetensors.h"

namespace winnow::tests {
namespace {

using dump::DumpedCall;
using dump::FileError;
using dump::FormatField;

DumpedCall read(const std::string& bytes) {
  const MemoryFile file;
  file.write(bytes);
  return dump::read_call(file.path());
}

std::string refusal(const std::string& bytes) {
  try {
    read(bytes);
  } catch (const FileError& error) {
    return error.what();
  }
  return "";
}

std::string replaced(std::string text, std::string_view what, std::string_view by) {
  const std::size_t at = text.find(what);
  EXPECT_NE(at, std::string::npos) << what;
  return text.replace(at, what.size(), by);
}

/// The header of a file, to be put into a file again.
std::pair<std::string, std::string> parts_of(const std::string& bytes) {
  const std::size_t end = 8 + static_cast<unsigned char>(bytes[0]) +
                          256 * static_cast<std::size_t>(static_cast<unsigned char>(bytes[1]));
  return {bytes.substr(8, end - 8), bytes.substr(end)};
}

std::string with_header(const std::string& bytes, std::string_view what, std::string_view by) {
  const auto [header, data] = parts_of(bytes);
  return file_of(replaced(header, what, by), data);
}

/// Runs the call of a file and judges its outputs, as the tool would.
std::vector<dump::Finding> run(const DumpedCall& call) {
  const dump::PlacedTensors tensors(call, {});
  for_each_operator([&]<class Args>(std::type_identity<Args>) {
    if (call.op == Args::kOperator) winnow::run(tensors.arguments<Args>(), on(Backend::cpu));
  });
  EXPECT_TRUE(tensors.canaries_intact());
  return dump::judge_of(call, {})(tensors.outputs());
}

TEST(Dump, EveryTensorOfEveryOperatorHasAShape) {
  for (const std::string_view op : dump::operator_names())
    for (const FormatField& field : dump::format_of(op))
      EXPECT_EQ(field.dimensions.empty(), field.role == FieldRole::option)
          << op << " " << field.name;
}

TEST(Dump, RightFilesAreReadAndRun) {
  for (const std::string& bytes : right_files())
    for (const dump::Finding& finding : run(read(bytes))) EXPECT_TRUE(ok(finding.report));
  const DumpedCall call = read(right_files()[0]);
  EXPECT_EQ(call.op, "sparse_attention_forward");
  EXPECT_EQ(call.options.at("scale"), 0.25);
  EXPECT_EQ(call.outputs.at("lse").shape, (Shape{3, 2}));
  EXPECT_EQ(call.outputs.at("out").dtype, DType::bf16);
  EXPECT_EQ(call.find("lse"), nullptr);
  EXPECT_EQ(call.find("lengths")->download_ints(), (Ints{0, 1, 2}));
}

TEST(Dump, WhatAnOptionMakesAnInputIsOne) {
  const std::string replay =
      file_of(R"("winnow_operator":"index_topk_forward","replay":"true","scores":"F32[3, 2]")",
              {{"q", "BF16", {3, 1, 8}, 2},
               {"k", "BF16", {4, 8}, 2},
               {"weights", "F32", {3, 1}, 4},
               {"begin", "I32", {3}, 4},
               {"end", "I32", {3}, 4},
               {"indices", "I32", {3, 2}, 4}});
  const DumpedCall call = read(replay);
  EXPECT_FALSE(call.outputs.contains("indices"));
  run(call);
}

TEST(Dump, AWrongFileIsRefusedByName) {
  const std::string file = right_files()[0];
  const auto [header, data] = parts_of(file);
  const std::string huge = "9223372036854775807";
  const std::pair<std::string, const char*> wrong[] = {
      {"", "0 bytes are no safetensors file"},
      {file.substr(0, 100), "bytes in a file of 100"},
      {std::string(8, '\xff'), "a header of 18446744073709551615 bytes: must be at most 1048576"},
      {file.substr(0, file.size() - 1), "must ascend within the"},
      {file + "x", "the last 1 bytes belong to no tensor"},
      {file_of("[]", ""), "the header is a list: must be an object"},
      {file_of("{}", ""), "its metadata has no winnow_operator"},
      {file_of("{\"a\":", ""), "the header is no JSON at byte"},
      {file_of(std::string(100000, '['), ""), "the header is a list"},
      {file_of(R"({"q":[[[[]]]]})", ""), "'q' is a list: must be an object"},
      {file_of(R"({"q":{"shape":[[]]}})", ""), "'q' has a list for 'shape'"},
      {file_of(R"({"q":{"dtype":{"a":1}}})", ""), "'q' has an object for 'dtype'"},
      {file_of("{\"\\u001b[31m\":1}", ""), "'\\x1b[31m' is a number: must be an object"},
      {with_header(file, "\"kv\"", "\"q\""), "the name 'q' stands twice"},
      {with_header(file, "\"dtype\"", "\"dtypes\""), "there are dtype, shape and data_offsets"},
      {with_header(file, "BF16", "I64"), "dtype 'I64': must be one of F32, BF16, F16, F64"},
      {with_header(file, "[3,2,16]", "[3,2,17]"), "'q' has 192 bytes: BF16 [3, 2, 17] takes 204"},
      {with_header(file, "[3,2,16]", "[3,2,-16]"), "'q' has a negative number for 'shape'"},
      {with_header(file, "[3,2,16]", "[3,2,16.5]"), "a number with a fraction"},
      {with_header(file, "[3,2,16]", "[1,1,3,2,16]"), "'q' has more than 4 dimensions"},
      {with_header(file, "[3,2,16]", "[]"), "takes 2"},
      {with_header(file, "[3,2,16]", "[" + huge + "," + huge + "]"), "too large"},
      {with_header(file, "[3,2,16]", "[0," + huge + "," + huge + "]"), "too large"},
      {with_header(file, "[0,192]", "[192,0]"), "must ascend within the"},
      {with_header(file, "[0,192]", "[0,18446744073709551615]"), "must ascend within the"},
      {with_header(file, "[0,192]", "[0]"), "fewer than two data_offsets"},
      {with_header(file, "[0,192]", "[0,192,192]"), "more than two data_offsets"},
      {with_header(file, "[192,320]", "[64,192]"), "overlaps another tensor"},
      {with_header(file, "\"kv\"", "\"keys\""),
       "tensor 'keys': sparse_attention_forward has q, kv"},
      {with_header(file, "\"scale\"", "\"scala\""), "metadata 'scala': sparse_attention_forward"},
      {with_header(file, "\"0.25\"", "\"0.25x\""), "'scale' is '0.25x': must be a number"},
      {with_header(file, "\"0.25\"", "0.25"), "a number with a fraction for 'scale'"},
      {with_header(file, "F32[3, 2]", "F32 3, 2"), "must be a type and a shape"},
      {with_header(file, "F32[3, 2]", "F32[3, 2000000]"), "'lse': too large for a file of"},
      {with_header(file, "F32[3, 2]", "F32[" + huge + "]"), "too large"},
      {with_header(file, "sparse_attention_forward", "attention"), "must be one of key_windows"},
  };
  for (const auto& [bytes, sentence] : wrong)
    EXPECT_NE(refusal(bytes).find(sentence), std::string::npos) << refusal(bytes);
  EXPECT_THROW(dump::read_call("/no/such/file"), FileError);
  EXPECT_THROW(dump::read_call("/dev/zero"), FileError);
  EXPECT_THROW(dump::read_call("/"), FileError);
}

TEST(Dump, NamesAndOutputsAreCheckedBeforeMemoryIsTaken) {
  const std::string right =
      file_of(R"("winnow_operator":"index_loss","loss":"F32[512]","d_scores":"F32[512, 512]")",
              {{"indices", "I32", {512, 512}, 4},
               {"scores", "F32", {512, 512}, 4},
               {"target", "F32", {512, 512}, 4}});
  const std::pair<std::string, const char*> wrong[] = {
      {with_header(right, "\"target\"", "\"zzz\""), "tensor 'zzz': index_loss has"},
      {with_header(right, "F32[512]", "F32[2000000000]"), "'loss': too large for a file of"},
  };
  const MemoryFile file;
  for (const auto& [bytes, sentence] : wrong) {
    file.write(bytes);
    std::string refused;
    const std::size_t memory = most_memory_of([&] {
      try {
        dump::read_call(file.path());
      } catch (const FileError& error) {
        refused = error.what();
      }
    });
    EXPECT_NE(refused.find(sentence), std::string::npos) << refused;
    EXPECT_LT(memory, std::size_t{1} << 16);  // one of the tensors has 2^20
  }
}

// ---- Random damage.

class Damage {
 public:
  explicit Damage(std::uint64_t seed) : random_(seed, "damage") {}

  std::string of(std::string bytes) {
    // With a header of the right length most damage reaches the checks behind it.
    const bool keeps_length = below(4) != 0;
    auto [header, data] = parts_of(bytes);
    std::string& part = keeps_length ? (below(4) == 0 ? data : header) : bytes;
    for (std::int64_t n = 1 + below(3); n > 0; --n) spoil(part);
    return keeps_length ? file_of(header, data) : bytes;
  }

 private:
  std::int64_t below(std::int64_t n) { return random_.below(draw_++, n); }

  void spoil(std::string& text) {
    if (text.empty()) return;
    const auto size = static_cast<std::int64_t>(text.size());
    const auto at = static_cast<std::size_t>(below(size));
    const auto length = static_cast<std::size_t>(1 + below(16));
    switch (below(7)) {
      case 0:
        text[at] = static_cast<char>(below(256));
        break;
      case 1:
        text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 2:
        text.erase(at, length);
        break;
      case 3:
        text.insert(at, text.substr(static_cast<std::size_t>(below(size)), length));
        break;
      case 4:
        text.resize(at);
        break;
      case 5:
        spoil_number(text, at);
        break;
      default:
        text.insert(at, kPieces[below(std::size(kPieces))]);
    }
  }
  /// The next number, or a digit of it.
  void spoil_number(std::string& text, std::size_t at) {
    const std::size_t digit = text.find_first_of("0123456789", at);
    if (digit == std::string::npos) return;
    const std::size_t end = std::min(text.find_first_not_of("0123456789", digit), text.size());
    if (below(2) == 0)
      text[digit] = static_cast<char>('0' + below(10));
    else
      text.replace(digit, end - digit, kNumbers[below(std::size(kNumbers))]);
  }

  static constexpr const char* kNumbers[] = {"0",
                                             "1",
                                             "2147483647",
                                             "4294967296",
                                             "9223372036854775807",
                                             "18446744073709551615",
                                             "18446744073709551616",
                                             "-1",
                                             "1e3"};
  static constexpr const char* kPieces[] = {"[",    "]",     "{",        "}",       ",",
                                            "null", "\"q\"", "\"kv\":1", "F64",     "\\u0000",
                                            "[[[[", "0,",    "\"\"",     "\xff\xfe"};

  Random random_;
  std::int64_t draw_ = 0;
};

void read_damaged_files(std::int64_t count) {
  const std::vector<std::string> files = right_files();
  const MemoryFile file;
  std::int64_t refused = 0;
  std::int64_t refused_by_operator = 0;
  std::size_t most = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    SCOPED_TRACE(i);
    const std::string bytes =
        Damage(static_cast<std::uint64_t>(i)).of(files[static_cast<std::size_t>(i) % files.size()]);
    file.write(bytes);
    const std::string path = file.path();
    const std::size_t memory = most_memory_of([&] {
      try {
        dump::read_call(path);
      } catch (const FileError&) {
        ++refused;
      }
    });
    most = std::max(most, memory);
    // Twice: the header and what it says. The rest is fields of the operator and canaries.
    ASSERT_LE(memory, 2 * bytes.size() + (std::size_t{32} << 10));
    try {
      run(dump::read_call(path));
    } catch (const FileError&) {
    } catch (const Error&) {
      ++refused_by_operator;
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(refused, count / 2);
  EXPECT_GT(refused_by_operator, 0);
  EXPECT_GT(count - refused - refused_by_operator, 0);
  fmt::print(
      "{} damaged files: {} refused by the reader, {} by the operator, {} run; at most {} "
      "bytes of memory\n",
      count, refused, refused_by_operator, count - refused - refused_by_operator, most);
}

TEST(Dump, DamagedFilesAreRefusedOrRun) { read_damaged_files(2000); }
TEST(SlowDump, DamagedFilesAreRefusedOrRun) { read_damaged_files(100000); }

}  // namespace
}  // namespace winnow::tests
