// CPU equivalents of the operators that only GPUs have: results have the GPU operator's form and the bits that the same
// model has on a CPU.
#include "operators.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <cmath>
#include <map>
#include <numeric>

namespace fake_cuda {
namespace {

using at::Tensor;
using c10::IValue;

std::optional<Tensor> optional_tensor(const IValue& value) {
  return value.isNone() ? std::nullopt : std::optional<Tensor>(value.toTensor());
}

std::optional<double> optional_double(const IValue& value) { return value.toOptional<double>(); }

// The operator itself, although it is listed here.
void run_cpu_kernel(const OperatorHandle& op, Stack& stack) { op.callBoxed(stack); }

// ---- Attention. CPUs have one fused kernel, whose log-sum-exp may be shorter than those of GPUs, which pad it.

Tensor padded(const Tensor& log_sum_exp, int64_t length) {
  return at::constant_pad_nd(log_sum_exp, {0, length - log_sum_exp.size(-1)});
}

// Attention with dropout has no CPU kernel and is computed step by step. The mask follows from a seed, which is among
// the results, so that backward drops the same.
struct Attention {
  Tensor query, key, value;
  std::optional<Tensor> bias;
  bool is_causal;
  double dropout, scale;
  int64_t heads_per_key;

  Attention(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> bias, bool is_causal, double dropout,
            std::optional<double> scale)
      : query(q), key(k), value(v), bias(bias), is_causal(is_causal), dropout(dropout),
        scale(scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))))), heads_per_key(q.size(1) / k.size(1)) {
    if (dropout == 0) return;  // the CPU's kernel takes groups of heads as they are
    key = at::repeat_interleave(key, heads_per_key, 1);
    value = at::repeat_interleave(value, heads_per_key, 1);
  }

  Tensor probabilities() const {
    Tensor scores = at::matmul(query, key.transpose(-2, -1)) * scale;
    if (bias && bias->defined()) scores = scores + *bias;
    if (is_causal) {
      const Tensor seen = at::ones({query.size(2), key.size(2)}, at::kBool).tril();
      scores = scores.masked_fill(seen.logical_not(), -INFINITY);
    }
    return at::softmax(scores, -1);
  }

  Tensor kept(uint64_t seed) const {  // 0, or 1 / (1 - dropout)
    const auto mask = at::empty({query.size(0), query.size(1), query.size(2), key.size(2)}, query.options());
    return mask.bernoulli_(1 - dropout, at::detail::createCPUGenerator(seed)) / (1 - dropout);
  }

  Tensor forward(uint64_t seed) const { return at::matmul(probabilities() * kept(seed), value); }

  // The gradient of a key head is the sum over the query heads that share it.
  Tensor over_group(const Tensor& grad) const {
    return heads_per_key == 1 ? grad : grad.unflatten(1, {-1, heads_per_key}).sum(2);
  }

  std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, uint64_t seed) const {
    const Tensor p = probabilities(), mask = kept(seed);
    const Tensor grad_p = at::matmul(grad, value.transpose(-2, -1)) * mask;
    const Tensor grad_scores = p * (grad_p - (grad_p * p).sum(-1, /*keepdim=*/true)) * scale;
    return {at::matmul(grad_scores, key), over_group(at::matmul(grad_scores.transpose(-2, -1), query)),
            over_group(at::matmul((p * mask).transpose(-2, -1), grad))};
  }
};

struct AttentionResult {
  Tensor out, log_sum_exp;
  uint64_t seed;
};

AttentionResult attend(const Attention& a) {
  const uint64_t seed = job_generator().current_seed();
  if (a.dropout > 0) return {a.forward(seed), at::zeros({a.query.size(0), a.query.size(1), a.query.size(2)}), seed};
  auto [out, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(a.query, a.key, a.value, 0., a.is_causal,
                                                                            a.bias, a.scale);
  return {out, log_sum_exp, seed};
}

std::tuple<Tensor, Tensor, Tensor> attend_backward(const Attention& a, const Tensor& grad, const Tensor& out,
                                                   const Tensor& log_sum_exp, const Tensor& seed) {
  if (a.dropout > 0) return a.backward(grad, *static_cast<const uint64_t*>(seed.const_data_ptr()));
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, a.query, a.key, a.value, out, log_sum_exp.narrow(-1, 0, a.query.size(2)), 0., a.is_causal, a.bias, a.scale);
}

