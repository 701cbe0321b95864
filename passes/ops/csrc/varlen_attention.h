// Attention over packed rows on a CPU, in float32: softmax(scale * Q K^T) V and its gradients, each row on its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace deepytorch {

// Query (tokens_q, heads_q, dim), key (tokens_k, heads_k, dim), value (tokens_k, heads_k, dim_v) of float32, the last
// dimension dense, and where each row begins, (rows + 1) int32. A causal query sees the keys up to its own index inside
// the row. Returns the output (tokens_q, heads_q, dim_v), dense, and the logsumexp (heads_q, tokens_q); 0 and -inf for
// queries that see no key.
std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                           const at::Tensor& starts_q, const at::Tensor& starts_k, double scale,
                                           bool causal);

// The gradients of query, key and value, dense.
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_output, const at::Tensor& query,
                                                        const at::Tensor& key, const at::Tensor& value,
                                                        const at::Tensor& output, const at::Tensor& logsumexp,
                                                        const at::Tensor& starts_q, const at::Tensor& starts_k,
                                                        double scale, bool causal);

// Returns whether oneDNN has small products of float32 for this CPU: forward and backward throw if it has none.
bool is_supported();

}  // namespace deepytorch
