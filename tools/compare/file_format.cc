// SPDX-License-Identifier: Apache-2.0
// The file format of dumped calls, from the fields of the argument structs and one table of shapes.
#include "tools/compare/file_format.h"

#include <algorithm>
#include <type_traits>

namespace winnow::dump {
namespace {

using Words = std::vector<std::string_view>;

Words split(std::string_view text, char separator) {
  Words words;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(separator), text.size());
    words.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return words;
}

struct ShapeOf {
  std::string_view names;       // of fields, separated by spaces
  std::string_view dimensions;  // likewise
};
/// A field has the same shape wherever it stands; a gradient that of what it belongs to. The first
/// line that has the name counts.
constexpr ShapeOf kShapes[] = {
    {"cu_seqlens cu_seqlens_padded", "offset"},
    {"query_rows begin end lengths loss", "row"},
    {"indices scores target", "row slot"},
    {"pool_ids", "row pool_slot"},
    {"q", "row head channel"},
    {"kv k index_k", "key channel"},
    {"k_scale", "key"},
    {"weights", "row index_head"},
    {"sink", "head"},
    {"out out_v", "row head channel"},
    {"lse max_logits", "row head"},
    {"w_v", "head channel value_channel"},
    {"index_q", "row index_head channel"},
};
/// Those of operators in which a name means something else.
constexpr ShapeOf kShapesOfIndexTopk[] = {{"q", "row index_head channel"}};
constexpr ShapeOf kShapesOfQuantizeFp8[] = {{"x values", "row channel"}, {"scale", "row"}};

template <std::size_t n>
Words find(const ShapeOf (&shapes)[n], std::string_view name) {
  for (const ShapeOf& shape : shapes) {
    const Words names = split(shape.names, ' ');
    if (std::find(names.begin(), names.end(), name) != names.end())
      return split(shape.dimensions, ' ');
  }
  return {};
}

Words dimensions_of(std::string_view op, std::string_view name) {
  if (name.starts_with("d_")) name.remove_prefix(2);
  Words own;
  if (op.starts_with("index_topk")) own = find(kShapesOfIndexTopk, name);
  if (op == "quantize_fp8") own = find(kShapesOfQuantizeFp8, name);
  return own.empty() ? find(kShapes, name) : own;
}

template <class Value>
OptionKind kind_of() {
  if constexpr (std::is_same_v<Value, bool>) return OptionKind::truth;
  if constexpr (std::is_enum_v<Value>) return OptionKind::word;
  return std::is_floating_point_v<Value> ? OptionKind::number : OptionKind::whole_number;
}

}  // namespace

std::vector<FormatField> format_of(std::string_view op) {
  std::vector<FormatField> format;
  for_each_operator([&]<class Args>(std::type_identity<Args>) {
    if (op != Args::kOperator) return;
    for_each_field<Args>([&]<class Value>(const Field<Args, Value>& field) {
      FormatField& each = format.emplace_back(FormatField{field.name, field.role, {}, {}, {}});
      if constexpr (std::is_same_v<Value, Tensor>)
        each.dimensions = dimensions_of(op, field.name);
      else
        each.option = kind_of<Value>();
      if (field.words != nullptr) each.words = split(field.words, '|');
    });
  });
  return format;
}

std::vector<std::string_view> operator_names() {
  std::vector<std::string_view> names;
  for_each_operator(
      [&]<class Args>(std::type_identity<Args>) { names.push_back(Args::kOperator); });
  return names;
}

bool has_query_rows(const FormatField& field) {
  return !field.dimensions.empty() && field.dimensions.front() == "row";
}

}  // namespace winnow::dump
