// Device memory: its size, and its allocations.
#include "books.hpp"

#include <algorithm>

EXPORTED int fake_cuda_context_exists(int device);

namespace fake_cuda {
namespace {

int64_t used_bytes[MAX_DEVICES], bytes_of_others[MAX_DEVICES];

// Bytes that the driver keeps on a device for each process that uses the device.
constexpr int64_t CONTEXT_BYTES = 256 << 20;

int64_t free_bytes_of(int device) {
  const int64_t context = fake_cuda_context_exists(device) ? CONTEXT_BYTES : 0;
  return std::max<int64_t>(settings().memory_bytes() - context - used_bytes[device] - bytes_of_others[device], 0);
}

}  // namespace

}  // namespace fake_cuda

using namespace fake_cuda;

EXPORTED cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  RETURN_IF_UNUSABLE(current_device());
  const int device = current_device();
  {
    std::lock_guard<std::mutex> lock(books_mutex);
    if (static_cast<int64_t>(bytes) > free_bytes_of(device)) return result(cudaErrorMemoryAllocation);
  }
  if (planned_failure("malloc")) return result(cudaErrorMemoryAllocation);
  *pointer = map_pages(bytes);
  if (!*pointer) return result(cudaErrorMemoryAllocation);
  poison(*pointer, bytes);
  std::lock_guard<std::mutex> lock(books_mutex);
  device_book()[reinterpret_cast<uintptr_t>(*pointer)] = {bytes, device, next_booking(), true};
  used_bytes[device] += static_cast<int64_t>(bytes);
  return cudaSuccess;
}

// Waits for the device, so that nothing can still use the memory. Afterwards its addresses are unmapped.
EXPORTED cudaError_t cudaFree(void* pointer) {
  if (!may_use_cuda()) return cudaErrorInitializationError;
  if (!pointer) return cudaSuccess;
  const Location location = locate(range_of(pointer, 1));
  if (location.place != Place::device) return fault(cudaErrorInvalidValue, "cudaFree of memory that is not a device's");
  host_waits("cudaFree");
  wait_for_device(location.device);
  Block block;
  {
    std::lock_guard<std::mutex> lock(books_mutex);
    if (!unbook(device_book(), pointer, &block))
      return fault(cudaErrorInvalidValue, "cudaFree of an address inside a block");
    used_bytes[block.device] -= static_cast<int64_t>(block.bytes);
  }
  unmap_when_unused(pointer, block.bytes);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  RETURN_IF_UNUSABLE(current_device());
  std::lock_guard<std::mutex> lock(books_mutex);
  *total_bytes = static_cast<size_t>(settings().memory_bytes());
  *free_bytes = static_cast<size_t>(free_bytes_of(current_device()));
  return cudaSuccess;
}

// Sets the memory of other processes, so that so many bytes are free now.
EXPORTED void fake_cuda_leave_free(int device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(books_mutex);
  bytes_of_others[device] = 0;
  bytes_of_others[device] = free_bytes_of(device) - bytes;
}

EXPORTED void fake_cuda_give_back(int device) {
  std::lock_guard<std::mutex> lock(books_mutex);
  bytes_of_others[device] = 0;
}
