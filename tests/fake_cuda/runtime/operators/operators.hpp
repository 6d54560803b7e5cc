// Declarations that the files of the operators share.
#pragma once

#include <ATen/Tensor.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace fake_cuda {

using c10::OperatorHandle;
using torch::jit::Stack;

// ---- calls.cpp: the host's part. Every operator of torch's that has a CUDA kernel becomes this function.

void run_on_fake_device(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack);

// ---- shapes.cpp: the shapes of results.

// Returns the results as tensors without memory, resizes outputs (`out=`), and raises errors about the arguments.
// Returns nothing for an operator without a "meta" kernel.
std::optional<Stack> infer_results(const OperatorHandle& op, const Stack& arguments);

// Whether the operator resizes some of its arguments to the results' shape.
bool resizes_outputs(const OperatorHandle& op);

// ---- jobs.cpp: the stream's part.

// Puts a call of the CPU's kernel on the current stream. Its results are copied to `outputs`, device memory, or put
// into `results` as they are. An operator that writes into its arguments has neither.
void launch(const OperatorHandle& op, const Stack& arguments, const Stack& outputs, c10::Device device, Stack* results);

bool is_generator(const c10::Argument& argument);

// Random numbers for the job that runs on this thread.
at::Generator job_generator();

// ---- equivalents.cpp: operators that CPUs do not have.

// Replaces the operator's arguments on the stack by its results, on CPU tensors.
using CpuKernel = void (*)(const OperatorHandle&, Stack&);

// Returns the CPU equivalent of an operator that only GPUs have; null for all others.
CpuKernel find_equivalent(const c10::OperatorName& name);

// Names of the operators that have an equivalent.
std::vector<c10::OperatorName> operators_with_equivalents();

}  // namespace fake_cuda
