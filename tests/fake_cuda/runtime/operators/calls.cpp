// The host's part of an operator, as for a GPU: it finds the results' shapes, takes memory from torch's CUDA allocator,
// puts a job on the current stream and goes on.
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <set>

#include "launch.hpp"
#include "values.hpp"

namespace fake_cuda {
namespace {

// Operators whose indices may be tensors of the host. All operators take single numbers of the host.
const std::set<std::string> TAKE_HOST_TENSORS = {"aten::index", "aten::index_put", "aten::index_put_",
                                                 "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"};

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

// Whether the shape of the results depends on the data. Such operators make the host wait, as CUDA's do.
bool shape_depends_on_data(const OperatorHandle& op, const Stack& arguments) {
  if (TAKE_HOST_TENSORS.count(op.schema().name())) return has_mask(arguments);
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

// ---- Results

Tensor new_on_device(const Tensor& like, c10::Device device) {
  if (!like.defined()) return like;
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(device).pinned_memory(false));
}

// Returns the arguments that an operator has written, in the order of its schema.
void return_written(const OperatorHandle& op, const Stack& arguments, Stack* stack) {
  for (const auto& result : op.schema().returns()) {
    TORCH_CHECK(result.alias_info(), op.operator_name(), " writes and makes new tensors as well");
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto* alias = op.schema().arguments()[i].alias_info();
      if (alias && alias->beforeSet() == result.alias_info()->beforeSet()) stack->push_back(arguments[i]);
    }
  }
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

}  // namespace

void run_on_fake_device(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  const c10::Device device = device_of(op, arguments);
  const c10::cuda::CUDAGuard guard(device);
  TORCH_CHECK_NOT_IMPLEMENTED(
      find_equivalent(op.operator_name()) || op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
      "The fake GPU cannot run ", op.operator_name(),
      ": there is no CPU kernel. tests/fake_cuda/runtime/operators/equivalents.cpp is the place for one");

  const bool waits = shape_depends_on_data(op, arguments);
  if (waits) c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream());

  const std::optional<Stack> inferred = waits ? std::nullopt : infer_results(op, arguments);

  if (writes(op)) {
    TORCH_CHECK(inferred || !resizes_outputs(op), "The fake GPU cannot run ", op.operator_name(), ": no meta kernel");
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

}  // namespace fake_cuda
