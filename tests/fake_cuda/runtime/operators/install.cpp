// Puts the fake device's operators in the place of torch's.
#include <ATen/Functions.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include <set>

#include "launch.hpp"
#include "operators.hpp"

namespace fake_cuda {
namespace {

using at::Tensor;

// Operators of torch's own CUDA code: they touch no data, or move it by the runtime's copies. (Below: the last three.)
const std::set<std::string> LEFT_TO_TORCH = {
    "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::is_set_to", "aten::record_stream",
    "aten::_local_scalar_dense", "aten::_fused_sdp_choice", "aten::_use_cudnn_ctc_loss",
    "aten::_use_miopen_ctc_loss", "aten::_cudnn_init_dropout_state", "aten::copy_", "aten::_foreach_copy_", "aten::equal"};

// ---- Copies: torch's own code copies between host and device, between devices, and contiguous bytes. Conversions and
// rearrangements on the device take a kernel, which is defined here.

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

// torch's own `equal` launches a kernel without looking it up as an operator.
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

// Silences torch's warnings that kernels are replaced.
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
