// Every operator that has a CUDA kernel, on the fake device: the CPU's kernel, in the order of the stream.
//
// The host does what it does for a GPU: it finds the results' shapes (by the operator's "meta" kernel), takes memory from
// torch's CUDA allocator, puts a job on the current stream and goes on. The job sees device memory as CPU tensors and
// calls the CPU kernel. It holds addresses, not tensors: whoever frees memory too early is found out.
#include "operators.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <set>

#include "launch.hpp"

namespace fake_cuda {
namespace {

using at::Tensor;
using c10::IValue;

// torch's own CUDA code does these: they touch no data, or move it by the runtime's copies. (The last three are below.)
const std::set<std::string> LEFT_TO_TORCH = {
    "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::is_set_to", "aten::record_stream",
    "aten::_local_scalar_dense", "aten::_fused_sdp_choice", "aten::_use_cudnn_ctc_loss",
    "aten::_use_miopen_ctc_loss", "aten::_cudnn_init_dropout_state", "aten::copy_", "aten::_foreach_copy_", "aten::equal"};

// Besides single numbers, these take tensors of the host: their indices.
const std::set<std::string> TAKE_HOST_TENSORS = {"aten::index", "aten::index_put", "aten::index_put_",
                                                 "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"};

// ---- Tensors and values

// The same memory, as a tensor of the CPU.
Tensor alias_on_cpu(const Tensor& tensor) {
  Tensor alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                               at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

// What the job will see: device memory, and copies of what the host may change meanwhile.
Tensor for_job(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_cuda()) return alias_on_cpu(tensor);
  Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// Shape, strides and type alone. Single numbers of the host stay what they are: they take part in type promotion.
Tensor for_meta(const Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
  Tensor shape = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
  shape._set_conj(tensor.is_conj());
  shape._set_neg(tensor.is_neg());
  return shape;
}

// `function` of each tensor, alone or in a list; devices become `device`.
template <class Function>
IValue map_tensors(const IValue& value, c10::DeviceType device, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isDevice()) return c10::Device(device);
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(function(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<Tensor>(function(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

template <class Function>
void for_each_tensor(const IValue& value, Function function) {
  map_tensors(value, at::kCPU, [&](const Tensor& tensor) {
    if (tensor.defined()) function(tensor);
    return tensor;
  });
}

template <class Function>
Stack map_stack(const Stack& stack, c10::DeviceType device, Function function) {
  Stack mapped;
  for (const IValue& value : stack) mapped.push_back(map_tensors(value, device, function));
  return mapped;
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

bool writes(const OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), is_written);
}

// ---- Checks that CUDA's operators make

c10::Device device_of(const OperatorHandle& op, const Stack& arguments) {
  std::optional<c10::Device> device;
  for (size_t i = 0; i < arguments.size(); i++) {
    for_each_tensor(arguments[i], [&](const Tensor& tensor) {
      if (!tensor.is_cuda()) {
        const bool allowed = tensor.dim() == 0 || TAKE_HOST_TENSORS.count(op.schema().name());
        TORCH_CHECK(allowed && !is_written(op.schema().arguments()[i]),
                    "Expected all tensors to be on the same device, but found at least two devices, cuda and ",
                    tensor.device(), "! (when checking ", op.operator_name(), ")");
        return;
      }
      TORCH_CHECK(!device || *device == tensor.device(),
                  "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                  tensor.device(), "! (when checking ", op.operator_name(), ")");
      device = tensor.device();
    });
    if (!device && arguments[i].isDevice() && arguments[i].toDevice().is_cuda()) device = arguments[i].toDevice();
  }
  return device && device->has_index() ? *device : c10::Device(at::kCUDA, c10::cuda::current_device());
}

bool has_mask(const Stack& arguments) {
  bool found = false;
  for (const IValue& value : arguments)
    if (value.isOptionalTensorList())
      for_each_tensor(value, [&](const Tensor& t) { found |= t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; });
  return found;
}

// Operators whose results have a shape that depends on the data. CUDA's make the host wait, and so do these.
bool shape_depends_on_data(const OperatorHandle& op, const Stack& arguments) {
  if (TAKE_HOST_TENSORS.count(op.schema().name())) return has_mask(arguments);
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

// ---- Random numbers: each call gets a generator of the CPU, which follows from the state of the CUDA generator.

bool is_generator(const c10::Argument& argument) { return argument.type()->str().find("Generator") != std::string::npos; }

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

void replace_generators(const OperatorHandle& op, Stack& arguments, c10::Device device, bool for_job) {
  for (size_t i = 0; i < arguments.size(); i++)
    if (is_generator(op.schema().arguments()[i]))
      arguments[i] = for_job ? IValue(next_generator(arguments[i], device)) : IValue();
}

// ---- Jobs

struct Job {
  OperatorHandle op;
  std::optional<at::Generator> generator;  // for kernels that take none as an argument
  Stack arguments;
  Stack outputs;   // memory that the results are copied to, or
  Stack* results;  // where they are wanted as they are; neither: the operator writes into its arguments
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
  const at::NoGradGuard no_autograd;
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

void launch(const OperatorHandle& op, const Stack& arguments, const Stack& outputs, c10::Device device, Stack* results) {
  std::vector<FakeCudaRange> ranges;
  add_ranges(arguments, ranges);
  add_ranges(outputs, ranges);
  std::optional<at::Generator> generator;
  if (op.hasTag(at::Tag::nondeterministic_seeded) && !takes_generator(op)) generator = next_generator(IValue(), device);
  auto* job = new Job{op, generator, map_stack(arguments, at::kCPU, for_job), map_stack(outputs, at::kCPU, for_job), results};
  replace_generators(op, job->arguments, device, /*for_job=*/true);
  fake_cuda_launch(c10::cuda::getCurrentCUDAStream(), toString(op.operator_name()).c_str(), ranges.data(), ranges.size(),
                   run_job, dispose_job, job);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// ---- Results

Tensor new_on_device(const Tensor& like, c10::Device device) {
  if (!like.defined()) return like;
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(device).pinned_memory(false));
}

// The operator's meta kernel on the shapes of its arguments: the results' shapes, or errors about the arguments.
// Nothing if there is no such kernel.
std::optional<Stack> infer(const OperatorHandle& op, Stack& shapes) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
  Stack stack = shapes;
  try {
    op.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  }
  for (const IValue& value : stack)
    if (!value.isTensor() && !value.isTensorList() && !value.isNone()) return std::nullopt;
  return stack;
}

// Results that CUDA's host code would give another shape before it launches the kernel: `out=` of the wrong size.
void resize_outputs(const OperatorHandle& op, const Stack& arguments, const Stack& shapes) {
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!op.schema().arguments()[i].is_out() || !arguments[i].isTensor()) continue;
    const Tensor &out = arguments[i].toTensor(), &shape = shapes[i].toTensor();
    if (out.sizes() == shape.sizes()) continue;
    out.resize_(shape.sizes());
    out.as_strided_(shape.sizes(), shape.strides());
  }
}

// What an operator that writes into its arguments returns: those of its arguments that its schema names.
void return_written(const OperatorHandle& op, const Stack& arguments, Stack* stack) {
  for (const auto& result : op.schema().returns()) {
    TORCH_CHECK(result.alias_info(), op.operator_name(), " writes and makes new tensors as well");
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto* alias = op.schema().arguments()[i].alias_info();
      if (alias && alias->beforeSet() == result.alias_info()->beforeSet()) stack->push_back(arguments[i]);
    }
  }
}

bool has_outputs_to_resize(const OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const auto& argument) { return argument.is_out(); });
}

// Runs the job now and makes results of the shape that it found.
Stack run_and_wait(const OperatorHandle& op, const Stack& arguments, c10::Device device) {
  Stack results;
  launch(op, arguments, {}, device, &results);
  fake_cuda_wait(c10::cuda::getCurrentCUDAStream());
  C10_CUDA_CHECK(cudaGetLastError());
  return map_stack(results, device.type(), [&](const Tensor& result) {
    Tensor moved = new_on_device(result, device);
    if (moved.defined()) alias_on_cpu(moved).copy_(result);
    return moved;
  });
}

void run_on_fake_device(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  const c10::Device device = device_of(op, arguments);
  const c10::cuda::CUDAGuard guard(device);
  TORCH_CHECK_NOT_IMPLEMENTED(
      find_equivalent(op.operator_name()) || op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
      "The fake GPU cannot run ", op.operator_name(), ": there is no CPU kernel. tests/fake_cuda/runtime/equivalents.cpp is the place for one");

  const bool waits = shape_depends_on_data(op, arguments);
  if (waits) c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream());

  Stack shapes = map_stack(arguments, at::kMeta, for_meta);
  replace_generators(op, shapes, device, /*for_job=*/false);
  const std::optional<Stack> inferred = waits ? std::nullopt : infer(op, shapes);

  if (writes(op)) {
    TORCH_CHECK(inferred || !has_outputs_to_resize(op), "The fake GPU cannot run ", op.operator_name(), ": no meta kernel");
    if (inferred) resize_outputs(op, arguments, shapes);
    launch(op, arguments, {}, device, nullptr);
    return_written(op, arguments, stack);
    return;
  }
  if (!inferred) {
    for (IValue& result : run_and_wait(op, arguments, device)) stack->push_back(std::move(result));
    return;
  }
  Stack outputs = map_stack(*inferred, device.type(), [&](const Tensor& shape) { return new_on_device(shape, device); });
  launch(op, arguments, outputs, device, nullptr);
  for (IValue& output : outputs) stack->push_back(std::move(output));
}

// ---- Copies: torch's own code copies between host and device, between devices, and what is a plain run of bytes. It
// converts and rearranges on the device by a kernel, which is ours.

OperatorHandle find_operator(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

bool is_plain_copy(const Tensor& to, const Tensor& from) {
  const bool same_layout = to.strides() == from.strides() && to.is_non_overlapping_and_dense();
  return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() && to.is_conj() == from.is_conj() &&
         to.is_neg() == from.is_neg() && (same_layout || (to.is_contiguous() && from.is_contiguous()));
}

Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.device() != from.device() || is_plain_copy(to, from)) return at::native::copy_(to, from, non_blocking);
  static const OperatorHandle op = find_operator("aten::copy_");
  Stack stack{to, from, non_blocking};
  run_on_fake_device(op, {}, &stack);
  return to;
}

void copy_all(at::TensorList to, at::TensorList from, bool non_blocking) {
  TORCH_CHECK(to.size() == from.size(), "Tensor lists must have the same number of tensors");
  for (size_t i = 0; i < to.size(); i++) to[i].copy_(from[i], non_blocking);
}

// torch's own compares by a kernel that it does not look up as an operator.
bool equal(const Tensor& first, const Tensor& second) {
  if (first.sizes() != second.sizes()) return false;
  return at::eq(first, second).all().item<bool>();
}

// ---- Installation

bool is_ours(const c10::OperatorName& name) {
  const bool known = name.name.rfind("aten::", 0) == 0 || name.name.rfind("torchvision::", 0) == 0;
  return known && !LEFT_TO_TORCH.count(name.name) && name.name.rfind("aten::_nested", 0) != 0;
}

bool is_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(),
                     [](const auto& result) { return result.alias_info() && !result.alias_info()->isWrite(); });
}

