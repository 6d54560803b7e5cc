// Events: places in the queues of streams, for other streams and the host to wait for.
#include "runtime.hpp"

#include <algorithm>
#include <set>

namespace fake_cuda {
namespace {

using Clock = std::chrono::steady_clock;

// A place in a stream's queue, and the time at which the stream reached the place.
struct Record {
  Stream* stream;
  uint64_t position = 0;
  std::atomic<Clock::rep> time{0};
};

struct Event {
  int device;
  bool has_time;
  std::shared_ptr<Record> record;  // of the last cudaEventRecord; none: nothing to wait for
};

// Guards the set below.
std::mutex events_mutex;

std::set<Event*>& live_events() {
  static auto* all = new std::set<Event*>;
  return *all;
}

Event* find_event(cudaEvent_t handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  std::lock_guard<std::mutex> lock(events_mutex);
  return live_events().count(event) ? event : nullptr;
}

std::shared_ptr<Record> record_of(const Event& event) {
  std::lock_guard<std::mutex> lock(events_mutex);
  return event.record;
}

// Finds the event and the stream of two handles, or returns the error of a call with an unknown handle.
cudaError_t look_up(const char* call, cudaEvent_t event_handle, cudaStream_t stream_handle, Event** event, Stream** stream) {
  *event = find_event(event_handle);
  *stream = find_stream(stream_handle);
  if (!*event) return fault(cudaErrorInvalidResourceHandle, std::string(call) + ": no such event");
  if (!*stream) return fault(cudaErrorInvalidResourceHandle, std::string(call) + ": no such stream");
  return cudaSuccess;
}

}  // namespace

}  // namespace fake_cuda

using namespace fake_cuda;

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  RETURN_IF_UNUSABLE(current_device());
  if (planned_failure("event")) return result(cudaErrorUnknown);
  std::lock_guard<std::mutex> lock(events_mutex);
  auto* event = new Event{current_device(), !(flags & cudaEventDisableTiming), nullptr};
  live_events().insert(event);
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }

// Streams and hosts that wait for the event go on waiting: the record outlives the event.
EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  if (!may_use_cuda()) return cudaErrorInitializationError;
  Event* event = find_event(handle);
  if (!event) return fault(cudaErrorInvalidResourceHandle, "cudaEventDestroy: no such event");
  std::lock_guard<std::mutex> lock(events_mutex);
  live_events().erase(event);
  delete event;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  RETURN_IF_UNUSABLE(current_device());
  Event* event;
  Stream* stream;
  if (cudaError_t error = look_up("cudaEventRecord", handle, stream_handle, &event, &stream)) return error;
  if (event->device != stream->device)
    return fault(cudaErrorInvalidResourceHandle, "cudaEventRecord: the event belongs to another device than the stream");
  auto record = std::make_shared<Record>();
  record->stream = stream;
  // The record is published after its position is known.
  record->position = submit(*stream, [record] { record->time = Clock::now().time_since_epoch().count(); });
  std::lock_guard<std::mutex> lock(events_mutex);
  event->record = record;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

// The stream, not the host, waits, for the event's present record; later records do not count.
EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned) {
  RETURN_IF_UNUSABLE(current_device());
  Event* event;
  Stream* stream;
  if (cudaError_t error = look_up("cudaStreamWaitEvent", handle, stream_handle, &event, &stream)) return error;
  if (auto record = record_of(*event)) submit(*stream, [record] { record->stream->wait(record->position); });
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventQuery(cudaEvent_t handle) {
  RETURN_IF_UNUSABLE(current_device());
  Event* event = find_event(handle);
  if (!event) return fault(cudaErrorInvalidResourceHandle, "cudaEventQuery: no such event");
  auto record = record_of(*event);
  return result(!record || record->stream->reached(record->position) ? cudaSuccess : cudaErrorNotReady);
}

EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  RETURN_IF_UNUSABLE(current_device());
  Event* event = find_event(handle);
  if (!event) return fault(cudaErrorInvalidResourceHandle, "cudaEventSynchronize: no such event");
  host_waits("cudaEventSynchronize");
  if (auto record = record_of(*event)) record->stream->wait(record->position);
  return result(device_error(event->device));
}

EXPORTED cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first_handle, cudaEvent_t last_handle) {
  RETURN_IF_UNUSABLE(current_device());
  Event *first = find_event(first_handle), *last = find_event(last_handle);
  if (!first || !last) return fault(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime: no such event");
  if (!first->has_time || !last->has_time)
    return fault(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime: an event was made without timing");
  if (first->device != last->device)
    return fault(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime: events of two devices");
  auto from = record_of(*first), to = record_of(*last);
  if (!from || !to) return fault(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime: an event was never recorded");
  if (!from->stream->reached(from->position) || !to->stream->reached(to->position)) return result(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(Clock::duration(to->time - from->time)).count();
  return cudaSuccess;
}

EXPORTED int64_t fake_cuda_num_timed_events() {
  std::lock_guard<std::mutex> lock(events_mutex);
  return std::count_if(live_events().begin(), live_events().end(), [](Event* e) { return e->has_time; });
}
