// Device memory, registered host memory, and copies between them.
#include "runtime.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "launch.hpp"

EXPORTED int fake_cuda_context_exists(int device);

namespace fake_cuda {
namespace {

struct Block {
  size_t bytes;
  int device;
  uint64_t booking;
  bool owned;  // made by this runtime, not registered
};
using Book = std::map<uintptr_t, Block>;

std::mutex books_mutex;  // of everything here
std::shared_mutex memory_in_use;
uint64_t num_bookings = 0;
int64_t used_bytes[MAX_DEVICES], bytes_of_others[MAX_DEVICES];

Book& device_book() {
  static auto* book = new Book;
  return *book;
}

Book& host_book() {
  static auto* book = new Book;
  return *book;
}

std::map<uint64_t, Range>& flights() {
  static auto* all = new std::map<uint64_t, Range>;
  return *all;
}

Range range_of(const Book::value_type& entry) { return {entry.first, entry.second.bytes}; }

const Book::value_type* first_overlap(const Book& book, const Range& range) {
  auto next = book.upper_bound(range.begin);
  if (next != book.begin() && range_of(*std::prev(next)).overlaps(range)) return &*std::prev(next);
  return next != book.end() && range_of(*next).overlaps(range) ? &*next : nullptr;
}

bool is_flying(const Range& range) {
  for (const auto& flight : flights())
    if (flight.second.overlaps(range)) return true;
  return false;
}

bool is_mapped(const Range& range) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = range.begin / page * page, end = (range.end() + page - 1) / page * page;
  std::vector<unsigned char> resident((end - begin) / page);
  return range.bytes == 0 || mincore(reinterpret_cast<void*>(begin), end - begin, resident.data()) == 0;
}

// At addresses that rise from call to call: of blocks that are equally large the caching allocator takes the lowest.
void* map_pages(size_t bytes) {
  constexpr size_t step = 2 << 20;
  static std::atomic<uintptr_t> next{uintptr_t{1} << 44};
  void* wanted = reinterpret_cast<void*>(next.fetch_add((bytes / step + 1) * step));
  void* pages = mmap(wanted, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}

// Poison shows what is read before it is written: 0xFF is NaN in every floating format, and -1 as an index.
void poison(void* memory, size_t bytes) {
  if (settings().poison) std::memset(memory, 0xFF, bytes);
}

double seconds_of(Place from, Place to, size_t bytes) {
  if (from == to) return 0;
  const double speed = to == Place::device ? settings().bytes_per_s_to_device : settings().bytes_per_s_to_host;
  return speed > 0 ? bytes / speed : 0;
}

bool is_pageable(const Location& location) { return location.place == Place::pageable; }
bool is_lost(const Location& location) { return location.place == Place::unmapped; }
bool is_same(const Location& a, const Location& b) { return a.place == b.place && a.booking == b.booking; }

// A copy that a stream has come to. Both ends have to be what they were when the copy was submitted.
struct Copy {
  Range to, from;
  Location to_location, from_location;
  Stream* stream;

  void run() const {
    stream->sleep_by_schedule();
    wait_seconds(seconds_of(from_location.place, to_location.place, to.bytes));
    auto hold = hold_memory();
    const Location to_now = locate(to), from_now = locate(from);
    if (!is_same(to_now, to_location) || !is_same(from_now, from_location)) {
      break_device(stream->device, cudaErrorIllegalAddress,
                   "a copy came to memory that was freed, unmapped or unregistered meanwhile: from " +
                       describe(from_location) + " (now " + describe(from_now) + ") to " + describe(to_location) +
                       " (now " + describe(to_now) + ")");
      return;
    }
    std::memmove(reinterpret_cast<void*>(to.begin), reinterpret_cast<const void*>(from.begin), to.bytes);
  }
};

// From registered or device memory the stream copies, and the host goes on at once.
void copy_in_stream(const Copy& copy) {
  const uint64_t reading = copy.from_location.place == Place::registered ? begin_flight(copy.from) : 0;
  const uint64_t writing = copy.to_location.place == Place::registered ? begin_flight(copy.to) : 0;
  submit(*copy.stream, [=] {
    copy.run();
    end_flight(reading);
    end_flight(writing);
  });
}

// To pageable memory: the host waits for the copy. From pageable memory: it waits until the bytes are in the driver's
// own buffer. CUDA may do that before or after earlier work of the stream, so the host waits for that as well; only
// up to 64 KiB are always taken at once.
void copy_pageable(const Copy& copy) {
  constexpr size_t taken_at_once = 64 << 10;
  if (is_pageable(copy.to_location)) {
    host_waits("a copy to pageable memory");
    copy.stream->wait(submit(*copy.stream, [=] { copy.run(); }));
    return;
  }
  if (copy.from.bytes > taken_at_once) {
    host_waits("a copy from pageable memory");
    copy.stream->wait(copy.stream->last_position());
  }
  const char* bytes = reinterpret_cast<const char*>(copy.from.begin);
  auto buffer = std::make_shared<std::vector<char>>(bytes, bytes + copy.from.bytes);
  submit(*copy.stream, [=] {
    Copy staged = copy;
    staged.from = fake_cuda::range_of(buffer->data(), buffer->size());
    staged.from_location = locate(staged.from);
    staged.run();
  });
}

bool can_be_device(const Location& location) { return location.place != Place::pageable; }
bool can_be_host(const Location& location) { return location.place != Place::device; }

// Registered memory is mapped into the device's address space as well, so it may be called either.
bool kind_fits(cudaMemcpyKind kind, const Location& to, const Location& from) {
  switch (kind) {
    case cudaMemcpyHostToHost: return can_be_host(to) && can_be_host(from);
    case cudaMemcpyHostToDevice: return can_be_device(to) && can_be_host(from);
    case cudaMemcpyDeviceToHost: return can_be_host(to) && can_be_device(from);
    case cudaMemcpyDeviceToDevice: return can_be_device(to) && can_be_device(from);
    default: return true;
  }
}

cudaError_t copy(const char* call, void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t handle) {
  RETURN_IF_UNUSABLE(current_device());
  Stream* stream = find_stream(handle);
  if (!stream) return fault(cudaErrorInvalidResourceHandle, std::string(call) + ": no such stream");
  if (planned_failure("copy")) return result(cudaErrorUnknown);
  if (bytes == 0) return cudaSuccess;
  Copy copy{fake_cuda::range_of(to, bytes), fake_cuda::range_of(from, bytes), {}, {}, stream};
  copy.to_location = locate(copy.to);
  copy.from_location = locate(copy.from);
  if (is_lost(copy.to_location) || is_lost(copy.from_location) || !kind_fits(kind, copy.to_location, copy.from_location))
    return fault(cudaErrorInvalidValue, std::string(call) + ": from " + describe(copy.from_location) + " to " +
                                            describe(copy.to_location));
  if (is_pageable(copy.to_location) || is_pageable(copy.from_location)) copy_pageable(copy);
  else copy_in_stream(copy);
  return cudaSuccess;
}

// Not while a stream is just touching memory: a test that unmaps too early fails by a fault, not by a crash.
int unmap_when_unused(void* pointer, size_t bytes) {
  std::unique_lock<std::shared_mutex> alone(memory_in_use);
  return static_cast<int>(syscall(SYS_munmap, pointer, bytes));
}

cudaError_t book_host_memory(const Range& range, bool owned) {
  std::lock_guard<std::mutex> lock(books_mutex);
  if (first_overlap(host_book(), range))
    return fault(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister: some of this memory is registered already");
  host_book()[range.begin] = {range.bytes, current_device(), ++num_bookings, owned};
  return cudaSuccess;
}

// Takes a block out of a book.
bool unbook(Book& book, uintptr_t begin, Block* block) {
  auto found = book.find(begin);
  if (found == book.end()) return false;
  *block = found->second;
  book.erase(found);
  return true;
}

// What the driver keeps on a device for a process that uses it.
constexpr int64_t CONTEXT_BYTES = 256 << 20;

int64_t free_bytes_of(int device) {
  const int64_t context = fake_cuda_context_exists(device) ? CONTEXT_BYTES : 0;
  return std::max<int64_t>(settings().memory_bytes() - context - used_bytes[device] - bytes_of_others[device], 0);
}

}  // namespace

std::shared_lock<std::shared_mutex> hold_memory() { return std::shared_lock<std::shared_mutex>(memory_in_use); }

uint64_t begin_flight(const Range& range) {
  std::lock_guard<std::mutex> lock(books_mutex);
  flights()[++num_bookings] = range;
  return num_bookings;
}

void end_flight(uint64_t flight) {
  std::lock_guard<std::mutex> lock(books_mutex);
  flights().erase(flight);
}

Location locate(const Range& range) {
  std::lock_guard<std::mutex> lock(books_mutex);
  for (const Book* book : {&device_book(), &host_book()}) {
    const Book::value_type* entry = first_overlap(*book, range);
    if (!entry) continue;
    const bool whole = entry->first <= range.begin && range.end() <= range_of(*entry).end();
    if (!whole || (book == &host_book() && !is_mapped(range))) return {Place::unmapped, entry->second.device, 0};
    return {book == &device_book() ? Place::device : Place::registered, entry->second.device, entry->second.booking};
  }
  return {is_mapped(range) ? Place::pageable : Place::unmapped, -1, 0};
}

std::string describe(const Location& location) {
  switch (location.place) {
    case Place::device: return "memory of device " + std::to_string(location.device);
    case Place::registered: return "registered host memory";
    case Place::pageable: return "pageable host memory";
    default: return "memory that is not there, or not wholly allocated or registered";
  }
}

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
  device_book()[reinterpret_cast<uintptr_t>(*pointer)] = {bytes, device, ++num_bookings, true};
  used_bytes[device] += static_cast<int64_t>(bytes);
  return cudaSuccess;
}

// Waits for the device, so that nothing can still use the memory. Afterwards its addresses are nobody's.
EXPORTED cudaError_t cudaFree(void* pointer) {
  if (is_forked_child()) return cudaErrorInitializationError;
  if (!pointer) return cudaSuccess;
  const Location location = locate(fake_cuda::range_of(pointer, 1));
  if (location.place != Place::device) return fault(cudaErrorInvalidValue, "cudaFree of memory that is not a device's");
  host_waits("cudaFree");
  wait_for_device(location.device);
  Block block;
  {
    std::lock_guard<std::mutex> lock(books_mutex);
    if (!unbook(device_book(), reinterpret_cast<uintptr_t>(pointer), &block))
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

EXPORTED cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  RETURN_IF_UNUSABLE(current_device());
  if (planned_failure("host_register")) return result(cudaErrorMemoryAllocation);
  *pointer = map_pages(bytes);
  if (!*pointer) return result(cudaErrorMemoryAllocation);
  poison(*pointer, bytes);
  return book_host_memory(fake_cuda::range_of(*pointer, bytes), true);
}

EXPORTED cudaError_t cudaFreeHost(void* pointer) {
  if (is_forked_child()) return cudaErrorInitializationError;
  if (!pointer) return cudaSuccess;
  Block block;
  bool flying;
  {
    std::lock_guard<std::mutex> lock(books_mutex);
    if (!unbook(host_book(), reinterpret_cast<uintptr_t>(pointer), &block))
      return fault(cudaErrorInvalidValue, "cudaFreeHost of memory that cudaHostAlloc has not made");
    flying = is_flying(fake_cuda::range_of(pointer, block.bytes));
  }
  unmap_when_unused(pointer, block.bytes);
  return flying ? fault(cudaErrorInvalidValue, "cudaFreeHost while a copy is on its way") : cudaSuccess;
}

EXPORTED cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  RETURN_IF_UNUSABLE(current_device());
  if (planned_failure("host_register")) return result(cudaErrorMemoryAllocation);
  const Range range = fake_cuda::range_of(pointer, bytes);
  if (bytes == 0 || !is_mapped(range)) return fault(cudaErrorInvalidValue, "cudaHostRegister of memory that is not there");
  return book_host_memory(range, false);
}

EXPORTED cudaError_t cudaHostUnregister(void* pointer) {
  if (is_forked_child()) return cudaErrorInitializationError;
  std::lock_guard<std::mutex> lock(books_mutex);
  Block block;
  if (!unbook(host_book(), reinterpret_cast<uintptr_t>(pointer), &block))
    return fault(cudaErrorHostMemoryNotRegistered, "cudaHostUnregister of memory that is not registered");
  const Range range = fake_cuda::range_of(pointer, block.bytes);
  if (is_flying(range)) return fault(cudaErrorInvalidValue, "cudaHostUnregister while a copy is on its way");
  if (!is_mapped(range)) return fault(cudaErrorInvalidValue, "cudaHostUnregister of memory that was unmapped before");
  return cudaSuccess;
}

// Gives pages back to the system. Those that are registered, or that a copy will touch, must not go.
EXPORTED int fake_cuda_unmap(void* pointer, size_t bytes) {
  const Range range = fake_cuda::range_of(pointer, bytes);
  bool registered, flying;
  {
    if (is_forked_child()) return static_cast<int>(syscall(SYS_munmap, pointer, bytes));
    std::lock_guard<std::mutex> lock(books_mutex);
    registered = first_overlap(host_book(), range);
    flying = is_flying(range);
  }
  if (!registered && !flying) return static_cast<int>(syscall(SYS_munmap, pointer, bytes));
  report(flying ? "memory was unmapped while a copy is on its way" : "registered memory was unmapped");
  return unmap_when_unused(pointer, bytes);
}

EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  if (is_forked_child()) return cudaErrorInitializationError;
  const Location location = locate(fake_cuda::range_of(pointer, 1));
  *attributes = {};
  attributes->device = location.device;
  if (location.place == Place::device) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (location.place == Place::registered) {
    attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
  }
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy("cudaMemcpyAsync", to, from, bytes, kind, stream);
}

