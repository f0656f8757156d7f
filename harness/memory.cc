// SPDX-License-Identifier: Apache-2.0
// Buffer: the memory of one tensor, on any device, between canaries.
#include "harness/memory.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>

#include "harness/device_memory.h"
#include "harness/numbers.h"

namespace winnow::harness {
namespace {

constexpr std::size_t kCanaryBytes = 256;  // keeps the alignment that allocators give
constexpr int kCanary = 0xA5;
// All bits set is NaN in every floating-point type; for i32 it would be the -1 that many outputs
// hold.
constexpr int kPoison = 0xFF;
constexpr int kIntPoison = 0x7F;
constexpr std::int64_t kElementsPerThread = std::int64_t{1} << 20;

std::byte* allocate(Device device, std::size_t bytes) {
  if (device.kind == DeviceKind::cuda)
    return static_cast<std::byte*>(allocate_on_cuda(device.index, bytes));
  return static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kCanaryBytes}));
}

/// f(first, last) over parts of [0, count), on several threads if the work is worth it.
template <class F>
void in_parts(std::int64_t count, std::int64_t elements, F f) {
  const auto threads = std::clamp<std::int64_t>(elements / kElementsPerThread, 1,
                                                std::max(1U, std::thread::hardware_concurrency()));
  std::vector<std::jthread> workers;
  for (std::int64_t i = 1; i < threads; ++i)
    workers.emplace_back([=] { f(count * i / threads, count * (i + 1) / threads); });
  f(0, count / threads);
}

bool all_canary(const std::byte* first, const std::byte* last) {
  return std::all_of(first, last, [](std::byte each) { return each == std::byte{kCanary}; });
}

void copy_bytes(const void* from, std::size_t bytes, void* to) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

void Buffer::Free::operator()(std::byte* memory) const noexcept {
  if (device.kind == DeviceKind::cuda) return free_on_cuda(device.index, memory);
  ::operator delete (memory, std::align_val_t{kCanaryBytes});
}

Buffer::Buffer(Device device, DType dtype, const Shape& shape, std::int64_t row_padding) {
  tensor_.dtype = dtype;
  tensor_.device = device;
  tensor_.rank = static_cast<std::int32_t>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    tensor_.shape[i] = shape[i];
    tensor_.stride[i] = stride;
    stride = stride * shape[i] + row_padding;
  }
  const std::int64_t element = element_bytes(dtype);
  first_byte_ = kCanaryBytes + static_cast<std::size_t>(row_padding % 8 * element);
  bytes_ = first_byte_ + static_cast<std::size_t>(stride * element) + kCanaryBytes;
  memory_ = {allocate(device, bytes_), Free{device}};
  tensor_.data = memory_.get() + first_byte_;
  const auto write_canaries = [&](std::size_t first, std::size_t last) {
    on_host(first, last, Access::write,
            [&](std::byte* image) { std::memset(image, kCanary, last - first); });
  };
  write_canaries(0, packed() ? first_byte_ : end_byte());
  write_canaries(end_byte(), bytes_);
  poison();
}

std::int64_t Buffer::line_length() const {
  return tensor_.rank > 1 ? tensor_.shape[tensor_.rank - 1] : 1;
}

std::int64_t Buffer::lines() const {
  return tensor_.rank < 1 ? 0 : tensor_.shape[0] * lines_of_row();
}

std::int64_t Buffer::lines_of_row() const {
  std::int64_t count = 1;
  for (std::int32_t i = 1; i + 1 < tensor_.rank; ++i) count *= tensor_.shape[i];
  return count;
}

std::size_t Buffer::line_bytes() const {
  return static_cast<std::size_t>(line_length() * element_bytes(tensor_.dtype));
}

std::size_t Buffer::offset(std::int64_t line) const {
  std::int64_t elements = 0;
  for (std::int32_t i = std::max(tensor_.rank - 2, 0); i > 0; --i) {
    elements += line % tensor_.shape[i] * tensor_.stride[i];
    line /= tensor_.shape[i];
  }
  elements += line * tensor_.stride[0];
  return first_byte_ + static_cast<std::size_t>(elements * element_bytes(tensor_.dtype));
}

std::size_t Buffer::end_byte() const { return bytes_ - kCanaryBytes; }

bool Buffer::packed() const {
  return first_byte_ + static_cast<std::size_t>(lines()) * line_bytes() == end_byte();
}

/// f(image) on the host, for the bytes [first, last) of the memory.
template <class F>
void Buffer::on_host(std::size_t first, std::size_t last, Access access, F f) const {
  std::byte* memory = memory_.get() + first;
  if (tensor_.device.kind == DeviceKind::cpu) return f(memory);
  const std::size_t bytes = last - first;
  const auto image = std::make_unique_for_overwrite<std::byte[]>(bytes);
  if (access != Access::write) copy_with_cuda(tensor_.device.index, image.get(), memory, bytes);
  f(image.get());
  if (access != Access::read) copy_with_cuda(tensor_.device.index, memory, image.get(), bytes);
}