// Replacing torch's kernels is what this file is for, so that torch need not warn of it.
class Silence : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

template <class Kernel>
void install(const c10::OperatorName& name, Kernel kernel) {
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>;
  registrations->push_back(c10::Dispatcher::singleton().registerImpl(name, c10::DispatchKey::CUDA, std::move(kernel),
                                                                     std::nullopt, nullptr, "the fake CUDA runtime"));
}

// Freed memory of torch's allocator is poisoned in the order of the stream that owns it, as its next owner might do.
void poison_when_freed(const c10::cuda::CUDACachingAllocator::TraceEntry& entry) {
  if (entry.action_ != c10::CachingDeviceAllocator::TraceEntry::FREE_COMPLETED) return;
  fake_cuda_poison(entry.device_, reinterpret_cast<void*>(entry.addr_), entry.size_, static_cast<cudaStream_t>(entry.stream_));
}

}  // namespace

at::Generator job_generator() { return *generator_of_running_job; }

}  // namespace fake_cuda

EXPORTED void fake_cuda_install_operators() {
  using namespace fake_cuda;
  static Silence silence;
  const c10::WarningUtils::WarningHandlerGuard quiet(&silence);
  auto& dispatcher = c10::Dispatcher::singleton();
  auto names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
  for (const auto& name : operators_with_equivalents()) names.push_back(name);
  for (const auto& name : names) {
    const auto op = dispatcher.findSchema(name);
    if (op && is_ours(name) && !is_view(op->schema()))
      install(name, c10::KernelFunction::makeFromBoxedFunction<&run_on_fake_device>());
  }
  install({"aten::copy_", ""}, c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(copy)));
  install({"aten::_foreach_copy_", ""}, c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(copy_all)));
  install({"aten::equal", ""}, c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(equal)));
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(poison_when_freed);
}
