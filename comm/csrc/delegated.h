// What an inner backend does for us: the tensors that it is given, and its work.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>
#include <vector>

#include "health.h"
#include "segment.h"

namespace deepytorch {

[[noreturn]] void raise(const std::string& message);  // as the error that c10d raises for a backend
c10d::OpType op_type(Kind kind);

// [Note: tensors without their Python objects] A thread of ours or of an inner backend may drop the last reference to a
// tensor. If the tensor carried its Python object, the thread would need the GIL: it would wait for the GIL while training
// runs, and die while the interpreter ends. So operations get aliases that Python has never seen.
// (A sparse one is filled by replacing its parts, which an alias would not show.) A tensor without memory is refused.
at::Tensor alias_of(const at::Tensor& tensor);

// [Note: in a row] gloo reads and writes storage from its first element on, whatever the strides are. A tensor that is not
// contiguous gets a contiguous copy. The copy is filled when the call's turn comes, since an earlier call may still write to
// the tensor. An output is copied back before a later call may read it: a call with copied outputs goes through the queue.
struct Copied {
  std::vector<at::Tensor> given, copies;

  at::Tensor operator()(const at::Tensor& tensor);  // memory for a copy, or the tensor itself if it is contiguous
  void fill() const;
  void give_back(Kind kind) const;  // as `put`
};

// A failure on this rank alone, while no call of the group is running: the caller gets the error, and the group goes on.
struct Refused {
  std::exception_ptr why;
};

// Write a call's result into its output, after the ranks have finished the call. Elements of an expanded tensor share
// memory: where gloo takes such outputs, as if they were contiguous, the first of these elements is written. Throws Refused.
void put(Kind kind, const at::Tensor& output, const at::Tensor& found);

// Whether one may be read while the other is written: they have no memory in common, or `part` is no. `own` of the parts that
// `whole` is made of, in which nothing moves (-1: no such part). A tensor that is not contiguous is worked on in a copy.
bool are_apart(const at::Tensor& part, const at::Tensor& whole, int own);

template <typename Each>
std::vector<at::Tensor> each(const std::vector<at::Tensor>& tensors, Each&& copy) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& tensor : tensors) found.push_back(copy(tensor));
  return found;
}

template <typename Each>
std::vector<std::vector<at::Tensor>> each(const std::vector<std::vector<at::Tensor>>& lists, Each&& copy) {
  std::vector<std::vector<at::Tensor>> found;
  for (const auto& list : lists) found.push_back(each(list, copy));
  return found;
}

// The first of a collective's tensors (`none`: of a call between two ranks); an error where there is none.
const at::Tensor& first_of(const std::vector<at::Tensor>& tensors, Kind kind);

// A delegated operation: its wait and its future also end where the group is poisoned, and its error names the collective.
class DelegatedWork final : public c10d::Work {
 public:
  DelegatedWork(int rank, const Fingerprint& fingerprint, c10::intrusive_ptr<c10d::Work> inner,
                std::shared_ptr<Health> health);

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  void abort() override { inner_->abort(); }
  uint64_t getSequencenumber() const override { return fingerprint_.sequence; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  [[noreturn]] void fail(const std::exception& error);
  c10::IValue outcome(c10::ivalue::Future& ended);

  Fingerprint fingerprint_;
  c10::intrusive_ptr<c10d::Work> inner_;
  std::shared_ptr<Health> health_;
};

// Several operations that one call to `wait` is for.
class ManyWorks final : public c10d::Work {
 public:
  explicit ManyWorks(std::vector<c10::intrusive_ptr<c10d::Work>> works) : works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace deepytorch
