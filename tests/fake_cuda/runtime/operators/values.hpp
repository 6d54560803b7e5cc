// Tensors among the arguments and results of operators.
#pragma once

#include <ATen/ops/from_blob.h>

#include "operators.hpp"

namespace fake_cuda {

using at::Tensor;
using c10::IValue;

// The same memory, as a tensor of the CPU.
inline Tensor alias_on_cpu(const Tensor& tensor) {
  Tensor alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                               at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

// Applies `function` to each tensor, alone or in a list, and replaces devices by `device`.
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

}  // namespace fake_cuda
