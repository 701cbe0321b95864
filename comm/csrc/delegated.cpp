#include "delegated.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "pending_future.h"

namespace deepytorch {

namespace {


// torch 2.11 has no name of its own for it.
template <typename Type>
constexpr Type reduce_scatter_coalesced() {
  if constexpr (requires { Type::REDUCE_SCATTER_TENSOR_COALESCED; }) {
    return Type::REDUCE_SCATTER_TENSOR_COALESCED;
  } else {
    return Type::COALESCED;
  }
}

}  // namespace

void raise(const std::string& message) { C10_THROW_ERROR(DistBackendError, message); }

c10d::OpType op_type(Kind kind) {
  switch (kind) {
    case Kind::all_reduce: return c10d::OpType::ALLREDUCE;
    case Kind::all_reduce_coalesced: return c10d::OpType::ALLREDUCE_COALESCED;
    case Kind::reduce_scatter: return c10d::OpType::_REDUCE_SCATTER_BASE;
    case Kind::reduce_scatter_coalesced: return reduce_scatter_coalesced<c10d::OpType>();
    case Kind::all_gather: return c10d::OpType::_ALLGATHER_BASE;
    case Kind::all_gather_coalesced: return c10d::OpType::ALLGATHER_COALESCED;
    case Kind::broadcast: return c10d::OpType::BROADCAST;
    case Kind::reduce: return c10d::OpType::REDUCE;
    case Kind::gather: return c10d::OpType::GATHER;
    case Kind::scatter: return c10d::OpType::SCATTER;
    case Kind::all_to_all: return c10d::OpType::ALLTOALL;
    case Kind::barrier: return c10d::OpType::BARRIER;
    default: return c10d::OpType::UNKNOWN;
  }
}

at::Tensor alias_of(const at::Tensor& tensor) {
  if (tensor.is_sparse()) return tensor;
  TORCH_CHECK(tensor.numel() == 0 || tensor.storage().nbytes() > 0,
              "a collective was given a tensor of ", tensor.sizes(), " without memory; expected one whose storage is allocated");
  return tensor.detach();
}

at::Tensor Copied::operator()(const at::Tensor& tensor) {
  if (tensor.is_sparse() || tensor.is_cuda() || tensor.is_contiguous()) return tensor;
  given.push_back(tensor);
  copies.push_back(at::empty(tensor.sizes(), tensor.options()));
  return copies.back();
}

void Copied::fill() const {
  const at::NoGradGuard no_graph;
  for (size_t i = 0; i < given.size(); ++i) at::Tensor(copies[i]).copy_(given[i]);
}

void Copied::give_back(Kind kind) const {
  for (size_t i = 0; i < given.size(); ++i) put(kind, given[i], copies[i]);
}

void put(Kind kind, const at::Tensor& output, const at::Tensor& found) {
  const bool lists_no_parts = kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::broadcast ||
                              kind == Kind::scatter || kind == Kind::all_to_all;
  const c10::InferenceMode as_it_was_made(output.is_inference());
  const at::NoGradGuard no_graph;
  at::Tensor to = output, from = found;
  for (int64_t dim = 0; lists_no_parts && dim < output.dim(); ++dim) {
    if (output.stride(dim) != 0 || output.size(dim) < 2) continue;
    to = to.narrow(dim, 0, 1);
    from = from.narrow(dim, 0, 1);
  }
  try {
    to.copy_(from);
  } catch (...) {
    throw Refused{std::current_exception()};
  }
}

bool are_apart(const at::Tensor& part, const at::Tensor& whole, int own) {
  if (!part.is_contiguous() || !whole.is_contiguous()) return true;
  const auto* one = static_cast<const char*>(part.const_data_ptr());
  const auto* other = static_cast<const char*>(whole.const_data_ptr());
  const bool disjoint = one + part.nbytes() <= other || other + whole.nbytes() <= one;
  return disjoint || (own >= 0 && one == other + own * part.nbytes());
}

const at::Tensor& first_of(const std::vector<at::Tensor>& tensors, Kind kind) {
  TORCH_CHECK(!tensors.empty(), kind == Kind::none ? "send or recv" : name_of(kind), " was called without a tensor; expected one at least");
  return tensors[0];
}

DelegatedWork::DelegatedWork(int rank, const Fingerprint& fingerprint, c10::intrusive_ptr<c10d::Work> inner,
                             std::shared_ptr<Health> health)
    : Work(rank, op_type(fingerprint.kind)), fingerprint_(fingerprint), inner_(std::move(inner)),
      health_(std::move(health)) {}

c10::intrusive_ptr<c10::ivalue::Future> DelegatedWork::getFuture() {
  const auto theirs = inner_->getFuture();
  auto future = theirs->createInstance(theirs->elementType());
  const auto pending = std::make_shared<PendingFuture>(future, health_);
  auto self = c10::intrusive_ptr<DelegatedWork>::reclaim_copy(this);
  theirs->addCallback([self, pending](c10::ivalue::Future& ended) {
    if (pending->taken()) return;  // the poison was first: this result is dropped
    c10::IValue value;
    try {
      value = self->outcome(ended);
    } catch (const std::exception&) {
      pending->fail(std::current_exception());
      return;
    }
    pending->complete(std::move(value));
  });
  if (!pending->taken()) watch(pending);
  return future;
}

// Returns the inner backend's result.
c10::IValue DelegatedWork::outcome(c10::ivalue::Future& ended) {
  try {
    return ended.value();  // throws the operation's error, if it has one
  } catch (const std::exception& error) {
    if (health_->poisoned()) raise(health_->message());  // the poison says why the operation could not end
    fail(error);
  }
}

bool DelegatedWork::wait(std::chrono::milliseconds timeout) {
  const auto end = Clock::now() + timeout;
  for (;;) {
    auto look = kLook;
    if (timeout != kNoTimeout) {
      look = std::min(look, std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()));
      look = std::max(look, std::chrono::milliseconds(1));
    }
    const bool done = inner_->isCompleted();
    const auto start = Clock::now();
    try {
      return inner_->wait(look);
    } catch (const std::exception& error) {
      if (done) fail(error);
      if (inner_->isCompleted()) continue;
      if (health_->poisoned()) raise(health_->message());
      if (timeout != kNoTimeout && Clock::now() >= end) throw;
      if (Clock::now() - start < look / 2) fail(error);  // no timeout, though the operation is not marked as ended
    }
  }
}

void DelegatedWork::fail(const std::exception& error) {
  const std::string message = "collective " + std::to_string(fingerprint_.sequence) + " of this group, " +
                              fingerprint_.describe() + ", failed in the inner backend: " + error.what();
  health_->await_reason();
  health_->poison(message);
  if (message.find("imed out") != std::string::npos) health_->report();
  raise(health_->message());
}

bool ManyWorks::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
}

bool ManyWorks::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
}

void ManyWorks::synchronize() {
  for (const auto& work : works_) work->synchronize();
}

bool ManyWorks::wait(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) work->wait(timeout);
  return true;
}

}  // namespace deepytorch
