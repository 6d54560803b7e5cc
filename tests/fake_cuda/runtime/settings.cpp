// The settings of the devices: environment variables FAKE_CUDA_<NAME>, which can be changed at run time.
#include "runtime.hpp"

#include <cmath>
#include <cstdlib>
#include <map>

namespace fake_cuda {

double environment(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atof(text) : otherwise;
}

namespace {

struct PlannedFailure {
  int64_t calls_left;
  int64_t times;
};

std::mutex failures_mutex;

std::map<std::string, PlannedFailure>& failures() {
  static auto* map = new std::map<std::string, PlannedFailure>;
  return *map;
}

// Counts of calls, by the kinds of calls that tests can make fail.
std::map<std::string, int64_t>& calls() {
  static auto* map = new std::map<std::string, int64_t>;
  return *map;
}

}  // namespace

Settings& settings() {
  static auto* all = new Settings;
  return *all;
}

std::atomic<double>* find(const std::string& name) {
  Settings& s = settings();
  const std::map<std::string, std::atomic<double>*> by_name = {
      {"devices", &s.devices},
      {"capability", &s.capability},
      {"memory_gib", &s.memory_gib},
      {"peer_access", &s.peer_access},
      {"bytes_per_s_to_device", &s.bytes_per_s_to_device},
      {"bytes_per_s_to_host", &s.bytes_per_s_to_host},
      {"kernel_s", &s.kernel_s},
      {"seed", &s.seed},
      {"max_delay_s", &s.max_delay_s},
      {"poison", &s.poison},
  };
  const auto found = by_name.find(name);
  return found == by_name.end() ? nullptr : found->second;
}

bool planned_failure(const char* kind) {
  std::lock_guard<std::mutex> lock(failures_mutex);
  ++calls()[kind];
  auto found = failures().find(kind);
  if (found == failures().end() || --found->second.calls_left > 0) return false;
  if (--found->second.times == 0) failures().erase(found);
  return true;
}

}  // namespace fake_cuda

using namespace fake_cuda;

// Returns a setting by its name, NaN if there is no such setting.
EXPORTED double fake_cuda_get(const char* name) {
  const std::atomic<double>* setting = find(name);
  return setting ? setting->load() : NAN;
}

EXPORTED void fake_cuda_set(const char* name, double value) {
  if (std::atomic<double>* setting = find(name)) *setting = value;
}

EXPORTED int64_t fake_cuda_num_calls(const char* kind) {
  std::lock_guard<std::mutex> lock(failures_mutex);
  return calls()[kind];
}

// Makes the k-th call of a kind from now on fail, and `times` - 1 calls after it.
EXPORTED void fake_cuda_fail(const char* kind, int64_t k, int64_t times) {
  std::lock_guard<std::mutex> lock(failures_mutex);
  failures()[kind] = {k, times};
}

EXPORTED void fake_cuda_fail_no_more() {
  std::lock_guard<std::mutex> lock(failures_mutex);
  failures().clear();
}