Tensor seed_tensor(uint64_t seed, at::IntArrayRef shape, at::ScalarType type) {
  Tensor tensor = at::zeros(shape, type);
  *static_cast<uint64_t*>(tensor.data_ptr()) = seed;
  return tensor;
}

// query, key, value, dropout_p, is_causal, return_debug_mask, *, scale
void flash_attention(const OperatorHandle&, Stack& s) {
  const Tensor query = s[0].toTensor(), key = s[1].toTensor();
  const auto [out, log_sum_exp, seed] =
      attend({query, key, s[2].toTensor(), std::nullopt, s[4].toBool(), s[3].toDouble(), optional_double(s[6])});
  s = {out, log_sum_exp, Tensor(), Tensor(), query.size(2), key.size(2), seed_tensor(seed, {2}, at::kUInt64),
       at::zeros({}, at::kUInt64), at::empty({0}, query.options())};
}

// grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, offset, scale
void flash_attention_backward(const OperatorHandle&, Stack& s) {
  const Attention attention(s[1].toTensor(), s[2].toTensor(), s[3].toTensor(), std::nullopt, s[11].toBool(),
                            s[10].toDouble(), optional_double(s[14]));
  auto [query, key, value] =
      attend_backward(attention, s[0].toTensor(), s[4].toTensor(), s[5].toTensor(), s[12].toTensor());
  s = {query, key, value};
}

// query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, *, scale
void efficient_attention(const OperatorHandle&, Stack& s) {
  const Tensor query = s[0].toTensor();
  const auto [out, log_sum_exp, seed] = attend({query, s[1].toTensor(), s[2].toTensor(), optional_tensor(s[3]),
                                                s[6].toBool(), s[5].toDouble(), optional_double(s[7])});
  const int64_t length = s[4].toBool() ? (query.size(2) + 31) / 32 * 32 : 0;
  s = {out, length ? padded(log_sum_exp, length) : at::empty({query.size(0), query.size(1), 0}),
       seed_tensor(seed, {}, at::kLong), at::zeros({}, at::kLong)};
}

// grad_out, query, key, value, attn_bias, out, logsumexp, seed, offset, dropout_p, grad_input_mask, is_causal, *, scale
void efficient_attention_backward(const OperatorHandle&, Stack& s) {
  TORCH_CHECK_NOT_IMPLEMENTED(!s[10].toBoolList().get(3), "The fake GPU has no gradients of attention biases");
  const Attention attention(s[1].toTensor(), s[2].toTensor(), s[3].toTensor(), optional_tensor(s[4]), s[11].toBool(),
                            s[9].toDouble(), optional_double(s[12]));
  auto [query, key, value] =
      attend_backward(attention, s[0].toTensor(), s[5].toTensor(), s[6].toTensor(), s[7].toTensor());
  s = {query, key, value, Tensor()};
}

// ---- Normalisation

// The CPU keeps statistics in the input's type where weights have it too, the GPU in float32: no bit is lost in between.
void layer_norm_backward(const OperatorHandle& op, Stack& s) {  // grad_out, input, shape, mean, rstd, weight, bias, mask
  const Tensor input = s[1].toTensor();
  const auto weight = optional_tensor(s[5]);
  if (!weight || !weight->defined() || weight->scalar_type() == input.scalar_type()) {
    s[3] = s[3].toTensor().to(input.scalar_type());
    s[4] = s[4].toTensor().to(input.scalar_type());
  }
  run_cpu_kernel(op, s);
}

// input, weight, bias, running_mean, running_var, training, momentum, epsilon
void cudnn_batch_norm(const OperatorHandle&, Stack& s) {
  auto [out, mean, inverse_deviation] =
      at::native_batch_norm(s[0].toTensor(), optional_tensor(s[1]), optional_tensor(s[2]), optional_tensor(s[3]),
                            optional_tensor(s[4]), s[5].toBool(), s[6].toDouble(), s[7].toDouble());
  s = {out, mean, inverse_deviation, at::empty({0}, at::kByte)};
}

// input, grad_output, weight, running_mean, running_var, save_mean, save_var, epsilon, reserve
void cudnn_batch_norm_backward(const OperatorHandle&, Stack& s) {
  auto [input, weight, bias] = at::native_batch_norm_backward(
      s[1].toTensor(), s[0].toTensor(), optional_tensor(s[2]), optional_tensor(s[3]), optional_tensor(s[4]),
      optional_tensor(s[5]), optional_tensor(s[6]), true, s[7].toDouble(), {true, true, true});
  s = {input, weight, bias};
}

