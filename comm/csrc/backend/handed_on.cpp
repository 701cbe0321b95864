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
  return hand_on(wanted, each(tensors, as_real), Tensors(), [options](auto& engine, auto& given, auto&) { return engine.reduce(given, options); });
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

// [Note: gloo's reduce_scatter] gloo makes it of all-reduces of copies, and its work waits for them without a deadline, so
// that nobody would look at the poison meanwhile; it has no future either. Here the all-reduces are handed on instead.
// given_parts: for each output, what the ranks get one after another, in one tensor or in several.
Backend::WorkPtr Backend::reduce_scatter_on_gloo(Wanted wanted, const Tensors& given_outputs, const TensorLists& given_parts,
                                                 const c10d::ReduceScatterOptions& options) {
  const Tensors outputs = each(given_outputs, alias_of);
  const TensorLists parts = each(given_parts, alias_of);
  Copied copied;
  Tensors sums;
  for (size_t index = 0; index < outputs.size(); ++index) {
    const at::Tensor& output = outputs[index];
    int64_t count = 0, before = getRank() * output.numel();
    for (size_t part = 0; part < parts[index].size(); ++part) {
      if (parts[index].size() > 1 && part == static_cast<size_t>(getRank())) before = count;  // one for each rank, maybe uneven
      count += parts[index][part].numel();
    }
    sums.push_back(at::empty({count}, output.options()));
    copied.given.push_back(output);  // `call` overwrites what is filled in of it
    copied.copies.push_back(sums.back().narrow(0, before, output.numel()).view(output.sizes()));
  }
  c10d::AllreduceOptions adapted;
  adapted.reduceOp = options.reduceOp;
  adapted.timeout = options.timeout;
  adapted.asyncOp = options.asyncOp;
  // gloo averages after the sum, which half types may not hold
  const bool divide = wanted.reduce == RedOp::AVG && (is_float(wanted.dtype) || at::isComplexType(wanted.dtype));
  if (divide) adapted.reduceOp = c10d::ReduceOp::SUM;
  const auto call = [parts, sums, adapted, divide, size = getSize()](c10d::Backend& engine) -> WorkPtr {
    const at::NoGradGuard no_graph;
    std::vector<WorkPtr> works;
    for (size_t index = 0; index < sums.size(); ++index) {
      int64_t filled = 0;
      for (const at::Tensor& part : parts[index]) {
        sums[index].narrow(0, filled, part.numel()).view(part.sizes()).copy_(part);
        filled += part.numel();
      }
      if (divide) at::Tensor(sums[index]).div_(size);
      Tensors one{as_real(sums[index])};
      works.push_back(engine.allreduce(one, adapted));
    }
    if (works.size() == 1) return works[0];
    return WorkPtr(c10::make_intrusive<ManyWorks>(std::move(works)));
  };
  return delegate(wanted, call, outputs, std::move(copied));
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& options) {
  const at::Tensor& first = first_of(inputs, Kind::reduce_scatter_coalesced);
  Wanted wanted{Kind::reduce_scatter_coalesced, first.scalar_type(), -1, options.reduceOp, -1, first.is_cuda(), options.timeout};
  if (!wanted.on_cuda) wanted.sizes = sizes_of(inputs);
  for (const at::Tensor& input : inputs) check_gloo_reduces(wanted.kind, input, options.reduceOp);
  if (!wanted.on_cuda) {
    TORCH_CHECK(outputs.size() == inputs.size(), "reduce_scatter_tensor_coalesced: found ", inputs.size(), " inputs for ", outputs.size(), " outputs");
    TensorLists parts;
    for (size_t index = 0; index < inputs.size(); ++index) {
      check_scattered("reduce_scatter_tensor_coalesced", inputs[index], outputs[index], getSize());
      parts.push_back({inputs[index]});
    }
    return reduce_scatter_on_gloo(wanted, outputs, parts, options);
  }
  return hand_on(wanted, outputs, inputs, [options](auto& engine, auto& out, auto& in) {
    return engine.reduce_scatter_tensor_coalesced(out, in, options);
  });
}

// A monitored barrier asks which rank is missing, and that rank may also be missing in an earlier call. So earlier calls are
// waited for no longer than the barrier itself, and gloo then names the ranks that do not answer.
void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) {
  guard();
  {
    const WithoutGil unlocked;
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_await_idle_;
    (void)changed_.wait_for(lock, std::min<std::chrono::milliseconds>(options.timeout.count() > 0 ? options.timeout : timeout_, kLongest),
                            [this] { return idle(); });
    --num_await_idle_;
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
