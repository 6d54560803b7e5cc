// Errors: those that CUDA returns, those that it keeps, and the list of faults that a test reads at its end.
#include "runtime.hpp"

#include <unistd.h>

#include <map>
#include <set>

namespace fake_cuda {
namespace {

std::mutex faults_mutex;
std::atomic<pid_t> owner{0};  // the process that used CUDA first
std::atomic<int> broken[MAX_DEVICES];
std::atomic<int> regions_without_waiting{0};

std::vector<std::string>& faults() {
  static auto* list = new std::vector<std::string>;
  return *list;
}

// The last error of a thread, in a set that outlives it, so that an unread error is found.
struct LastError;
std::set<LastError*>& last_errors() {
  static auto* all = new std::set<LastError*>;
  return *all;
}

struct LastError {
  std::atomic<int> code{cudaSuccess};
  LastError() {
    std::lock_guard<std::mutex> lock(faults_mutex);
    last_errors().insert(this);
  }
  ~LastError() {
    std::lock_guard<std::mutex> lock(faults_mutex);
    last_errors().erase(this);
    if (code != cudaSuccess && !is_forked_child()) faults().push_back("a thread ended with an error that nobody has read");
  }
};

LastError& last_error() {
  static thread_local LastError error;
  return error;
}

}  // namespace

bool is_forked_child() { return owner != 0 && owner != getpid(); }

bool may_use_cuda() {
  pid_t nobody = 0;
  owner.compare_exchange_strong(nobody, getpid());
  return !is_forked_child();
}

void report(const std::string& fault) {
  std::lock_guard<std::mutex> lock(faults_mutex);
  if (faults().size() < 200) faults().push_back(fault);
}

cudaError_t result(cudaError_t code) {
  if (code != cudaSuccess) last_error().code = code;
  return code;
}

cudaError_t fault(cudaError_t code, const std::string& what) {
  report(what);
  return result(code);
}

void break_device(int device, cudaError_t code, const std::string& what) {
  report(what);
  broken[device] = code;
}

cudaError_t device_error(int device) { return static_cast<cudaError_t>(broken[device].load()); }

void host_waits(const char* call) {
  if (regions_without_waiting > 0) report(std::string(call) + " keeps the host waiting where nothing may");
}

}  // namespace fake_cuda

using namespace fake_cuda;

EXPORTED cudaError_t cudaGetLastError() {
  if (!may_use_cuda()) return cudaErrorInitializationError;
  if (cudaError_t error = device_error(current_device())) return error;
  return static_cast<cudaError_t>(last_error().code.exchange(cudaSuccess));
}

EXPORTED cudaError_t cudaPeekAtLastError() {
  if (cudaError_t error = device_error(current_device())) return error;
  return static_cast<cudaError_t>(last_error().code.load());
}

EXPORTED const char* cudaGetErrorName(cudaError_t code) {
  switch (code) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInitializationError: return "cudaErrorInitializationError";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorAssert: return "cudaErrorAssert";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorUnknown: return "cudaErrorUnknown";
    default: return "an error of the fake CUDA runtime";
  }
}

EXPORTED const char* cudaGetErrorString(cudaError_t code) {
  if (code == cudaErrorMemoryAllocation) return "out of memory";  // torch's users look for these words
  if (code == cudaErrorAssert) return "device-side assert triggered";
  return cudaGetErrorName(code);
}

EXPORTED void fake_cuda_report(const char* text) { report(text); }

// All faults so far, one a line, with the errors that threads have not read. The text stays valid until the next call.
EXPORTED const char* fake_cuda_faults() {
  static auto* text = new std::string;
  std::lock_guard<std::mutex> lock(faults_mutex);
  text->clear();
  for (const auto& line : faults()) *text += line + "\n";
  for (const LastError* error : last_errors())
    if (error->code != cudaSuccess)
      *text += std::string("an error stayed behind: ") + cudaGetErrorName(static_cast<cudaError_t>(error->code.load())) + "\n";
  return text->c_str();
}

// Forgets faults and errors; broken devices work again.
EXPORTED void fake_cuda_forget_faults() {
  std::lock_guard<std::mutex> lock(faults_mutex);
  faults().clear();
  for (LastError* error : last_errors()) error->code = cudaSuccess;
  for (auto& code : broken) code = cudaSuccess;
}

EXPORTED int fake_cuda_is_broken(int device) { return device_error(device) != cudaSuccess; }

// From `enter` until as many `leave`s, a call that keeps the host waiting is a fault.
EXPORTED void fake_cuda_enter_region_without_waiting() { regions_without_waiting++; }
EXPORTED void fake_cuda_leave_region_without_waiting() { regions_without_waiting--; }
