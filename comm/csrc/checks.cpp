#include "checks.h"

#include <numeric>

namespace deepytorch {

using RedOp = c10d::ReduceOp::RedOpType;

void check_root(Kind kind, int64_t root, int size) {
  TORCH_CHECK(root >= 0 && root < size, name_of(kind), ": invalid root rank: ", root, "; expected 0 to ", size - 1);
}

bool gloo_takes(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.is_sparse()) return true;
  switch (tensor.scalar_type()) {
    case at::kFloat: case at::kDouble: case at::kHalf: case at::kBFloat16: case at::kChar: case at::kByte: case at::kBool:
    case at::kInt: case at::kLong: return true;
    default: return false;
  }
}

void check_gloo_moves(Kind kind, const at::Tensor& tensor) {
  TORCH_CHECK(gloo_takes(tensor), name_of(kind), ": Invalid scalar type ", tensor.scalar_type(),
              " for CPU tensors; expected a float of 16 to 64 bits, int8, uint8, int32, int64 or bool");
}

at::Tensor as_real(const at::Tensor& tensor) { return tensor.is_cpu() && tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

void check_gloo_reduces(Kind kind, const at::Tensor& tensor, RedOp reduce) {
  TORCH_CHECK(!tensor.is_cpu() || !tensor.is_complex() || reduce == RedOp::SUM || reduce == RedOp::AVG, name_of(kind),
              " does not support this reduction on complex tensors; expected SUM or AVG");
  check_gloo_moves(kind, as_real(tensor));
  if (!tensor.is_cpu()) return;
  const bool bits = reduce == RedOp::BAND || reduce == RedOp::BOR || reduce == RedOp::BXOR;
  TORCH_CHECK(!bits || at::isIntegralType(tensor.scalar_type(), true), name_of(kind), ": Cannot use ReduceOp.",
              reduce == RedOp::BAND ? "BAND" : reduce == RedOp::BOR ? "BOR" : "BXOR", " with non-integral dtype ",
              tensor.scalar_type());
  TORCH_CHECK(reduce != RedOp::PREMUL_SUM, name_of(kind), ": Cannot use ReduceOp.PREMUL_SUM with Gloo, on CPU tensors");
  TORCH_CHECK(reduce != RedOp::AVG || !at::isIntegralType(tensor.scalar_type(), true), name_of(kind),
              ": Cannot use ReduceOp.AVG with integral dtype ", tensor.scalar_type());
  TORCH_CHECK(reduce < RedOp::UNUSED, name_of(kind), ": Invalid reduce operation ", static_cast<int>(reduce));
}

void check_same_kind(Kind kind, const at::Tensor& one, const at::Tensor& other) {
  TORCH_CHECK(one.scalar_type() == other.scalar_type() && one.device().type() == other.device().type(), name_of(kind),
              ": found tensors of ", one.scalar_type(), " on ", one.device().type(), " and of ", other.scalar_type(), " on ",
              other.device().type(), "; expected one dtype and one kind of device");
}

void check_parts(Kind kind, const std::vector<at::Tensor>& parts, const at::Tensor& whole, int size, const char* which) {
  TORCH_CHECK(parts.size() == static_cast<size_t>(size), name_of(kind), ": invalid ", which, " tensor list: found ",
              parts.size(), " tensors, expected ", size, ", one for each rank");
  for (size_t index = 0; index < parts.size(); ++index) {
    check_same_kind(kind, parts[index], whole);
    TORCH_CHECK(parts[index].sizes() == whole.sizes(), name_of(kind), ": invalid tensor size at index ", index,
                " (expected ", whole.sizes(), ", got ", parts[index].sizes(), ")");
  }
}

bool check_parts_to_reduce(const std::vector<at::Tensor>& parts, const at::Tensor& whole, int rank, int size) {
  TORCH_CHECK(parts.size() == static_cast<size_t>(size), "reduce_scatter: invalid input tensor list: found ", parts.size(),
              " tensors, expected ", size, ", one for each rank");
  bool uneven = false;
  for (const at::Tensor& part : parts) {
    check_same_kind(Kind::reduce_scatter, part, whole);
    uneven = uneven || part.sizes() != whole.sizes();
  }
  TORCH_CHECK(parts[rank].sizes() == whole.sizes(), "reduce_scatter: invalid tensor size at index ", rank, " (expected ",
              whole.sizes(), ", got ", parts[rank].sizes(), ")");
  return uneven;
}

void check_scattered(const char* called, const at::Tensor& input, const at::Tensor& output, int size) {
  TORCH_CHECK(input.numel() == output.numel() * size && input.scalar_type() == output.scalar_type(), called,
              ": found an input of ", input.numel(), " elements (", input.scalar_type(), ") and an output of ", output.numel(),
              " (", output.scalar_type(), "); expected one dtype and an input of ", size, " times the output");
}

std::vector<int64_t> rows_for_each(Kind kind, const at::Tensor& tensor, const std::vector<int64_t>& splits, int size) {
  TORCH_CHECK(tensor.dim() > 0, name_of(kind), ": found a tensor without dimensions; expected one that is split along its first");
  const int64_t rows = tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK(rows % size == 0, name_of(kind), ": tensor's dim 0 does not divide equally across group size: found ", rows,
                " rows for ", size, " ranks");
    return std::vector<int64_t>(size, rows / size);
  }
  TORCH_CHECK(splits.size() == static_cast<size_t>(size), name_of(kind), ": Number of tensor splits not equal to group size: "
              "found ", splits.size(), ", expected ", size);
  for (const int64_t rows_of_one : splits) TORCH_CHECK(rows_of_one >= 0, name_of(kind), ": found a split of ", rows_of_one, " rows");
  TORCH_CHECK(std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows, name_of(kind),
              ": Split sizes doesn't match total dim 0 size: found splits ", splits, " of ", rows, " rows");
  return splits;
}

}  // namespace deepytorch
