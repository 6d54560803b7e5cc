// What the files of the operators share.
#pragma once

#include <ATen/Tensor.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace fake_cuda {

using c10::OperatorHandle;
using torch::jit::Stack;

// ---- calls.cpp: what the host does. Every operator of torch's that has a CUDA kernel becomes this function.

void run_on_fake_device(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack);

// ---- shapes.cpp: which shapes results have.

// The results as tensors without memory, and outputs (`out=`) resized; errors about the arguments. Nothing where no "meta"
// kernel says it.
std::optional<Stack> infer_results(const OperatorHandle& op, const Stack& arguments);

// Whether it has arguments that are given the results' shape.
bool resizes_outputs(const OperatorHandle& op);

// ---- jobs.cpp: what the stream does.

// Puts a call of the CPU's kernel on the current stream. What it returns is copied to `outputs`, device memory, or put
// into `results` as it is. Neither: the operator writes into its arguments.
void launch(const OperatorHandle& op, const Stack& arguments, const Stack& outputs, c10::Device device, Stack* results);

bool is_generator(const c10::Argument& argument);

// Random numbers for the job that runs on this thread.
at::Generator job_generator();

// ---- equivalents.cpp: operators that CPUs do not have.

// Replaces the operator's arguments on the stack by its results, on CPU tensors.
using CpuKernel = void (*)(const OperatorHandle&, Stack&);

// What a CPU does instead of an operator that only GPUs have; null for all others.
CpuKernel find_equivalent(const c10::OperatorName& name);

// Names of the operators that have an equivalent.
std::vector<c10::OperatorName> operators_with_equivalents();

}  // namespace fake_cuda
