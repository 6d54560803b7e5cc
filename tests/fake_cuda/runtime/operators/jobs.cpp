// The stream's part of an operator: it sees device memory as CPU tensors and calls the CPU's kernel. It holds
// addresses, not tensors, so that memory that is freed too early is a fault.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAStream.h>

#include "launch.hpp"
#include "values.hpp"

namespace fake_cuda {
namespace {

// Returns the job's view of a tensor: device memory, or a copy of host memory, which the host may change meanwhile.
Tensor for_job(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_cuda()) return alias_on_cpu(tensor);
  Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// ---- Random numbers: each call gets a generator of the CPU, which follows from the state of the CUDA generator.

at::Generator next_generator(const IValue& given, c10::Device device) {
  at::Generator cuda = given.isNone() ? at::cuda::detail::getDefaultCUDAGenerator(device.index()) : given.toGenerator();
  TORCH_CHECK(cuda.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", cuda.device(), "'");
  std::lock_guard<std::mutex> lock(cuda.mutex());
  const uint64_t seed = cuda.current_seed(), offset = cuda.get_offset();
  cuda.set_offset(offset + 4);
  return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15u + offset);
}

thread_local std::optional<at::Generator> generator_of_running_job;

bool takes_generator(const OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), is_generator);
}

void give_generators(const OperatorHandle& op, Stack& arguments, c10::Device device) {
  for (size_t i = 0; i < arguments.size(); i++)
    if (is_generator(op.schema().arguments()[i])) arguments[i] = next_generator(arguments[i], device);
}

// ---- Jobs

struct Job {
  OperatorHandle op;
  std::optional<at::Generator> generator;  // for kernels that take none as an argument
  Stack arguments;
  Stack outputs;   // memory that the results are copied to, or
  Stack* results;  // or that take the results as they are; neither if the operator writes into its arguments
};

void copy_results(const Stack& results, const Stack& outputs) {
  for (size_t i = 0; i < outputs.size(); i++) {
    std::vector<Tensor> from, to;
    for_each_tensor(results[i], [&](const Tensor& tensor) { from.push_back(tensor); });
    for_each_tensor(outputs[i], [&](const Tensor& tensor) { to.push_back(tensor); });
    TORCH_CHECK(from.size() == to.size(), "the CPU kernel has ", from.size(), " results, the meta kernel ", to.size());
    for (size_t k = 0; k < from.size(); k++) {
      TORCH_CHECK(from[k].sizes() == to[k].sizes(), "the CPU kernel's result has shape ", from[k].sizes(),
                  ", the meta kernel's ", to[k].sizes());
      to[k].copy_(from[k]);
    }
  }
}

void run_job(void* data) {
  auto* job = static_cast<Job*>(data);
  // Tensors of inference mode can only be written in inference mode.
  const c10::InferenceMode in_inference_mode;
  generator_of_running_job = job->generator;
  try {
    Stack stack = job->arguments;
    if (CpuKernel kernel = find_equivalent(job->op.operator_name())) kernel(job->op, stack);
    else job->op.callBoxed(stack);
    if (job->results) *job->results = stack;
    else copy_results(stack, job->outputs);
  } catch (const c10::Error& error) {
    fake_cuda_kernel_failed((toString(job->op.operator_name()) + ": " + error.what_without_backtrace()).c_str());
  } catch (const std::exception& error) {
    fake_cuda_kernel_failed((toString(job->op.operator_name()) + ": " + error.what()).c_str());
  }
}

void dispose_job(void* data) { delete static_cast<Job*>(data); }

void add_ranges(const Stack& values, std::vector<FakeCudaRange>& ranges) {
  for (const IValue& value : values)
    for_each_tensor(value, [&](const Tensor& tensor) {
      if (!tensor.is_cuda() || tensor.numel() == 0) return;
      int64_t last = 0;
      for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
      ranges.push_back({tensor.const_data_ptr(), static_cast<size_t>(last + 1) * tensor.element_size()});
    });
}

}  // namespace

bool is_generator(const c10::Argument& argument) { return argument.type()->str().find("Generator") != std::string::npos; }

at::Generator job_generator() { return *generator_of_running_job; }

void launch(const OperatorHandle& op, const Stack& arguments, const Stack& outputs, c10::Device device, Stack* results) {
  std::vector<FakeCudaRange> ranges;
  add_ranges(arguments, ranges);
  add_ranges(outputs, ranges);
  std::optional<at::Generator> generator;
  if (op.hasTag(at::Tag::nondeterministic_seeded) && !takes_generator(op)) generator = next_generator(IValue(), device);
  auto* job = new Job{op, generator, map_stack(arguments, at::kCPU, for_job), map_stack(outputs, at::kCPU, for_job), results};
  give_generators(op, job->arguments, device);
  fake_cuda_launch(c10::cuda::getCurrentCUDAStream(), toString(op.operator_name()).c_str(), ranges.data(), ranges.size(),
                   run_job, dispose_job, job);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace fake_cuda