// CPUs differentiate the norm's parts instead: their gradients differ from these in the last bits.
// grad_out, input, normalized_shape, rstd, weight, output_mask
void rms_norm_backward(const OperatorHandle&, Stack& s) {
  const Tensor grad = s[0].toTensor().to(at::kFloat), input = s[1].toTensor(), rstd = s[3].toTensor();
  const auto weight = optional_tensor(s[4]);
  const Tensor normal = input.to(at::kFloat) * rstd;
  const int64_t num_inner = s[2].toListRef().size(), num_outer = input.dim() - num_inner;
  std::vector<int64_t> inner(num_inner), outer(num_outer);
  std::iota(inner.begin(), inner.end(), num_outer);
  std::iota(outer.begin(), outer.end(), 0);
  const bool weighted = weight && weight->defined();
  const Tensor of_normal = weighted ? grad * *weight : grad;
  const Tensor grad_input = rstd * (of_normal - normal * (of_normal * normal).mean(inner, /*keepdim=*/true));
  Tensor grad_weight;
  if (weighted) grad_weight = (num_outer ? (grad * normal).sum(outer) : grad * normal).to(weight->scalar_type());
  s = {grad_input.to(input.scalar_type()), grad_weight};
}

// ---- Dropout: input, p, train
void native_dropout(const OperatorHandle&, Stack& s) {
  const Tensor input = s[0].toTensor();
  const double kept = 1 - s[1].toDouble();
  const bool train = s[2].isNone() || s[2].toBool();
  const Tensor mask = train ? at::empty_like(input, at::kBool).bernoulli_(kept, job_generator()) : at::ones_like(input, at::kBool);
  s = {train ? input * mask * (kept > 0 ? 1 / kept : 0) : input, mask};
}

// CPUs count floating numbers alone: input, bins, min, max
void histogram(const OperatorHandle& op, Stack& s) {
  const Tensor input = s[0].toTensor();
  if (!input.is_floating_point()) s[0] = input.to(at::kDouble);
  run_cpu_kernel(op, s);
  s[0] = s[0].toTensor().to(input.scalar_type());
}

struct Equivalent {
  c10::OperatorName name;
  CpuKernel kernel;
};

const std::vector<Equivalent>& equivalents() {
  static const auto* all = new std::vector<Equivalent>{
      {{"aten::_scaled_dot_product_flash_attention", ""}, flash_attention},
      {{"aten::_scaled_dot_product_flash_attention_backward", ""}, flash_attention_backward},
      {{"aten::_scaled_dot_product_efficient_attention", ""}, efficient_attention},
      {{"aten::_scaled_dot_product_efficient_attention_backward", ""}, efficient_attention_backward},
      {{"aten::native_layer_norm_backward", ""}, layer_norm_backward},
      {{"aten::cudnn_batch_norm", ""}, cudnn_batch_norm},
      {{"aten::cudnn_batch_norm_backward", ""}, cudnn_batch_norm_backward},
      {{"aten::native_dropout", ""}, native_dropout},
      {{"aten::histc", ""}, histogram},
      {{"aten::_fused_rms_norm_backward", ""}, rms_norm_backward},
      // A CPU composes these of other parts than a GPU.
      {{"aten::convolution", ""}, run_cpu_kernel},
      {{"aten::convolution_backward", ""}, run_cpu_kernel},
  };
  return *all;
}

}  // namespace

CpuKernel find_equivalent(const c10::OperatorName& name) {
  static const auto* kernels = [] {
    auto* map = new std::map<std::pair<std::string, std::string>, CpuKernel>;
    for (const auto& equivalent : equivalents()) (*map)[{equivalent.name.name, equivalent.name.overload_name}] = equivalent.kernel;
    return map;
  }();
  const auto found = kernels->find({name.name, name.overload_name});
  return found == kernels->end() ? nullptr : found->second;
}

std::vector<c10::OperatorName> operators_with_equivalents() {
  std::vector<c10::OperatorName> names;
  for (const auto& equivalent : equivalents()) names.push_back(equivalent.name);
  return names;
}

}  // namespace fake_cuda
