// The launch of operators on the fake device's streams. In C, so that two compilers may make the two sides.
#pragma once

#include <cuda_runtime_api.h>
#include <stddef.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

struct FakeCudaRange {
  const void* pointer;
  size_t bytes;
};

// Puts a kernel on a stream of the current device. It runs on the stream's thread if all its memory is the device's, or
// registered, at that time; otherwise the device breaks. `dispose` frees `data` in any case.
EXPORTED cudaError_t fake_cuda_launch(cudaStream_t stream, const char* name, const FakeCudaRange* memory,
                                      size_t num_ranges, void (*run)(void*), void (*dispose)(void*), void* data);

// Called by a kernel that cannot do its work, like a device-side assertion.
EXPORTED void fake_cuda_kernel_failed(const char* text);

// Waits for a stream of the current device where CUDA would not have to.
EXPORTED void fake_cuda_wait(cudaStream_t stream);

// Fills memory with 0xFF in the order of the stream, if the settings say so.
EXPORTED void fake_cuda_poison(int device, void* pointer, size_t bytes, cudaStream_t stream);
