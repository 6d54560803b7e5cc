// What the two files of the operators share.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace fake_cuda {

using c10::OperatorHandle;
using torch::jit::Stack;

// Replaces the operator's arguments on the stack by its results, on CPU tensors.
using CpuKernel = void (*)(const OperatorHandle&, Stack&);

// What a CPU does instead of an operator that only GPUs have; null for all others.
CpuKernel find_equivalent(const c10::OperatorName& name);

// Random numbers for the job that runs on this thread.
at::Generator job_generator();

// Names of the operators that have an equivalent.
std::vector<c10::OperatorName> operators_with_equivalents();

}  // namespace fake_cuda
