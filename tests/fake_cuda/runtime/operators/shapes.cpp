// Shapes of an operator's results by its "meta" kernel, which checks the arguments and computes no numbers. Many meta
// kernels are written in Python and take a millisecond, so each is called once for arguments of the same layout.
#include <ATen/Functions.h>

#include <mutex>
#include <sstream>
#include <unordered_map>

#include "values.hpp"

namespace fake_cuda {
namespace {

bool is_single_number_of_host(const Tensor& tensor) { return tensor.is_cpu() && tensor.dim() == 0; }

// Shape, strides and type alone. Single numbers of the host stay what they are: they take part in type promotion.
Tensor for_meta(const Tensor& tensor) {
  if (!tensor.defined() || is_single_number_of_host(tensor)) return tensor;
  Tensor shape = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
  shape._set_conj(tensor.is_conj());
  shape._set_neg(tensor.is_neg());
  return shape;
}

Stack shapes_of(const OperatorHandle& op, const Stack& arguments) {
  Stack shapes = map_stack(arguments, at::kMeta, for_meta);
  for (size_t i = 0; i < shapes.size(); i++)
    if (is_generator(op.schema().arguments()[i])) shapes[i] = IValue();
  return shapes;
}

std::optional<Stack> call_meta_kernel(const OperatorHandle& op, const Stack& shapes) {
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

// ---- Results of the wrong size, which CUDA's host code resizes before it launches the kernel: `out=`

void resize_outputs(const OperatorHandle& op, const Stack& arguments, const Stack& shapes) {
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!op.schema().arguments()[i].is_out() || !arguments[i].isTensor()) continue;
    const Tensor &out = arguments[i].toTensor(), &shape = shapes[i].toTensor();
    if (out.sizes() == shape.sizes()) continue;
    out.resize_(shape.sizes());
    out.as_strided_(shape.sizes(), shape.strides());
  }
}

// ---- The cache of shapes

void describe(const Tensor& tensor, std::ostream& out) {
  if (!tensor.defined()) {
    out << "none,";
    return;
  }
  out << static_cast<int>(tensor.scalar_type()) << tensor.sizes() << tensor.strides() << tensor.is_conj() << tensor.is_neg();
  if (is_single_number_of_host(tensor)) out << "host" << tensor.unsafeGetTensorImpl()->is_wrapped_number();
  out << ',';
}

// Describes all that a meta kernel may look at.
std::string describe(const OperatorHandle& op, const Stack& arguments) {
  std::ostringstream out;
  out << op.operator_name() << c10::get_default_dtype() << '(';
  for (size_t i = 0; i < arguments.size(); i++) {
    const IValue& value = arguments[i];
    if (is_generator(op.schema().arguments()[i])) continue;
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      out << '[';
      map_tensors(value, at::kCPU, [&](const Tensor& tensor) {
        describe(tensor, out);
        return tensor;
      });
      out << ']';
    } else {
      out << value.tagKind() << value << ',';
    }
  }
  return out.str();
}

std::mutex mutex;
std::unordered_map<std::string, std::optional<Stack>> known;

}  // namespace

bool resizes_outputs(const OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const auto& argument) { return argument.is_out(); });
}

std::optional<Stack> infer_results(const OperatorHandle& op, const Stack& arguments) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
  if (resizes_outputs(op)) {
    Stack shapes = shapes_of(op, arguments);
    std::optional<Stack> results = call_meta_kernel(op, shapes);
    if (results) resize_outputs(op, arguments, shapes);
    return results;
  }
  const std::string key = describe(op, arguments);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = known.find(key); found != known.end()) return found->second;
  }
  const std::optional<Stack> results = call_meta_kernel(op, shapes_of(op, arguments));
  const std::lock_guard<std::mutex> lock(mutex);
  return known.emplace(key, results).first->second;
}

}  // namespace fake_cuda
