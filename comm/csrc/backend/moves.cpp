// Collectives that only move data: through the segment where the ranks share one, else handed on.
#include <numeric>

#include "work.h"

namespace deepytorch {

namespace {

// Returns a contiguous input, as a copy if a write to one of `outputs` would come before the last read of the input. own: the
// output that may be the input itself, or -1.
at::Tensor to_read(const at::Tensor& tensor, const std::vector<at::Tensor>& outputs, int own) {
  if (!tensor.defined()) return tensor;
  bool apart = true;
  for (int index = 0; index < static_cast<int>(outputs.size()); ++index) {
    apart = apart && (!outputs[index].defined() || are_apart(tensor, outputs[index], index == own ? 0 : -1));
  }
  return apart ? tensor.contiguous() : tensor.clone();
}

}  // namespace

// Whether the ranks are of one host and move a call's bytes through the segment.
bool Backend::moves_itself(const Wanted& wanted) const {
  return setup_.exchanges && !wanted.on_cuda && setup_.segment && setup_.num_hosts == 1;
}

// Returns the row of a collective that only moves data. Tensors that gloo cannot take go through the segment, whatever was
// measured: a call must not work in one run and be refused in the next.
Row Backend::row_to_move(const Wanted& wanted, const at::Tensor& tensor, uint64_t bytes) {
  Row found = next_row(wanted.kind, wanted.on_cuda, bytes);
  if (!gloo_takes(tensor) && moves_itself(wanted)) found.algorithm = Algorithm::shared_memory;
  return found;
}

// sent, received: for each rank a tensor, undefined for none.
Backend::WorkPtr Backend::exchange_parts(Wanted wanted, Tensors sent, Tensors received, Tensors outputs, bool async) {
  return submit(
      wanted, [sent = std::move(sent), received = std::move(received)](Call& call, const Fingerprint&) {
        const auto parts_of = [](const Tensors& tensors) {
          std::vector<Part> parts;
          for (const at::Tensor& tensor : tensors) {
            parts.push_back(tensor.defined() ? Part{static_cast<char*>(tensor.data_ptr()), tensor.nbytes()} : Part());
          }
          return parts;
        };
        Tensors from;
        for (int to = 0; to < static_cast<int>(sent.size()); ++to) {
          from.push_back(to_read(sent[to], received, to == call.segment->rank() ? to : -1));
        }
        const Tensors into = each(received, [](const at::Tensor& tensor) { return tensor.defined() ? tensor.contiguous() : tensor; });
        exchange(call, parts_of(from), parts_of(into));
        for (size_t index = into.size(); index-- > 0;) {  // of parts of an expanded tensor the first one stays
          if (into[index].defined() && !into[index].is_same(received[index])) put(call.kind, received[index], into[index]);
        }
      },
      std::move(outputs), async);
}

Backend::WorkPtr Backend::gather(TensorLists& given_outputs, Tensors& given_inputs, const c10d::GatherOptions& options) {
  const at::Tensor& first = first_of(given_inputs, Kind::gather);
  check_root(Kind::gather, options.rootRank, getSize());
  const bool is_root = getRank() == options.rootRank;
  TORCH_CHECK(given_outputs.size() == (is_root ? 1 : 0), "gather: found ", given_outputs.size(),
              " lists of outputs on rank ", getRank(), "; expected one on the root and none elsewhere");
  if (is_root && first.is_cpu()) check_parts(Kind::gather, given_outputs[0], first, getSize(), "output");
  Wanted wanted{Kind::gather, first.scalar_type(), first.is_cuda() ? -1 : first.numel(), RedOp::UNUSED,
                static_cast<int>(options.rootRank), first.is_cuda(), options.timeout};
  if (!moves_itself(wanted)) {
    check_gloo_moves(wanted.kind, first);
    return hand_on(wanted, given_outputs, given_inputs,
                   [options](auto& engine, auto& out, auto& in) { return engine.gather(out, in, options); });
  }
  Tensors sent(getSize()), received(getSize()), outputs;
  sent[options.rootRank] = alias_of(first);
  wanted.inputs = {sent[options.rootRank]};
  if (is_root) outputs = received = each(given_outputs[0], alias_of);
  return exchange_parts(wanted, std::move(sent), std::move(received), std::move(outputs), options.asyncOp);
}

Backend::WorkPtr Backend::scatter(Tensors& given_outputs, TensorLists& given_inputs, const c10d::ScatterOptions& options) {
  const at::Tensor& first = first_of(given_outputs, Kind::scatter);
  check_root(Kind::scatter, options.rootRank, getSize());
  const bool is_root = getRank() == options.rootRank;
  TORCH_CHECK(given_inputs.size() == (is_root ? 1 : 0), "scatter: found ", given_inputs.size(), " lists of inputs on rank ",
              getRank(), "; expected one on the root and none elsewhere");
  if (is_root && first.is_cpu()) check_parts(Kind::scatter, given_inputs[0], first, getSize(), "input");
  Wanted wanted{Kind::scatter, first.scalar_type(), first.is_cuda() ? -1 : first.numel(), RedOp::UNUSED,
                static_cast<int>(options.rootRank), first.is_cuda(), options.timeout};
  if (!moves_itself(wanted)) {
    check_gloo_moves(wanted.kind, first);
    return hand_on(wanted, given_outputs, given_inputs,
                   [options](auto& engine, auto& out, auto& in) { return engine.scatter(out, in, options); });
  }
  Tensors sent(getSize()), received(getSize());
  received[options.rootRank] = alias_of(first);
  if (is_root) wanted.inputs = sent = each(given_inputs[0], alias_of);
  const Tensors outputs{received[options.rootRank]};
  return exchange_parts(wanted, std::move(sent), std::move(received), outputs, options.asyncOp);
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& given_output, at::Tensor& given_input, std::vector<int64_t>& output_sizes,
                                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  Wanted wanted{Kind::all_to_all, given_input.scalar_type(), -1, RedOp::UNUSED, -1, given_input.is_cuda(), options.timeout};
  if (wanted.on_cuda) {
    return hand_on(wanted, Tensors{given_output}, Tensors{given_input},
                   [output_sizes, input_sizes, options](auto& engine, auto& out, auto& in) mutable {
                     return engine.alltoall_base(out[0], in[0], output_sizes, input_sizes, options);
                   });
  }
  check_same_kind(wanted.kind, given_input, given_output);
  const auto rows_in = rows_for_each(wanted.kind, given_input, input_sizes, getSize());
  const auto rows_out = rows_for_each(wanted.kind, given_output, output_sizes, getSize());
  if (input_sizes.empty() && output_sizes.empty()) {
    TORCH_CHECK(given_input.numel() == given_output.numel(), "all_to_all: found an input of ", given_input.numel(),
                " elements and an output of ", given_output.numel(), "; expected the same number, or split sizes");
    wanted.count = given_input.numel();
  }
  if (!moves_itself(wanted)) {
    check_gloo_moves(wanted.kind, given_input);
    return hand_on(wanted, Tensors{given_output}, Tensors{given_input},
                   [output_sizes, input_sizes, options](auto& engine, auto& out, auto& in) mutable {
                     return engine.alltoall_base(out[0], in[0], output_sizes, input_sizes, options);
                   });
  }
  const at::Tensor output = alias_of(given_output), input = alias_of(given_input);
  wanted.inputs = {input};
  return exchange_parts(wanted, input.split_with_sizes(rows_in), output.split_with_sizes(rows_out), {output}, options.asyncOp);
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const at::Tensor& first = first_of(inputs, Kind::all_to_all);
  Wanted wanted{Kind::all_to_all, first.scalar_type(), -1, RedOp::UNUSED, -1, first.is_cuda(), options.timeout};
  if (!wanted.on_cuda) {
    for (const Tensors* list : {&inputs, &outputs}) {
      TORCH_CHECK(list->size() == static_cast<size_t>(getSize()), "all_to_all: tensor list size ", list->size(),
                  " does not match world size ", getSize());
      for (const at::Tensor& tensor : *list) check_same_kind(wanted.kind, tensor, first);
    }
    TORCH_CHECK(inputs[getRank()].numel() == outputs[getRank()].numel(), "all_to_all: found an input of ",
                inputs[getRank()].numel(), " elements for this rank itself and an output of ", outputs[getRank()].numel(),
                "; expected the same size");
  }
  if (!moves_itself(wanted)) {
    check_gloo_moves(wanted.kind, first);
    return hand_on(wanted, outputs, inputs, [options](auto& engine, auto& out, auto& in) { return engine.alltoall(out, in, options); });
  }
  const Tensors received = each(outputs, alias_of);
  wanted.inputs = each(inputs, alias_of);
  return exchange_parts(wanted, wanted.inputs, received, received, options.asyncOp);
}

Backend::WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const at::Tensor& first = first_of(inputs, Kind::all_gather);
  TORCH_CHECK(outputs.size() == inputs.size(), "all_gather: found ", outputs.size(), " lists of outputs for ", inputs.size(), " inputs");
  if (first.is_cpu()) check_parts(Kind::all_gather, outputs[0], first, getSize(), "output");
  const int64_t count = first.is_cuda() ? -1 : first.numel();  // NCCL takes lists of uneven sizes
  Wanted wanted{Kind::all_gather, first.scalar_type(), count, RedOp::UNUSED, -1, first.is_cuda(), options.timeout};
  const Row row = row_to_move(wanted, first, bytes_of(first) * getSize());
  if (inputs.size() != 1 || first.is_sparse() || !moves_itself(wanted) || row.algorithm != Algorithm::shared_memory) {
    check_gloo_moves(wanted.kind, first);
    return hand_on(wanted, outputs, inputs, [options](auto& engine, auto& out, auto& in) { return engine.allgather(out, in, options); });
  }
  const Tensors targets = each(outputs[0], alias_of);
  wanted.inputs = {alias_of(first)};
  return submit(
      wanted, [input = alias_of(first), targets, row](Call& call, const Fingerprint&) {
        const at::Tensor from = to_read(input, targets, call.segment->rank());
        Tensors whole;
        std::vector<char*> addresses;
        for (const at::Tensor& target : targets) {
          whole.push_back(target.contiguous());
          addresses.push_back(static_cast<char*>(whole.back().data_ptr()));
        }
        call.chunk_bytes = row.chunk_bytes != 0 ? row.chunk_bytes : call.segment->area_bytes() * call.segment->num_ranks();
        all_gather(call, from.data_ptr(), addresses.data(), from.nbytes());
        for (size_t index = 0; index < whole.size(); ++index) {
          if (!whole[index].is_same(targets[index])) put(call.kind, targets[index], whole[index]);
        }
      },
      targets, options.asyncOp);
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  const at::Tensor& first = first_of(outputs, Kind::reduce_scatter);
  TORCH_CHECK(inputs.size() == outputs.size(), "reduce_scatter: found ", inputs.size(), " lists of inputs for ", outputs.size(), " outputs");
  const bool uneven = first.is_cpu() && check_parts_to_reduce(inputs[0], first, getRank(), getSize());
  int64_t count = -1;
  if (!first.is_cuda()) count = std::accumulate(inputs[0].begin(), inputs[0].end(), int64_t{0}, [](int64_t sum, const auto& part) { return sum + part.numel(); });
  Wanted wanted{Kind::reduce_scatter, first.scalar_type(), count, options.reduceOp, -1, first.is_cuda(), options.timeout};
  if (uneven) wanted.sizes = sizes_of(inputs[0]);
  const Row row = next_row(wanted.kind, wanted.on_cuda, bytes_of(first) * getSize());
  if (uneven || outputs.size() != 1 || first.is_sparse() || !moves_itself(wanted) || row.algorithm != Algorithm::shared_memory ||
      !accelerates(wanted.kind, wanted.dtype, wanted.reduce)) {
    check_gloo_reduces(wanted.kind, first, wanted.reduce);
    if (first.is_cpu() && !first.is_sparse() && outputs.size() == 1) return reduce_scatter_on_gloo(wanted, outputs, inputs, options);
    return hand_on(wanted, outputs, inputs,
                   [options](auto& engine, auto& out, auto& in) { return engine.reduce_scatter(out, in, options); });
  }
  return submit(
      wanted, [output = alias_of(first), sources = each(inputs[0], alias_of), row](Call& call, const Fingerprint&) {
        const at::Tensor to = output.contiguous();
        Tensors whole;
        std::vector<const char*> addresses;
        for (int rank = 0; rank < static_cast<int>(sources.size()); ++rank) {
          whole.push_back(to_read(sources[rank], {output}, rank == call.segment->rank() ? 0 : -1));
          addresses.push_back(static_cast<const char*>(whole.back().data_ptr()));
        }
        call.chunk_bytes = row.chunk_bytes != 0 ? row.chunk_bytes : call.segment->area_bytes();
        deepytorch::reduce_scatter(call, addresses.data(), to.data_ptr(), to.numel());
        if (!to.is_same(output)) put(call.kind, output, to);
      },
      {first}, options.asyncOp);
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  const bool on_cuda = engine_of(true) && (!engine_of(false) || !options.device_ids.empty() || (options.device && options.device->is_cuda()));
  const Wanted wanted{Kind::barrier, at::kByte, -1, RedOp::UNUSED, -1, on_cuda, options.timeout};
  if (moves_itself(wanted)) {
    return submit(wanted, [](Call&, const Fingerprint&) {}, {}, options.asyncOp);
  }
  return delegate(wanted, [options](c10d::Backend& engine) { return engine.barrier(options); }, {});
}

}  // namespace deepytorch
