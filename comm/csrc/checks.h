// Checks of a call's arguments before any rank is told of the call: a refused call leaves the group as it was. (An error
// that only appears in the inner backend's work would end the group.) Each throws a c10::Error that says what was found.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

#include "segment.h"

namespace deepytorch {

void check_root(Kind kind, int64_t root, int size);
// Whether gloo moves this dtype. Tensors of other devices are left to their backend.
bool gloo_takes(const at::Tensor& tensor);
// Refuse what gloo does not move, and what it does not reduce so.
void check_gloo_moves(Kind kind, const at::Tensor& tensor);
// (It adds complex numbers up, and sends them, as the two real ones that they are: `as_real`.)
void check_gloo_reduces(Kind kind, const at::Tensor& tensor, c10d::ReduceOp::RedOpType reduce);
// One tensor for each rank, all like `whole`. which: "input" or "output".
void check_parts(Kind kind, const std::vector<at::Tensor>& parts, const at::Tensor& whole, int size, const char* which);
// The same for reduce_scatter, whose ranks may get tensors of different sizes: `whole` is this rank's. True if they differ.
bool check_parts_to_reduce(const std::vector<at::Tensor>& parts, const at::Tensor& whole, int rank, int size);
// An input with as many elements for each rank as the output has. called: the operation, by the name that users know.
void check_scattered(const char* called, const at::Tensor& input, const at::Tensor& output, int size);
at::Tensor as_real(const at::Tensor& tensor);  // returns all tensors but complex ones on the CPU unchanged
void check_same_kind(Kind kind, const at::Tensor& one, const at::Tensor& other);
// Elements for each rank, in the order of ranks: `splits` of rows, or as many for each where that is empty.
std::vector<int64_t> rows_for_each(Kind kind, const at::Tensor& tensor, const std::vector<int64_t>& splits, int size);

}  // namespace deepytorch
