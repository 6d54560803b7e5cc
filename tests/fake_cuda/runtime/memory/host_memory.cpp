// Host memory that devices may copy: registered, or made by this runtime.
#include "books.hpp"

namespace fake_cuda {
namespace {

cudaError_t book_host_memory(const Range& range, bool owned) {
  std::lock_guard<std::mutex> lock(books_mutex);
  if (overlaps_with_any(host_book(), range))
    return fault(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister: some of this memory is registered already");
  host_book()[range.begin] = {range.bytes, current_device(), next_booking(), owned};
  return cudaSuccess;
}

}  // namespace

}  // namespace fake_cuda

using namespace fake_cuda;

EXPORTED cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  RETURN_IF_UNUSABLE(current_device());
  if (planned_failure("host_register")) return result(cudaErrorMemoryAllocation);
  *pointer = map_pages(bytes);
  if (!*pointer) return result(cudaErrorMemoryAllocation);
  poison(*pointer, bytes);
  return book_host_memory(range_of(*pointer, bytes), true);
}

EXPORTED cudaError_t cudaFreeHost(void* pointer) {
  if (!may_use_cuda()) return cudaErrorInitializationError;
  if (!pointer) return cudaSuccess;
  Block block;
  bool flying;
  {
    std::lock_guard<std::mutex> lock(books_mutex);
    if (!unbook(host_book(), pointer, &block))
      return fault(cudaErrorInvalidValue, "cudaFreeHost of memory that cudaHostAlloc has not made");
    flying = is_flying(range_of(pointer, block.bytes));
  }
  unmap_when_unused(pointer, block.bytes);
  return flying ? fault(cudaErrorInvalidValue, "cudaFreeHost while a copy is on its way") : cudaSuccess;
}

EXPORTED cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  RETURN_IF_UNUSABLE(current_device());
  if (planned_failure("host_register")) return result(cudaErrorMemoryAllocation);
  const Range range = range_of(pointer, bytes);
  if (bytes == 0 || !is_mapped(range)) return fault(cudaErrorInvalidValue, "cudaHostRegister of memory that is not there");
  return book_host_memory(range, false);
}

EXPORTED cudaError_t cudaHostUnregister(void* pointer) {
  if (!may_use_cuda()) return cudaErrorInitializationError;
  std::lock_guard<std::mutex> lock(books_mutex);
  Block block;
  if (!unbook(host_book(), pointer, &block))
    return fault(cudaErrorHostMemoryNotRegistered, "cudaHostUnregister of memory that is not registered");
  const Range range = range_of(pointer, block.bytes);
  if (is_flying(range)) return fault(cudaErrorInvalidValue, "cudaHostUnregister while a copy is on its way");
  if (!is_mapped(range)) return fault(cudaErrorInvalidValue, "cudaHostUnregister of memory that was unmapped before");
  return cudaSuccess;
}

// Unmaps pages. Pages that are registered, or that a copy will touch, are a fault.
EXPORTED int fake_cuda_unmap(void* pointer, size_t bytes) {
  const Range range = range_of(pointer, bytes);
  bool registered, flying;
  {
    if (is_forked_child()) return unmap_pages(pointer, bytes);
    std::lock_guard<std::mutex> lock(books_mutex);
    registered = overlaps_with_any(host_book(), range);
    flying = is_flying(range);
  }
  if (!registered && !flying) return unmap_pages(pointer, bytes);
  report(flying ? "memory was unmapped while a copy is on its way" : "registered memory was unmapped");
  return unmap_when_unused(pointer, bytes);
}
