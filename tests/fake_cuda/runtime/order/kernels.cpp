// Kernels, and their launch on streams.
#include "runtime.hpp"

#include <map>

#include "launch.hpp"

using namespace fake_cuda;

namespace {

// The names of the kernels that libraries contain as GPU code, which the fake device cannot run.
std::map<const void*, std::string>& kernel_names() {
  static auto* names = new std::map<const void*, std::string>;
  return *names;
}

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

// torch.cuda._sleep(cycles) is the one GPU kernel that needs no GPU.
constexpr double CYCLES_PER_S = 2e9;

cudaError_t launch_gpu_code(const void* function, void** arguments, cudaStream_t handle) {
  RETURN_IF_UNUSABLE(current_device());
  const std::string name = kernel_names().count(function) ? kernel_names()[function] : "of unknown name";
  Stream* stream = find_stream(handle);
  if (!stream) return fault(cudaErrorInvalidResourceHandle, "launch of " + name + ": no such stream");
  if (name.find("spin_kernel") == std::string::npos)
    return fault(cudaErrorNotSupported, "launch of GPU code, which nothing here can run: " + name);
  const double seconds = static_cast<double>(*static_cast<int64_t*>(arguments[0])) / CYCLES_PER_S;
  submit(*stream, [seconds] { wait_seconds(seconds); });
  return cudaSuccess;
}

}  // namespace

cudaError_t fake_cuda_launch(cudaStream_t handle, const char* name, const FakeCudaRange* memory, size_t num_ranges,
                             void (*run)(void*), void (*dispose)(void*), void* data) {
  auto job = std::shared_ptr<void>(data, dispose);
  RETURN_IF_UNUSABLE(current_device());
  Stream* stream = find_stream(handle);
  const std::string kernel = name;
  if (!stream) return fault(cudaErrorInvalidResourceHandle, kernel + ": no such stream");
  if (stream->device != current_device())
    return fault(cudaErrorInvalidResourceHandle, kernel + ": the stream belongs to another device than the current one");
  std::vector<FakeCudaRange> ranges(memory, memory + num_ranges);
  submit_by_schedule(*stream, [=] {
    wait_seconds(settings().kernel_s);
    auto hold = hold_memory();
    for (const auto& range : ranges) {
      const Location location = locate(range_of(range.pointer, range.bytes));
      const bool own = location.place == Place::device && location.device == stream->device;
      if (range.bytes == 0 || own || location.place == Place::registered) continue;
      break_device(stream->device, cudaErrorIllegalAddress,
                   kernel + " on device " + std::to_string(stream->device) + " came to " + describe(location));
      return;
    }
    if (device_error(stream->device) == cudaSuccess) run(job.get());
  });
  return cudaSuccess;
}

void fake_cuda_kernel_failed(const char* text) { break_device(current_device(), cudaErrorAssert, text); }

void fake_cuda_wait(cudaStream_t handle) {
  Stream* stream = find_stream(handle);
  stream->wait(stream->last_position());
}

// ---- Functions that the compiler of GPU code calls behind the `kernel<<<grid, block>>>(...)` notation.

EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* module;
  return &module;
}

EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED char __cudaInitModule(void**) { return 1; }
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

EXPORTED void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernel_names()[function] = name;
}

EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, cudaStream_t* stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *stream = last.stream;
  return cudaSuccess;
}

EXPORTED cudaError_t __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return cudaSuccess;
}

EXPORTED cudaError_t __cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch_gpu_code(kernel, arguments, stream);
}

EXPORTED cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch_gpu_code(function, arguments, stream);
}

EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function, void** arguments) {
  return launch_gpu_code(function, arguments, configuration->stream);
}

EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = static_cast<int>(settings().capability);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
