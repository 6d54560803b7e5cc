// Functions that torch and its libraries link but no test needs. A call is an error, and a line in the list of faults.
#include <cuda_runtime_api.h>

#include <string>

namespace fake_cuda {
cudaError_t fault(cudaError_t code, const std::string& what);
}

// These have prototypes in CUDA's headers; only their names matter to the linker, hence the aliases.
#define UNSUPPORTED(name)                                                                                  \
  extern "C" __attribute__((visibility("default"))) cudaError_t fake_cuda_unsupported_##name() asm(#name); \
  cudaError_t fake_cuda_unsupported_##name() {                                                             \
    return fake_cuda::fault(cudaErrorNotSupported, #name " is not part of the fake CUDA runtime");         \
  }

UNSUPPORTED(cudaDeviceGetDefaultMemPool)
UNSUPPORTED(cudaFreeAsync)
UNSUPPORTED(cudaGetDriverEntryPointByVersion)
UNSUPPORTED(cudaGetSymbolAddress)
UNSUPPORTED(cudaGraphDebugDotPrint)
UNSUPPORTED(cudaGraphDestroy)
UNSUPPORTED(cudaGraphExecDestroy)
UNSUPPORTED(cudaGraphGetNodes)
UNSUPPORTED(cudaGraphInstantiateWithFlags)
UNSUPPORTED(cudaGraphLaunch)
UNSUPPORTED(cudaGraphNodeGetDependencies)
UNSUPPORTED(cudaIpcCloseMemHandle)
UNSUPPORTED(cudaIpcGetEventHandle)
UNSUPPORTED(cudaIpcGetMemHandle)
UNSUPPORTED(cudaIpcOpenEventHandle)
UNSUPPORTED(cudaIpcOpenMemHandle)
UNSUPPORTED(cudaLaunchCooperativeKernel)
UNSUPPORTED(cudaMallocAsync)
UNSUPPORTED(cudaMemPoolGetAttribute)
UNSUPPORTED(cudaMemPoolSetAccess)
UNSUPPORTED(cudaMemPoolSetAttribute)
UNSUPPORTED(cudaMemPoolTrimTo)
UNSUPPORTED(cudaMemcpy2DAsync)
UNSUPPORTED(cudaMemcpyToSymbol)
UNSUPPORTED(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
UNSUPPORTED(cudaProfilerStart)
UNSUPPORTED(cudaProfilerStop)
UNSUPPORTED(cudaStreamBeginCapture)
UNSUPPORTED(cudaStreamEndCapture)
UNSUPPORTED(cudaStreamGetCaptureInfo)
