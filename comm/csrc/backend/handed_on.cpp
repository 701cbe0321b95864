// Collectives that an inner backend runs, messages between two ranks among them.
#include "work.h"

namespace deepytorch {

Backend::WorkPtr Backend::allreduce_sparse(Tensors& given_tensors, const c10d::AllreduceOptions& options) {
  auto tensors = each(given_tensors, alias_of);
  const at::Tensor& first = first_of(tensors, Kind::all_reduce);
  const Wanted wanted{Kind::all_reduce, first.scalar_type(), -1, options.reduceOp, -1, first.is_cuda()};
  const auto call = [tensors, options](c10d::Backend& engine) mutable { return engine.allreduce_sparse(tensors, options); };
  return delegate(wanted, call, tensors);
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& first = first_of(tensors, Kind::reduce);
  check_root(Kind::reduce, options.rootRank, getSize());
  check_gloo_reduces(Kind::reduce, first, options.reduceOp);
  const Wanted wanted{Kind::reduce, first.scalar_type(), first.numel(), options.reduceOp, static_cast<int>(options.rootRank),
                      first.is_cuda(), options.timeout};
  return hand_on(wanted, tensors, Tensors(), [options](auto& engine, auto& given, auto&) { return engine.reduce(given, options); });
}

Backend::WorkPtr Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const at::Tensor& first = first_of(inputs, Kind::all_gather_coalesced);
  Wanted wanted{Kind::all_gather_coalesced, first.scalar_type(), -1, RedOp::UNUSED, -1, first.is_cuda(), options.timeout};
  if (!wanted.on_cuda) wanted.sizes = sizes_of(inputs);
  for (const at::Tensor& input : inputs) check_gloo_moves(wanted.kind, input);
  return hand_on(wanted, outputs, inputs,
                 [options](auto& engine, auto& out, auto& in) { return engine.allgather_coalesced(out, in, options); });
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  const at::Tensor& first = first_of(inputs, Kind::all_gather_coalesced);
  Wanted wanted{Kind::all_gather_coalesced, first.scalar_type(), -1, RedOp::UNUSED, -1, first.is_cuda(), options.timeout};
  if (!wanted.on_cuda) wanted.sizes = sizes_of(inputs);
  for (const at::Tensor& input : inputs) check_gloo_moves(wanted.kind, input);
  return hand_on(wanted, outputs, inputs, [options](auto& engine, auto& out, auto& in) {
    return engine.allgather_into_tensor_coalesced(out, in, options);
  });
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& options) {
  const at::Tensor& first = first_of(inputs, Kind::reduce_scatter_coalesced);
  Wanted wanted{Kind::reduce_scatter_coalesced, first.scalar_type(), -1, options.reduceOp, -1, first.is_cuda(), options.timeout};
  if (!wanted.on_cuda) wanted.sizes = sizes_of(inputs);
  for (const at::Tensor& input : inputs) check_gloo_reduces(wanted.kind, input, options.reduceOp);
  return hand_on(wanted, outputs, inputs, [options](auto& engine, auto& out, auto& in) {
    return engine.reduce_scatter_tensor_coalesced(out, in, options);
  });
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) {
  guard();
  {
    const WithoutGil unlocked;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !busy_ && queue_.empty(); });
  }
  inner(false)->monitoredBarrier(options, wait_all);
}

// Between two ranks, so not counted among the collectives of all. The work of a call on CPU tensors is kept while calls
// are coalesced: nccl's end of it knows nothing of them.
template <class Run>
Backend::WorkPtr Backend::between_two(const Tensors& given, Run run) {
  auto tensors = each(given, alias_of);
  const bool on_cuda = first_of(tensors, Kind::none).is_cuda();
  guard();
  WorkPtr work = run(*inner(on_cuda), tensors);
  if (coalescing_ && !on_cuda) coalesced_.push_back(work);
  return work;
}

Backend::WorkPtr Backend::send(Tensors& tensors, int target, int tag) {
  return between_two(tensors, [&](auto& engine, auto& given) { return engine.send(given, target, tag); });
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int source, int tag) {
  return between_two(tensors, [&](auto& engine, auto& given) { return engine.recv(given, source, tag); });
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return between_two(tensors, [&](auto& engine, auto& given) { return engine.recvAnysource(given, tag); });
}

}  // namespace deepytorch
