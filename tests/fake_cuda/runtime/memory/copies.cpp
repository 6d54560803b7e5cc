// Copies between all kinds of memory, and fills of device memory.
#include "books.hpp"

#include <cstring>

#include "launch.hpp"

namespace fake_cuda {
namespace {

double seconds_of(Place from, Place to, size_t bytes) {
  if (from == to) return 0;
  const double speed = to == Place::device ? settings().bytes_per_s_to_device : settings().bytes_per_s_to_host;
  return speed > 0 ? bytes / speed : 0;
}

bool is_pageable(const Location& location) { return location.place == Place::pageable; }
bool is_lost(const Location& location) { return location.place == Place::unmapped; }
bool is_same(const Location& a, const Location& b) { return a.place == b.place && a.booking == b.booking; }

// A copy in a stream. Both ends have to be the same allocations as when the copy was submitted.
struct Copy {
  Range to, from;
  Location to_location, from_location;
  Stream* stream;

  void run() const {
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

// Copies from registered or device memory in the stream, while the host goes on.
void copy_in_stream(const Copy& copy) {
  const uint64_t reading = copy.from_location.place == Place::registered ? begin_flight(copy.from) : 0;
  const uint64_t writing = copy.to_location.place == Place::registered ? begin_flight(copy.to) : 0;
  submit_by_schedule(*copy.stream, [=] {
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
    copy.stream->wait(submit_by_schedule(*copy.stream, [=] { copy.run(); }));
    return;
  }
  if (copy.from.bytes > taken_at_once) {
    host_waits("a copy from pageable memory");
    copy.stream->wait(copy.stream->last_position());
  }
  const char* bytes = reinterpret_cast<const char*>(copy.from.begin);
  auto buffer = std::make_shared<std::vector<char>>(bytes, bytes + copy.from.bytes);
  submit_by_schedule(*copy.stream, [=] {
    Copy staged = copy;
    staged.from = range_of(buffer->data(), buffer->size());
    staged.from_location = locate(staged.from);
    staged.run();
  });
}

bool can_be_device(const Location& location) { return location.place != Place::pageable; }
bool can_be_host(const Location& location) { return location.place != Place::device; }

// Registered memory is mapped into the device's address space as well, so either name is right.
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
  Copy copy{range_of(to, bytes), range_of(from, bytes), {}, {}, stream};
  copy.to_location = locate(copy.to);
  copy.from_location = locate(copy.from);
  if (is_lost(copy.to_location) || is_lost(copy.from_location) || !kind_fits(kind, copy.to_location, copy.from_location))
    return fault(cudaErrorInvalidValue, std::string(call) + ": from " + describe(copy.from_location) + " to " +
                                            describe(copy.to_location));
  if (is_pageable(copy.to_location) || is_pageable(copy.from_location)) copy_pageable(copy);
  else copy_in_stream(copy);
  return cudaSuccess;
}

}  // namespace

}  // namespace fake_cuda

using namespace fake_cuda;

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
  const Range range = range_of(pointer, bytes);
  if (bytes == 0) return cudaSuccess;
  if (locate(range).place != Place::device) return fault(cudaErrorInvalidValue, "cudaMemset of memory that is not a device's");
  submit_by_schedule(*stream, [=] {
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
  const Range range = range_of(pointer, bytes);
  submit(*stream, [=] {
    auto hold = hold_memory();
    if (locate(range).place == Place::device) poison(pointer, bytes);
  });
}