/// f(line, its elements on the host) for all lines.
template <class F>
void Buffer::on_lines(Access access, F f) const {
  if (tensor_.rank < 0) return;
  // Gaps keep what they hold: an overwritten canary must stay overwritten.
  if (access == Access::write && !packed()) access = Access::modify;
  on_host(first_byte_, end_byte(), access, [&](std::byte* image) {
    in_parts(lines(), lines() * line_length(), [&, image](std::int64_t first, std::int64_t last) {
      for (std::int64_t line = first; line < last; ++line)
        f(line, image + (offset(line) - first_byte_));
    });
  });
}

/// f(line, its elements on the host) for the lines of `rows`; here lines are counted within them.
template <class F>
void Buffer::on_lines(const Rows& rows, Access access, F f) const {
  const std::int64_t each = lines_of_row();
  std::int64_t done = 0;
  for (const std::int64_t row : rows) {
    const std::size_t first = offset(row * each);
    const std::size_t last = offset(row * each + each - 1) + line_bytes();
    on_host(first, last, access, [&](std::byte* image) {
      for (std::int64_t i = 0; i < each; ++i) f(done++, image + (offset(row * each + i) - first));
    });
  }
}

void Buffer::poison() {
  const int pattern = tensor_.dtype == DType::i32 ? kIntPoison : kPoison;
  on_lines(Access::write,
           [&](std::int64_t, std::byte* to) { std::memset(to, pattern, line_bytes()); });
}

void Buffer::fill(const Values& values) {
  on_lines(Access::write, [&](std::int64_t line, std::byte* to) {
    thread_local std::vector<double> elements;
    elements.resize(line_length());
    values(line, elements);
    encode(tensor_.dtype, elements, to);
  });
}

void Buffer::upload(std::span<const double> values) {
  on_lines(Access::write, [&](std::int64_t line, std::byte* to) {
    encode(tensor_.dtype, values.subspan(line * line_length(), line_length()), to);
  });
}

void Buffer::upload(std::span<const double> values, const Rows& rows) {
  on_lines(rows, Access::modify, [&](std::int64_t line, std::byte* to) {
    encode(tensor_.dtype, values.subspan(line * line_length(), line_length()), to);
  });
}

void Buffer::upload(std::span<const std::int32_t> values) { upload(std::as_bytes(values)); }

void Buffer::upload(std::span<const std::byte> elements) {
  on_lines(Access::write, [&](std::int64_t line, std::byte* to) {
    copy_bytes(elements.data() + static_cast<std::size_t>(line) * line_bytes(), line_bytes(), to);
  });
}

std::vector<double> Buffer::download() const {
  std::vector<double> values(lines() * line_length());
  on_lines(Access::read, [&](std::int64_t line, const std::byte* from) {
    decode(tensor_.dtype, from, std::span(values).subspan(line * line_length(), line_length()));
  });
  return values;
}

std::vector<double> Buffer::download(const Rows& rows) const {
  std::vector<double> values(rows.size() * lines_of_row() * line_length());
  on_lines(rows, Access::read, [&](std::int64_t line, const std::byte* from) {
    decode(tensor_.dtype, from, std::span(values).subspan(line * line_length(), line_length()));
  });
  return values;
}

std::vector<std::int32_t> Buffer::download_ints() const {
  std::vector<std::int32_t> values(lines() * line_length());
  on_lines(Access::read, [&](std::int64_t line, const std::byte* from) {
    copy_bytes(from, line_bytes(), values.data() + line * line_length());
  });
  return values;
}

std::vector<std::int32_t> Buffer::download_ints(const Rows& rows) const {
  std::vector<std::int32_t> values(rows.size() * lines_of_row() * line_length());
  on_lines(rows, Access::read, [&](std::int64_t line, const std::byte* from) {
    copy_bytes(from, line_bytes(), values.data() + line * line_length());
  });
  return values;
}

bool Buffer::canaries_intact() const {
  if (tensor_.rank < 0) return true;
  bool intact = true;
  const auto check = [&](std::size_t first, std::size_t last) {
    on_host(first, last, Access::read, [&](const std::byte* image) {
      intact = intact && all_canary(image, image + (last - first));
    });
  };
  check(0, first_byte_);
  check(end_byte(), bytes_);
  if (packed()) return intact;
  on_host(first_byte_, end_byte(), Access::read, [&](const std::byte* image) {
    std::size_t done = first_byte_;
    const auto check_up_to = [&](std::size_t byte) {
      intact = intact && all_canary(image + (done - first_byte_), image + (byte - first_byte_));
    };
    for (std::int64_t line = 0; line < lines(); ++line) {
      check_up_to(offset(line));
      done = offset(line) + line_bytes();
    }
    check_up_to(end_byte());
  });
  return intact;
}

}  // namespace winnow::harness
