// Streams: each does its work in order, on a thread of its own.
#include "runtime.hpp"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <thread>

namespace fake_cuda {
namespace {

// Guards the set below. Its streams are never deleted: a thread may still be about to look at one.
std::mutex streams_mutex;
uint64_t num_created = MAX_DEVICES;

std::set<Stream*>& live_streams() {
  static auto* all = new std::set<Stream*>;
  return *all;
}

std::mutex submit_mutex;
thread_local int device_of_thread = 0;

Stream& default_stream(int device) {
  static auto* all = new std::map<int, Stream*>;
  std::lock_guard<std::mutex> lock(streams_mutex);
  Stream*& stream = (*all)[device];
  if (!stream) stream = new Stream(device, device, cudaStreamDefault, 0);
  live_streams().insert(stream);
  return *stream;
}

bool is_default(const Stream& stream) { return stream.number < MAX_DEVICES; }

std::vector<Stream*> streams_of(int device) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  std::vector<Stream*> found;
  for (Stream* stream : live_streams())
    if (stream->device == device) found.push_back(stream);
  return found;
}

void drain_at_exit() {
  if (is_forked_child()) return;
  for (int device = 0; device < settings().num_devices(); device++) wait_for_device(device);
}

}  // namespace

Stream::Stream(int device, uint64_t number, unsigned flags, int priority)
    : device(device), number(number), blocking(!(flags & cudaStreamNonBlocking)), priority(priority) {}

uint64_t Stream::push(Job job) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) {
    started_ = true;
    std::thread([this] { run(); }).detach();
  }
  jobs_.push_back(std::move(job));
  changed_.notify_all();
  return ++submitted_;
}

void Stream::run() {
  device_of_thread = device;
  for (;;) {
    Job job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !jobs_.empty(); });
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    job();
    job = nullptr;  // drops the objects of the job before its end becomes visible
    std::lock_guard<std::mutex> lock(mutex_);
    finished_++;
    changed_.notify_all();
  }
}

void Stream::wait(uint64_t position) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return finished_ >= position; });
}

bool Stream::reached(uint64_t position) {
  std::lock_guard<std::mutex> lock(mutex_);
  return finished_ >= position;
}

uint64_t Stream::last_position() {
  std::lock_guard<std::mutex> lock(mutex_);
  return submitted_;
}

Stream* default_stream_of(int device) { return &default_stream(device); }

int current_device() { return device_of_thread; }

Stream* find_stream(cudaStream_t handle) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return &default_stream(current_device());
  auto* stream = reinterpret_cast<Stream*>(handle);
  std::lock_guard<std::mutex> lock(streams_mutex);
  return live_streams().count(stream) ? stream : nullptr;
}

// The legacy default stream and the blocking streams of its device take turns: a job of one side waits for all earlier
// jobs of the other. torch's own streams are non-blocking and take no part.
uint64_t submit(Stream& stream, Job job) {
  static const int drain = std::atexit(drain_at_exit);
  (void)drain;
  std::lock_guard<std::mutex> lock(submit_mutex);
  if (is_default(stream)) {
    for (Stream* other : streams_of(stream.device)) {
      if (!other->blocking || other == &stream) continue;
      uint64_t position = other->last_position();
      if (!other->reached(position)) stream.push([other, position] { other->wait(position); });
    }
  } else if (stream.blocking) {
    Stream* legacy = &default_stream(stream.device);
    uint64_t position = legacy->last_position();
    if (!legacy->reached(position)) stream.push([legacy, position] { legacy->wait(position); });
  }
  return stream.push(std::move(job));
}

void wait_for_device(int device) {
  for (Stream* stream : streams_of(device)) stream->wait(stream->last_position());
}

void wait_seconds(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

}  // namespace fake_cuda

using namespace fake_cuda;

EXPORTED cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}

EXPORTED cudaError_t cudaSetDevice(int device) {
  if (!may_use_cuda()) return cudaErrorInitializationError;
  if (device < 0 || device >= settings().num_devices()) return fault(cudaErrorInvalidDevice, "cudaSetDevice: no such device");
  device_of_thread = device;
  default_stream(device);
  return cudaSuccess;
}

// A device has a context once it was chosen or used.
EXPORTED int fake_cuda_context_exists(int device) { return !streams_of(device).empty(); }

EXPORTED cudaError_t cudaDeviceSynchronize() {
  RETURN_IF_UNUSABLE(current_device());
  host_waits("cudaDeviceSynchronize");
  wait_for_device(current_device());
  return result(device_error(current_device()));
}

EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  RETURN_IF_UNUSABLE(current_device());
  std::lock_guard<std::mutex> lock(streams_mutex);
  auto* stream = new Stream(current_device(), num_created++, flags, priority);
  live_streams().insert(stream);
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

// Jobs in the queue still run.
EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  if (!may_use_cuda()) return cudaErrorInitializationError;
  Stream* stream = find_stream(handle);
  if (!stream || is_default(*stream)) return fault(cudaErrorInvalidResourceHandle, "cudaStreamDestroy: no such stream");
  std::lock_guard<std::mutex> lock(streams_mutex);
  live_streams().erase(stream);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  Stream* stream = find_stream(handle);
  if (!stream) return fault(cudaErrorInvalidResourceHandle, "cudaStreamGetPriority: no such stream");
  *priority = stream->priority;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamQuery(cudaStream_t handle) {
  RETURN_IF_UNUSABLE(current_device());
  Stream* stream = find_stream(handle);
  if (!stream) return fault(cudaErrorInvalidResourceHandle, "cudaStreamQuery: no such stream");
  return result(stream->reached(stream->last_position()) ? cudaSuccess : cudaErrorNotReady);
}

EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  RETURN_IF_UNUSABLE(current_device());
  Stream* stream = find_stream(handle);
  if (!stream) return fault(cudaErrorInvalidResourceHandle, "cudaStreamSynchronize: no such stream");
  host_waits("cudaStreamSynchronize");
  stream->wait(stream->last_position());
  return result(device_error(stream->device));
}

EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  RETURN_IF_UNUSABLE(current_device());
  Stream* stream = find_stream(handle);
  if (!stream) return fault(cudaErrorInvalidResourceHandle, "cudaLaunchHostFunc: no such stream");
  submit(*stream, [=] { function(data); });
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
  RETURN_IF_UNUSABLE(current_device());
  Stream* stream = find_stream(handle);
  if (!stream) return fault(cudaErrorInvalidResourceHandle, "cudaStreamAddCallback: no such stream");
  submit(*stream, [=] { function(handle, device_error(stream->device), data); });
  return cudaSuccess;
}

// The number of streams without the default streams, which are not made by a call.
EXPORTED int64_t fake_cuda_num_streams() {
  std::lock_guard<std::mutex> lock(streams_mutex);
  return std::count_if(live_streams().begin(), live_streams().end(), [](Stream* s) { return !is_default(*s); });
}
