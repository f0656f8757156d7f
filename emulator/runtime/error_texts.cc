// SPDX-License-Identifier: Apache-2.0
// Names and texts of the errors that this runtime returns; the texts are NVIDIA's.
#include <array>

#include <cuda_runtime_api.h>

namespace {

struct Text {
  cudaError_t code;
  const char* name;
  const char* text;
};

constexpr std::array kTexts = {
    Text{cudaSuccess, "cudaSuccess", "no error"},
    Text{cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    Text{cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    Text{cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
         "invalid configuration argument"},
    Text{cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction",
         "invalid device function"},
    Text{cudaErrorMissingConfiguration, "cudaErrorMissingConfiguration",
         "__global__ function call is not configured"},
    Text{cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    Text{cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
         "no kernel image is available for execution on the device"},
    Text{cudaErrorInvalidPtx, "cudaErrorInvalidPtx", "a PTX JIT compilation failed"},
    Text{cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle",
         "invalid resource handle"},
    Text{cudaErrorIllegalState, "cudaErrorIllegalState",
         "the operation cannot be performed in the present state"},
    Text{cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    Text{cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    Text{cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    Text{cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    Text{cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
         "operation not permitted when stream is capturing"},
    Text{cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
         "operation failed due to a previous error during capture"},
    Text{cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
         "operation would make the legacy stream depend on a capturing blocking stream"},
    Text{cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
         "operation not permitted on an event last recorded in a capturing stream"},
    Text{cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
         "attempt to terminate a thread-local capture sequence from another thread"},
    Text{cudaErrorInvalidClusterSize, "cudaErrorInvalidClusterSize", "cluster misconfiguration"},
    Text{cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const Text* find(cudaError_t code) {
  for (const Text& text : kTexts)
    if (text.code == code) return &text;
  return nullptr;
}

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
  const Text* const found = find(error);
  return found == nullptr ? "unrecognized error code" : found->name;
}

const char* cudaGetErrorString(cudaError_t error) {
  const Text* const found = find(error);
  return found == nullptr ? "unrecognized error code" : found->text;
}
