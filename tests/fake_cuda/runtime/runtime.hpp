// A CUDA runtime without a GPU, for tests: the declarations that its files share.
//
// Device memory is host memory in a book of its own, a stream is a thread with a queue, a kernel is a function on the
// CPU. The runtime keeps CUDA's contract about order and memory: which work may run ahead of other work, which calls
// wait, and which memory may be touched when. A breach is an error at the call and a line in the list of faults.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace fake_cuda {

constexpr int MAX_DEVICES = 4;

// ---- settings.cpp: the settings of the devices, from the environment, and changed by tests at run time.

double environment(const char* name, double otherwise);

// Every setting is a number, so that one function can set any of them.
struct Settings {
  std::atomic<double> devices{environment("FAKE_CUDA_DEVICES", 2)};
  std::atomic<double> capability{environment("FAKE_CUDA_CAPABILITY", 80)};  // 80 is 8.0
  std::atomic<double> memory_gib{environment("FAKE_CUDA_MEMORY_GIB", 4)};   // of each device
  std::atomic<double> peer_access{environment("FAKE_CUDA_PEER_ACCESS", 0)};
  std::atomic<double> bytes_per_s_to_device{environment("FAKE_CUDA_BYTES_PER_S_TO_DEVICE", 0)};  // 0: no limit
  std::atomic<double> bytes_per_s_to_host{environment("FAKE_CUDA_BYTES_PER_S_TO_HOST", 0)};
  std::atomic<double> kernel_s{environment("FAKE_CUDA_KERNEL_S", 0)};  // each kernel takes so much longer
  std::atomic<double> seed{environment("FAKE_CUDA_SEED", -1)};         // of the schedule; negative: no delays
  std::atomic<double> max_delay_s{environment("FAKE_CUDA_MAX_DELAY_S", 0.002)};  // of the schedule
  std::atomic<double> poison{environment("FAKE_CUDA_POISON", 1)};  // 0xFF, NaN, in memory that holds nothing

  int num_devices() const { return static_cast<int>(devices); }
  int major() const { return static_cast<int>(capability) / 10; }
  int minor() const { return static_cast<int>(capability) % 10; }
  int64_t memory_bytes() const { return static_cast<int64_t>(memory_gib * (1 << 30)); }
};

Settings& settings();
std::atomic<double>* find(const std::string& name);  // null if there is no such setting

// True once for the call that a test has chosen to fail: the k-th "malloc", "host_register", "copy" or "event".
bool planned_failure(const char* kind);

// ---- faults.cpp: the list of faults, and the error codes that CUDA keeps.

// Adds a line to the list of faults.
void report(const std::string& fault);

// Both keep `code` as the last error of this host thread until cudaGetLastError takes it, and return `code`.
cudaError_t result(cudaError_t code);
cudaError_t fault(cudaError_t code, const std::string& what);

// An error on the device shows later than the call that caused it, and from then on in every call.
void break_device(int device, cudaError_t code, const std::string& what);
cudaError_t device_error(int device);

// Records that a call makes the host wait, which is a fault inside a region without waiting.
void host_waits(const char* call);

// A child that a process forks before its first use of CUDA can use CUDA. A later child gets an error at every call.
bool is_forked_child();
bool may_use_cuda();  // asked by every call; the first one is the use

#define RETURN_IF_UNUSABLE(device)                                            \
  do {                                                                        \
    if (!may_use_cuda()) return cudaErrorInitializationError;                 \
    if (cudaError_t error = device_error(device)) return result(error);       \
  } while (0)

// ---- memory/: the owners of all bytes.

struct Range {
  uintptr_t begin = 0;
  size_t bytes = 0;
  uintptr_t end() const { return begin + bytes; }
  bool overlaps(const Range& other) const { return begin < other.end() && other.begin < end(); }
};

inline Range range_of(const void* pointer, size_t bytes) { return {reinterpret_cast<uintptr_t>(pointer), bytes}; }

enum class Place { device, registered, pageable, unmapped };

struct Location {
  Place place;
  int device;        // that owns or registered it; -1 for pageable memory
  uint64_t booking;  // differs when memory at the same address was freed and allocated again
};

// Finds the place of a whole range: memory that is only partly allocated or registered is `unmapped` or `pageable`.
Location locate(const Range& range);
std::string describe(const Location& location);

// Taken while a stream touches memory, so that nothing is unmapped meanwhile.
std::shared_lock<std::shared_mutex> hold_memory();

// Host memory that copies on their way will read or write.
uint64_t begin_flight(const Range& range);
void end_flight(uint64_t flight);

// ---- order/: the order of all work.

using Job = std::function<void()>;

// A stream does its jobs one after another, in the order in which they were submitted. Nothing orders two streams
// except an event, the legacy default stream, or a host that waits.
class Stream {
 public:
  Stream(int device, uint64_t number, unsigned flags, int priority);
  uint64_t push(Job job);  // returns the job's position
  void wait(uint64_t position);
  bool reached(uint64_t position);
  uint64_t last_position();

  const int device;
  const uint64_t number;
  const bool blocking;  // waits for the legacy default stream, and the other way round
  const int priority;

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  uint64_t submitted_ = 0, finished_ = 0;
  bool started_ = false;
};

int current_device();

// The stream behind a handle; null, 1 and 2 are the current device's default stream. Null if there is no such stream.
Stream* find_stream(cudaStream_t handle);
Stream* default_stream_of(int device);

// Puts a job behind all that the stream has to wait for.
uint64_t submit(Stream& stream, Job job);

// Submits a copy or a kernel, which takes longer by the schedule's next delay.
uint64_t submit_by_schedule(Stream& stream, Job job);

void wait_for_device(int device);
void wait_seconds(double seconds);

}  // namespace fake_cuda
