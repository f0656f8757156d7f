// SPDX-License-Identifier: Apache-2.0
// From a call to the kernel that runs it, or to the text of a refusal: checked once, chosen once.
//
// Every operator has a file beside this one with
//   Checked<Args> checked(const Args&)   which throws for a call that is legal nowhere,
// and a line `template struct Operator<Args>;` that makes its functions.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include <fmt/format.h>

#include "backend.h"
#include "core/check.h"
#include "core/memory_errors.h"
#include "core/overlap.h"
#include "winnow/operators.h"

namespace winnow {

/// A legal call: its arguments with defaults filled in, and the device of all its tensors.
template <class Args>
struct Checked {
  Args args;
  Device device;
};

// A batch is the same call over slices: kernels know none. Operators that take one overload these.
template <class Args>
std::int64_t slice_count(const Args&) {
  return 1;
}
template <class Args>
Args slice_of(const Args& args, std::int64_t) {
  return args;
}

/// Whether the call writes to a tensor. An operator overloads it if an option decides that.
template <class Args>
bool is_written(const Args&, const Field<Args, Tensor>& field) {
  return field.role == FieldRole::output;
}

/// A tensor of a call, which may be absent.
struct NamedTensor {
  const char* name;
  const Tensor* tensor;
  bool is_written;
  Hull hull;
};

void check_execution(std::string_view op, const Execution& execution);

/// Throws if an output or the caller's workspace shares memory with another argument. Inputs may
/// share theirs. The tensors are legal and on one device.
void check_overlaps(std::string_view op, std::span<const NamedTensor> tensors,
                    const Execution& execution);

/// The tensors of a call, in the order of its fields.
template <class Args>
auto tensors_of(const Args& args) {
  constexpr std::size_t kCount = std::apply(
      []<class... Value>(const Field<Args, Value>&...) {
        return (std::size_t{std::is_same_v<Value, Tensor>} + ...);
      },
      Args::fields());
  std::array<NamedTensor, kCount> tensors;
  auto next = tensors.begin();
  for_each_field<Args>([&]<class Value>(const Field<Args, Value>& field) {
    if constexpr (std::is_same_v<Value, Tensor>)
      *next++ = {field.name, &(args.*field.member), is_written(args, field),
                 hull_of(args.*field.member)};
  });
  return tensors;
}

/// The backends that may be taken, best first.
std::span<const Backend> backends_to_try(Backend asked);
/// Null where the backend is not in this build.
const BackendTable* find_backend(Backend backend);
/// The kind of device whose tensors the backend takes, also where it is not in this build.
DeviceKind device_kind(Backend backend);
/// Empty, or why the backend cannot run anything on this device.
std::string why_not(Backend backend, Device device);
/// Whether a kernel may be taken, by its name.
bool is_asked_for(std::string_view kernel, const Execution& execution);
/// Throws an error that lists `names` if the kernel asked for is none of them.
void check_kernel_name(std::string_view op, std::string_view kernel,
                       const std::vector<std::string_view>& names);
/// The refusals of candidates as one text.
std::string sentences(const std::vector<Candidate>& candidates);

/// The caller's Execution with a workspace of `bytes` at least, made by its allocator if it has
/// one; without one a kernel takes memory of its own.
Execution with_workspace(std::string_view op, const Execution& execution, std::size_t bytes);

template <class Args>
class Call {
 public:
  Call(const Args& args, const Execution& execution)
      : call_(checked(args)), first_slice_(slice_of(call_.args, 0)), execution_(execution) {
    check_execution(Args::kOperator, execution);
    check_overlaps(Args::kOperator, tensors_of(call_.args), execution);
    if (execution.kernel != nullptr) check_kernel();
  }

  /// The first kernel that can run the call. Null: `refusals` says why, kernel by kernel.
  const Kernel<Args>* choose(std::vector<Candidate>& refusals) const {
    for (const Backend backend : backends_to_try(execution_.backend)) {
      const Offer offer = offer_of(backend);
      if (!offer.why_not.empty() && may_have_kernel(backend)) {
        refusals.push_back({backend, {}, offer.why_not});
      }
      for (const Kernel<Args>& kernel : offer.kernels) {
        if (!is_asked_for(kernel.name, execution_)) continue;
        std::string reason = why_not(kernel);
        if (reason.empty()) return &kernel;
        refusals.push_back({backend, kernel.name, std::move(reason)});
      }
    }
    return nullptr;
  }