EXPORTED cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy("cudaMemcpyPeerAsync", to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

EXPORTED cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (cudaError_t error = copy("cudaMemcpy", to, from, bytes, kind, nullptr)) return error;
  return cudaStreamSynchronize(nullptr);
}

EXPORTED cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t handle) {
  RETURN_IF_UNUSABLE(current_device());
  Stream* stream = find_stream(handle);
  if (!stream) return fault(cudaErrorInvalidResourceHandle, "cudaMemsetAsync: no such stream");
  const Range range = fake_cuda::range_of(pointer, bytes);
  if (bytes == 0) return cudaSuccess;
  if (locate(range).place != Place::device) return fault(cudaErrorInvalidValue, "cudaMemset of memory that is not a device's");
  submit(*stream, [=] {
    stream->sleep_by_schedule();
    auto hold = hold_memory();
    if (locate(range).place == Place::device) std::memset(pointer, value, bytes);
    else break_device(stream->device, cudaErrorIllegalAddress, "cudaMemset came to memory that was freed meanwhile");
  });
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  return cudaMemsetAsync(pointer, value, bytes, nullptr);
}

void fake_cuda_poison(int device, void* pointer, size_t bytes, cudaStream_t handle) {
  Stream* stream = handle ? find_stream(handle) : default_stream_of(device);
  if (!stream || !settings().poison) return;
  const Range range = fake_cuda::range_of(pointer, bytes);
  submit(*stream, [=] {
    auto hold = hold_memory();
    if (locate(range).place == Place::device) poison(pointer, bytes);
  });
}

// Memory that other processes hold, so that this much is free now.
EXPORTED void fake_cuda_leave_free(int device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(books_mutex);
  bytes_of_others[device] = 0;
  bytes_of_others[device] = free_bytes_of(device) - bytes;
}

EXPORTED void fake_cuda_give_back(int device) {
  std::lock_guard<std::mutex> lock(books_mutex);
  bytes_of_others[device] = 0;
}

EXPORTED int64_t fake_cuda_num_device_blocks() {
  std::lock_guard<std::mutex> lock(books_mutex);
  return static_cast<int64_t>(device_book().size());
}

EXPORTED int64_t fake_cuda_num_registrations() {
  std::lock_guard<std::mutex> lock(books_mutex);
  return static_cast<int64_t>(host_book().size());
}
