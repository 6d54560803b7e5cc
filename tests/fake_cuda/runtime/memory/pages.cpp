// Pages of the system.
#include "books.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

namespace fake_cuda {
namespace {

std::shared_mutex memory_in_use;

}  // namespace

// Maps pages at addresses that fall from call to call, as drivers do: among blocks of one size the caching allocator
// takes the lowest address.
void* map_pages(size_t bytes) {
  constexpr size_t step = 2 << 20;
  static std::atomic<uintptr_t> lowest{uintptr_t{1} << 45};
  const uintptr_t taken = (bytes / step + 1) * step;
  void* wanted = reinterpret_cast<void*>(lowest.fetch_sub(taken) - taken);
  void* pages = mmap(wanted, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}

bool is_mapped(const Range& range) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = range.begin / page * page, end = (range.end() + page - 1) / page * page;
  std::vector<unsigned char> resident((end - begin) / page);
  return range.bytes == 0 || mincore(reinterpret_cast<void*>(begin), end - begin, resident.data()) == 0;
}

// Unmaps pages without the watch over munmap.
int unmap_pages(void* pointer, size_t bytes) { return static_cast<int>(syscall(SYS_munmap, pointer, bytes)); }

std::shared_lock<std::shared_mutex> hold_memory() { return std::shared_lock<std::shared_mutex>(memory_in_use); }

// Waits until no stream touches memory: a test that unmaps too early gets a fault, not a crash.
int unmap_when_unused(void* pointer, size_t bytes) {
  std::unique_lock<std::shared_mutex> alone(memory_in_use);
  return unmap_pages(pointer, bytes);
}

void poison(void* memory, size_t bytes) {
  if (settings().poison) std::memset(memory, 0xFF, bytes);
}

}  // namespace fake_cuda