  const Kernel<Args>& choose_or_throw() const {
    std::vector<Candidate> refusals;
    const Kernel<Args>* const kernel = choose(refusals);
    if (kernel != nullptr) return *kernel;
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: {}", Args::kOperator, sentences(refusals)));
  }

  /// Every kernel, also those behind the first that can run the call.
  std::vector<Candidate> explain() const {
    std::vector<Candidate> candidates;
    for (const Backend backend : backends_to_try(execution_.backend)) {
      const Offer offer = offer_of(backend);
      if (!offer.why_not.empty()) candidates.push_back({backend, {}, offer.why_not});
      for (const Kernel<Args>& kernel : offer.kernels) {
        candidates.push_back(
            {backend, kernel.name,
             is_asked_for(kernel.name, execution_) ? why_not(kernel) : refusal::other_kernel});
      }
    }
    return candidates;
  }

  std::size_t workspace_bytes(const Kernel<Args>& kernel) const {
    return kernel.workspace_bytes(first_slice_, execution_);
  }

  void run(const Kernel<Args>& kernel) const {
    const std::int64_t slices = slice_count(call_.args);
    if (slices == 0) return;
    const Execution execution =
        with_workspace(Args::kOperator, execution_, workspace_bytes(kernel));
    for (std::int64_t b = 0; b < slices; ++b) kernel.run(slice_of(call_.args, b), execution);
  }

 private:
  /// What a backend has for the call.
  struct Offer {
    std::string why_not;  // empty if there are kernels
    Kernels<Args> kernels;
  };

  /// All slices have one shape, but only the second shows how the stride of the batch aligns them.
  std::string why_not(const Kernel<Args>& kernel) const {
    std::string reason = kernel.why_not(first_slice_, execution_);
    if (!reason.empty() || slice_count(call_.args) < 2) return reason;
    return kernel.why_not(slice_of(call_.args, 1), execution_);
  }

  Offer offer_of(Backend backend) const {
    std::string reason = winnow::why_not(backend, call_.device);
    if (!reason.empty()) return {std::move(reason), {}};
    const Kernels<Args> kernels = kernels_of<Args>(*find_backend(backend));
    return {kernels.empty() ? refusal::no_such_op : "", kernels};
  }

  /// Whether the backend's reason counts: of those that are tried one after another only the ones
  /// for the tensors' device, or with the kernel asked for.
  bool may_have_kernel(Backend backend) const {
    if (execution_.backend != Backend::automatic) return true;
    if (execution_.kernel == nullptr) return device_kind(backend) == call_.device.kind;
    const std::vector<std::string_view> names = Operator<Args>::kernels(backend);
    return std::find(names.begin(), names.end(), execution_.kernel) != names.end();
  }

  void check_kernel() const {
    std::vector<std::string_view> names;
    for (const Backend backend : backends_to_try(execution_.backend)) {
      for (const std::string_view name : Operator<Args>::kernels(backend)) names.push_back(name);
    }
    check_kernel_name(Args::kOperator, execution_.kernel, names);
  }

  Checked<Args> call_;
  Args first_slice_;
  Execution execution_;
};

template <Arguments Args>
void Operator<Args>::run(const Args& args, const Execution& execution) {
  with_memory_errors(Args::kOperator, [&] {
    const Call<Args> call(args, execution);
    call.run(call.choose_or_throw());
  });
}

template <Arguments Args>
std::size_t Operator<Args>::workspace_bytes(const Args& args, const Execution& execution) {
  return with_memory_errors(Args::kOperator, [&] {
    const Call<Args> call(args, execution);
    return call.workspace_bytes(call.choose_or_throw());
  });
}

template <Arguments Args>
std::string Operator<Args>::why_not(const Args& args, const Execution& execution) {
  return with_memory_errors(Args::kOperator, [&] {
    const Call<Args> call(args, execution);
    std::vector<Candidate> refusals;
    return call.choose(refusals) != nullptr ? std::string() : sentences(refusals);
  });
}

template <Arguments Args>
std::vector<Candidate> Operator<Args>::explain(const Args& args, const Execution& execution) {
  return with_memory_errors(Args::kOperator, [&] { return Call<Args>(args, execution).explain(); });
}

template <Arguments Args>
std::vector<std::string_view> Operator<Args>::kernels(Backend backend) {
  return with_memory_errors(Args::kOperator, [&] {
    std::vector<std::string_view> names;
    const BackendTable* const table = find_backend(backend);
    if (table == nullptr) return names;
    for (const Kernel<Args>& kernel : kernels_of<Args>(*table)) names.emplace_back(kernel.name);
    return names;
  });
}

}  // namespace winnow
