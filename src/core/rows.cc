// SPDX-License-Identifier: Apache-2.0
#include "core/rows.h"

#include <cassert>
#include <cstddef>

#include "core/numerics.h"

namespace winnow {
namespace {

/// Calls use(T*) with a typed pointer to the element at `index`.
template <class Use>
void with_element(const Tensor& tensor, std::initializer_list<std::int64_t> index, const Use& use) {
  std::int64_t offset = 0;
  int i = 0;
  for (const std::int64_t step : index) offset += step * tensor.stride[i++];
  char* const address = static_cast<char*>(tensor.data) + offset * element_bytes(tensor.dtype);
  switch (tensor.dtype) {
    case DType::f32:
      return use(reinterpret_cast<float*>(address));
    case DType::bf16:
      return use(reinterpret_cast<BFloat16*>(address));
    case DType::f16:
      return use(reinterpret_cast<Float16*>(address));
    case DType::f64:
      return use(reinterpret_cast<double*>(address));
    case DType::f8_e4m3:
      return use(reinterpret_cast<Float8E4M3*>(address));
    case DType::i32:
      break;
  }
  assert(false);
}

}  // namespace

void read_row(const Tensor& tensor, std::initializer_list<std::int64_t> index,
              std::span<double> row) {
  if (row.empty()) return;
  with_element(tensor, index, [&](const auto* source) {
    for (std::size_t d = 0; d < row.size(); ++d) row[d] = to_double(source[d]);
  });
}

void write_row(const Tensor& tensor, std::initializer_list<std::int64_t> index,
               std::span<const double> row) {
  if (row.empty()) return;
  with_element(tensor, index, [&]<class T>(T* target) {
    for (std::size_t d = 0; d < row.size(); ++d) target[d] = from_double<T>(row[d]);
  });
}

double read(const Tensor& tensor, std::initializer_list<std::int64_t> index) {
  double value = 0;
  with_element(tensor, index, [&](const auto* source) { value = to_double(*source); });
  return value;
}

void write(const Tensor& tensor, std::initializer_list<std::int64_t> index, double value) {
  with_element(tensor, index, [&]<class T>(T* target) { *target = from_double<T>(value); });
}

}  // namespace winnow
