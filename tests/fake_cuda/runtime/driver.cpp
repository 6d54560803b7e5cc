// libcuda.so.1: the few calls of the driver that torch makes below the runtime, and the watch over munmap.
#include <cstddef>

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int fake_cuda_context_exists(int device);
EXPORTED int fake_cuda_unmap(void* pointer, size_t bytes);
EXPORTED void fake_cuda_report(const char* text);

namespace {
constexpr int SUCCESS = 0, NOT_SUPPORTED = 801;
int unsupported(const char* text) {
  fake_cuda_report(text);
  return NOT_SUPPORTED;
}
}  // namespace

// Every munmap of this process comes here, except those inside the C library.
EXPORTED int munmap(void* pointer, size_t bytes) { return fake_cuda_unmap(pointer, bytes); }

EXPORTED int cuInit(unsigned) { return SUCCESS; }

EXPORTED int cuDriverGetVersion(int* version) {
  *version = 13000;
  return SUCCESS;
}

EXPORTED int cuCtxGetCurrent(void** context) {
  static int the_context;
  *context = &the_context;
  return SUCCESS;
}

// torch asks which devices are in use before it creates streams or pins memory for them.
EXPORTED int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = fake_cuda_context_exists(device);
  return SUCCESS;
}

#define UNSUPPORTED(name) \
  EXPORTED int name() { return unsupported(#name " is not part of the fake CUDA driver"); }

UNSUPPORTED(cuCtxSetCurrent)
UNSUPPORTED(cuDeviceGet)
UNSUPPORTED(cuDeviceGetAttribute)
UNSUPPORTED(cuDevicePrimaryCtxRetain)
UNSUPPORTED(cuFuncGetAttribute)
UNSUPPORTED(cuFuncSetAttribute)
UNSUPPORTED(cuFuncSetCacheConfig)
UNSUPPORTED(cuGetErrorString)
UNSUPPORTED(cuLaunchCooperativeKernel)
UNSUPPORTED(cuLaunchKernel)
UNSUPPORTED(cuLinkAddData_v2)
UNSUPPORTED(cuLinkComplete)
UNSUPPORTED(cuLinkCreate_v2)
UNSUPPORTED(cuModuleGetFunction)
UNSUPPORTED(cuModuleLoad)
UNSUPPORTED(cuModuleLoadData)
UNSUPPORTED(cuModuleLoadDataEx)
UNSUPPORTED(cuModuleUnload)
UNSUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNSUPPORTED(cuPointerGetAttribute)
UNSUPPORTED(cuTensorMapEncodeTiled)
