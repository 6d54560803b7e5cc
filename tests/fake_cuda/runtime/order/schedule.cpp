// The schedule: seeded delays of copies and kernels.
//
// A delay follows from the seed, the stream and the number of that stream's earlier delays, and is drawn when the
// work is submitted. So a program that submits the same work in the same order gets the same delays, however long
// anything takes. Streams are numbered by their first delays, since torch hands out another stream each time.
#include "runtime.hpp"

#include <cstdio>
#include <map>

namespace fake_cuda {
namespace {

std::mutex schedule_mutex;

std::map<const Stream*, size_t>& numbers() {
  static auto* all = new std::map<const Stream*, size_t>;
  return *all;
}

std::vector<std::vector<double>>& delays() {  // in seconds, by the streams' numbers
  static auto* all = new std::vector<std::vector<double>>;
  return *all;
}

double delay_s(uint64_t seed, uint64_t stream, uint64_t position) {
  uint64_t x = seed * 0x9E3779B97F4A7C15u + stream * 0xBF58476D1CE4E5B9u + position;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  const double share = static_cast<double>(x >> 11) / (1ull << 53);
  return share < 0.5 ? 0 : (share - 0.5) * 2 * settings().max_delay_s;  // half of all jobs run at once
}

double next_delay_s(const Stream& stream) {
  if (settings().seed < 0) return 0;
  std::lock_guard<std::mutex> lock(schedule_mutex);
  const size_t number = numbers().emplace(&stream, numbers().size()).first->second;
  if (number == delays().size()) delays().emplace_back();
  auto& of_stream = delays()[number];
  of_stream.push_back(delay_s(static_cast<uint64_t>(settings().seed), number, of_stream.size()));
  return of_stream.back();
}

}  // namespace

uint64_t submit_by_schedule(Stream& stream, Job job) {
  const double seconds = next_delay_s(stream);
  return submit(stream, [seconds, job = std::move(job)] {
    wait_seconds(seconds);
    job();
  });
}

}  // namespace fake_cuda

using namespace fake_cuda;

EXPORTED void fake_cuda_restart_schedule() {
  std::lock_guard<std::mutex> lock(schedule_mutex);
  numbers().clear();
  delays().clear();
}

// The delays since the restart, one line for each stream. The text stays valid until the next call.
EXPORTED const char* fake_cuda_delays() {
  static auto* text = new std::string;
  std::lock_guard<std::mutex> lock(schedule_mutex);
  text->clear();
  for (const auto& of_stream : delays()) {
    for (const double seconds : of_stream) {
      char number[32];
      std::snprintf(number, sizeof number, "%.9f ", seconds);
      *text += number;
    }
    *text += "\n";
  }
  return text->c_str();
}
