// Devices and their properties.
#include "runtime.hpp"

#include <cstdio>
#include <cstdlib>

using namespace fake_cuda;

EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
  if (!may_use_cuda()) return cudaErrorInitializationError;
  *count = settings().num_devices();
  return cudaSuccess;
}

// The properties of an A100, except those that have settings.
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!may_use_cuda()) return cudaErrorInitializationError;
  if (device < 0 || device >= settings().num_devices()) return fault(cudaErrorInvalidDevice, "cudaGetDeviceProperties: no such device");
  *properties = {};
  const char* name = std::getenv("FAKE_CUDA_NAME");  // the name of a real card, for code that looks the card up
  if (name != nullptr)
    std::snprintf(properties->name, sizeof properties->name, "%s", name);
  else
    std::snprintf(properties->name, sizeof properties->name, "Fake GPU %d", device);
  properties->uuid.bytes[15] = static_cast<char>(device + 1);
  properties->totalGlobalMem = static_cast<size_t>(settings().memory_bytes());
  properties->major = settings().major();
  properties->minor = settings().minor();
  properties->multiProcessorCount = 108;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 163 << 10;
  properties->sharedMemPerMultiprocessor = 164 << 10;
  properties->l2CacheSize = 40 << 20;
  properties->unifiedAddressing = 1;
  properties->canUseHostPointerForRegisteredMem = 1;
  properties->asyncEngineCount = 2;
  properties->pciBusID = device;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = settings().major(); break;
    case cudaDevAttrComputeCapabilityMinor: *value = settings().minor(); break;
    case cudaDevAttrMultiProcessorCount: *value = 108; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 163 << 10; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  std::snprintf(text, static_cast<size_t>(bytes), "0000:%02x:00.0", device);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = settings().peer_access != 0;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

EXPORTED cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
