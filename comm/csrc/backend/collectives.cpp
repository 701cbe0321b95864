// Collectives that reduce or gather, by the algorithm that the table names.
#include "../quantized.h"
#include "work.h"

namespace deepytorch {

namespace {

constexpr uint64_t kMostFedBack = 256;  // calls of one size in a step: without steps, memory would grow with every call
constexpr int64_t kLeastQuantized = 1 << 14;  // values: less is quickly sent

bool in_memory(const Row& row) { return row.algorithm == Algorithm::shared_memory || row.algorithm == Algorithm::hierarchical; }

// Whether the group's own threads run the algorithm, on the caller's tensor in host memory.
bool reads_host_tensors(const Row& row) { return in_memory(row) || row.algorithm == Algorithm::streams; }

// Whether the algorithm uses memory that GPUs map for each other.
bool through_symmetric_memory(const Row& row) {
  return row.algorithm == Algorithm::nvlink_one_shot || row.algorithm == Algorithm::nvlink_two_shot ||
         row.algorithm == Algorithm::nvlink_copies || row.algorithm == Algorithm::nvlink_multimem;
}

// Whether such an algorithm runs this kind: kernels only all-reduce.
bool through_symmetric_memory(const Row& row, Kind kind) {
  return through_symmetric_memory(row) && (kind == Kind::all_reduce || row.algorithm == Algorithm::nvlink_copies);
}

// Whether these algorithms can sum such values.
bool adds_up_on_gpus(at::ScalarType dtype, RedOp reduce) {
  const bool has_kernel = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  return has_kernel && (reduce == RedOp::SUM || reduce == RedOp::AVG);
}

}  // namespace

void Backend::all_reduce_on_host(Call& call, char* data, size_t count) {
  const size_t bytes = count * element_size(call.dtype);
  return bytes <= one_shot_bytes_ ? all_reduce_one_shot(call, data, count) : all_reduce_two_shot(call, data, count);
}

void Backend::run_all_reduce(Call& call, const Fingerprint& mine, char* data, Copies* copies, size_t count, const Row& row,
                             const std::string& key) {
  Segment* segment = setup_.segment.get();
  const size_t bytes = count * element_size(call.dtype);
  call.chunk_bytes = row.chunk_bytes != 0 ? row.chunk_bytes : segment != nullptr ? call.most_chunk_bytes() : (bytes + 63) / 64 * 64;
  if (copies == nullptr && setup_.num_hosts == 1 && call.checked && segment->all_shared()) {
    const auto addresses = peers(mine.shared);
    return all_reduce_in_place(call, addresses.data(), count);
  }
  if (copies == nullptr && setup_.num_hosts == 1) return all_reduce_on_host(call, data, count);
  HostCopies plain(data);
  Copies& payload = copies != nullptr ? *copies : plain;
  if (setup_.num_hosts == 1) return all_reduce_through(call, payload, count, nullptr);

  const Backends streams = between(row.streams);
  HostsAgree agree(call, *streams[0], mine);
  Wire wire = row.wire;
  const bool half = call.dtype == Dtype::bf16 || call.dtype == Dtype::f16;
  const bool floating = half || call.dtype == Dtype::f32;
  // A ring of half-precision sums would round at every hop.
  if (half && wire != Wire::fp8) wire = call.dtype == Dtype::bf16 ? Wire::bf16 : Wire::f16;
  if (wire == Wire::exact || !floating || call.reduce != Reduce::sum) {
    const int room = segment != nullptr ? segment->areas() - areas_needed(0, copies != nullptr) : 16;
    Ring ring(call, streams, std::max(1, std::min(room, std::max(2, row.streams))), &agree);
    return all_reduce_through(call, payload, count, &ring);
  }
  const size_t room = std::min<size_t>(call.chunk_bytes, segment ? call.most_chunk_bytes() : SIZE_MAX) / element_size(call.dtype);
  Residual* residual = nullptr;
  if (!key.empty()) {
    residual = &residuals_[key];
    if (residual->count != count) *residual = {{}, {}, 0, count};  // another payload than before
  }
  Exchange exchange(call, streams, setup_.num_hosts, setup_.host, wire, &agree, residual, room, &overflows_);
  all_reduce_through(call, payload, count, &exchange);
}

Backend::WorkPtr Backend::reduce_all(at::Tensor& tensor, Wanted wanted, Row row, const std::string& key, bool async,
                                     Tensors outputs) {
  if (row.algorithm == Algorithm::cpu_reduce) {
    if (wanted.on_cuda && pin_) std::exchange(pin_, nullptr)();
    auto copies = std::make_shared<DeviceCopies>(tensor);
    const size_t count = tensor.numel();
    return submit(
        wanted, [this, copies, count, row, key](Call& call, const Fingerprint& mine) {
          setup_.segment->reserve_rooms();
          call.in_rooms = true;
          run_all_reduce(call, mine, nullptr, copies.get(), count, row, key);
          copies->finish();
        },
        std::move(outputs), async, copies);
  }
  if (tensor.is_contiguous()) {
    wanted.data = tensor.data_ptr();
    wanted.bytes = tensor.nbytes();
  }
  return submit(
      wanted, [this, tensor, row, key](Call& call, const Fingerprint& mine) {
        const at::Tensor whole = tensor.contiguous();
        if (!whole.is_same(tensor)) call.keep({whole});
        run_all_reduce(call, mine, static_cast<char*>(whole.data_ptr()), nullptr, whole.numel(), row, key);
        if (!whole.is_same(tensor)) put(Kind::all_reduce, tensor, whole);
      },
      std::move(outputs), async);
}

// Through symmetric memory, on a stream of its own: nothing is left to wait for but that stream.
Backend::WorkPtr Backend::symmetric(at::Tensor& output, at::Tensor& input, Wanted wanted, Row row) {
  guard();
  Fingerprint fingerprint;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    fingerprint = announce(wanted, plan_, 0, lock);
  }
  const auto stream = symmetric_(name_of(row.algorithm), name_of(wanted.kind), output, input, wanted.reduce == RedOp::AVG);
  auto work = c10::make_intrusive<OwnWork>(getRank(), wanted.kind, title_of(wanted.kind, as_gloo_), Tensors{input},
                                           Tensors{output}, nullptr);
  work->set_sequence(fingerprint.sequence);
  if (stream) work->runs_on(*stream);
  (void)work->end(nullptr);
  return work;
}

Backend::WorkPtr Backend::allreduce(Tensors& given_tensors, const c10d::AllreduceOptions& options) {
  auto tensors = each(given_tensors, alias_of);
  TORCH_CHECK(tensors.size() == 1, "all_reduce takes one tensor, found ", tensors.size());
  at::Tensor tensor = tensors[0];
  Wanted wanted{Kind::all_reduce, tensor.scalar_type(), tensor.numel(), options.reduceOp, -1, tensor.is_cuda(), options.timeout};
  if (tensor.is_sparse()) {
    return delegate(wanted, [tensors, options](c10d::Backend& engine) mutable { return engine.allreduce(tensors, options); }, tensors);
  }
  const Row row = next_row(Kind::all_reduce, wanted.on_cuda, tensor.nbytes());
  const bool able = accelerates(wanted.kind, wanted.dtype, wanted.reduce);
  if (through_symmetric_memory(row, wanted.kind) && symmetric_ && tensor.is_contiguous() && adds_up_on_gpus(wanted.dtype, wanted.reduce) &&
      tensor.numel() > 0 && tensor.nbytes() % 16 == 0) {
    return symmetric(tensor, tensor, wanted, row);
  }
  const bool through_host = row.algorithm == Algorithm::cpu_reduce && tensor.is_contiguous();
  if (able && (through_host || (!wanted.on_cuda && reads_host_tensors(row)))) {
    return reduce_all(tensor, wanted, row, "", options.asyncOp, tensors);
  }
  check_gloo_reduces(wanted.kind, tensor, wanted.reduce);
  Copied copied;
  const Tensors outputs = tensors;
  tensors = each(each(tensors, as_real), copied);
  if (able && !wanted.on_cuda && wanted.reduce == RedOp::AVG) {  // gloo averages after the sum, which half types may not hold
    c10d::AllreduceOptions sum = options;
    sum.reduceOp = c10d::ReduceOp::SUM;
    wanted.prepares = true;
    const auto call = [tensors, sum, size = getSize()](c10d::Backend& engine) mutable {
      tensors[0].div_(size);
      return engine.allreduce(tensors, sum);
    };
    return delegate(wanted, call, outputs, std::move(copied));
  }
  const auto call = [tensors, options](c10d::Backend& engine) mutable { return engine.allreduce(tensors, options); };
  return delegate(wanted, call, outputs, std::move(copied));
}

Backend::WorkPtr Backend::allreduce_compressed(at::Tensor& given_tensor, RedOp reduce, Wire wire, const std::string& key,
                                               bool async) {
  auto tensor = alias_of(given_tensor);
  TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous() && (reduce == RedOp::SUM || reduce == RedOp::AVG) &&
                  (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf),
              "compression takes contiguous CPU tensors of float32, bfloat16 or float16 and the reductions SUM and AVG");
  if (setup_.num_hosts > 1 && !poisoned()) (void)between(1);  // the same answer on all ranks, before they are told
  Wanted wanted{Kind::all_reduce, tensor.scalar_type(), tensor.numel(), reduce, -1, false};
  Row row = next_row(Kind::all_reduce, false, tensor.nbytes());
  if (row.algorithm == Algorithm::engine) row = {0, Algorithm::hierarchical, 1 << 20, 1, wire};
  row.wire = wire;
  wanted.root = static_cast<int>(wire);  // ranks that compress differently disagree
  return reduce_all(tensor, wanted, row, key, async, {tensor});
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& given_tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto tensors = each(given_tensors, alias_of);
  TORCH_CHECK(!tensors.empty(), "all_reduce_coalesced takes at least one tensor");
  Wanted wanted{Kind::all_reduce_coalesced, tensors[0].scalar_type(), 0, options.reduceOp, -1, tensors[0].is_cuda(), options.timeout};
  wanted.sizes = sizes_of(tensors);
  size_t bytes = 0;
  bool alike = true;
  for (const at::Tensor& tensor : tensors) {
    wanted.count += tensor.numel();
    bytes += bytes_of(tensor);
    alike = alike && tensor.scalar_type() == wanted.dtype && !tensor.is_sparse() && tensor.is_cuda() == wanted.on_cuda;
  }
  const Row row = next_row(Kind::all_reduce, wanted.on_cuda, bytes);
  if (!alike || wanted.on_cuda || row.algorithm == Algorithm::engine || !accelerates(Kind::all_reduce, wanted.dtype, wanted.reduce)) {
    for (const at::Tensor& tensor : tensors) {
      if (!wanted.on_cuda) check_same_kind(wanted.kind, tensor, tensors[0]);
      check_gloo_reduces(wanted.kind, tensor, wanted.reduce);
    }
    Copied copied;
    const Tensors outputs = tensors;
    tensors = each(each(tensors, as_real), copied);
    const auto call = [tensors, options](c10d::Backend& engine) mutable { return engine.allreduce_coalesced(tensors, options); };
    return delegate(wanted, call, outputs, std::move(copied));
  }
  return submit(
      wanted, [this, tensors, row](Call& call, const Fingerprint& mine) {
        Tensors flat;
        for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape({-1}));
        const at::Tensor whole = at::cat(flat);
        call.keep({whole});
        run_all_reduce(call, mine, static_cast<char*>(whole.data_ptr()), nullptr, whole.numel(), row, "");
        int64_t at = 0;
        for (const at::Tensor& tensor : tensors) {
          put(Kind::all_reduce_coalesced, tensor, whole.narrow(0, at, tensor.numel()).view(tensor.sizes()));
          at += tensor.numel();
        }
      },
      tensors, options.asyncOp);
}

// reduce_scatter or all_gather, whichever the call is.
void Backend::over_hosts(Call& call, const Fingerprint& mine, const Row& row, const at::Tensor& input, const at::Tensor& output) {
  const Backends streams = between(row.streams);
  HostsAgree agree(call, *streams[0], mine);
  const Hosts hosts{streams, setup_.num_hosts, setup_.ranks, agree};
  const int depth = std::min(call.segment->areas() - 1, std::max(2, row.streams));
  if (call.kind == Kind::reduce_scatter) {
    reduce_scatter_between(call, hosts, depth, input.data_ptr(), output.data_ptr(), output.numel());
  } else {
    all_gather_between(call, hosts, depth, input.data_ptr(), output.data_ptr(), input.nbytes());
  }
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& given_output, at::Tensor& given_input,
                                               const c10d::ReduceScatterOptions& options) {
  auto output = alias_of(given_output);
  auto input = alias_of(given_input);
  check_scattered("reduce_scatter_tensor", input, output, getSize());
  if (quantizes(input) && output.is_contiguous() && (options.reduceOp == RedOp::SUM || options.reduceOp == RedOp::AVG)) {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t number = scattered_[input.numel()]++;
    const std::string key =
        number < kMostFedBack ? "call " + std::to_string(number) + " of " + std::to_string(input.numel()) : "";
    lock.unlock();
    return reduce_scatter_quantized(output, input, options.reduceOp, quantize_, key, options.asyncOp);
  }
  Wanted wanted{Kind::reduce_scatter, input.scalar_type(), input.numel(), options.reduceOp, -1, input.is_cuda(), options.timeout};
  const Row row = next_row(wanted.kind, wanted.on_cuda, input.nbytes());
  if (through_symmetric_memory(row, wanted.kind) && symmetric_ && input.is_contiguous() && output.is_contiguous() &&
      adds_up_on_gpus(wanted.dtype, wanted.reduce) && output.numel() > 0) {
    return symmetric(output, input, wanted, row);
  }
  if (wanted.on_cuda || !in_memory(row) || !accelerates(wanted.kind, wanted.dtype, wanted.reduce)) {
    check_gloo_reduces(wanted.kind, input, wanted.reduce);
    if (!wanted.on_cuda) return reduce_scatter_on_gloo(wanted, {output}, {{input}}, options);
    const auto call = [output, input, options](c10d::Backend& engine) mutable {
      return engine._reduce_scatter_base(output, input, options);
    };
    return delegate(wanted, call, {output});
  }
  const bool apart = are_apart(output, input, getRank());
  if (input.is_contiguous() && apart) {
    wanted.data = input.data_ptr();
    wanted.bytes = input.nbytes();
  }
  return submit(
      wanted, [this, input, output, row, apart](Call& call, const Fingerprint& mine) {
        const at::Tensor from = apart ? input.contiguous() : input.clone(), to = output.contiguous();
        call.keep({from, to});
        const size_t count = to.numel();
        call.chunk_bytes = row.chunk_bytes != 0 ? row.chunk_bytes : call.segment->area_bytes();
        if (row.algorithm == Algorithm::hierarchical) {
          over_hosts(call, mine, row, from, to);
        } else if (call.checked && call.segment->all_shared()) {
          reduce_scatter_in_place(call, peers(mine.shared).data(), to.data_ptr(), count);
        } else {
          std::vector<const char*> inputs(getSize());
          for (int rank = 0; rank < getSize(); ++rank) inputs[rank] = static_cast<const char*>(from.data_ptr()) + rank * to.nbytes();
          deepytorch::reduce_scatter(call, inputs.data(), to.data_ptr(), count);
        }
        if (!to.is_same(output)) put(call.kind, output, to);
      },
      {output}, options.asyncOp);
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& given_output, at::Tensor& given_input, const c10d::AllgatherOptions& options) {
  auto output = alias_of(given_output);
  auto input = alias_of(given_input);
  TORCH_CHECK(output.numel() == input.numel() * getSize() && input.scalar_type() == output.scalar_type(),
              "all_gather_into_tensor: found an input of ", input.numel(), " elements (", input.scalar_type(),
              ") and an output of ", output.numel(), " (", output.scalar_type(), "); expected one dtype and an output of ",
              getSize(), " times the input");
  if (quantizes(output) && input.is_contiguous()) return all_gather_quantized(output, input, quantize_, options.asyncOp);
  Wanted wanted{Kind::all_gather, input.scalar_type(), input.numel(), RedOp::UNUSED, -1, input.is_cuda(), options.timeout};
  const Row row = row_to_move(wanted, input, output.nbytes());
  if (through_symmetric_memory(row, wanted.kind) && symmetric_ && input.is_contiguous() && output.is_contiguous() &&
      input.numel() > 0) {
    return symmetric(output, input, wanted, row);
  }
  if (wanted.on_cuda || !in_memory(row)) {
    check_gloo_moves(wanted.kind, input);
    Copied copied, brought;
    at::Tensor target = copied(output), source = brought(input);
    wanted.prepares = !brought.given.empty();
    const auto call = [target, source, brought, options](c10d::Backend& engine) mutable {
      brought.fill();
      return engine._allgather_base(target, source, options);
    };
    return delegate(wanted, call, {output}, std::move(copied));
  }
  const bool apart = are_apart(input, output, getRank());
  if (input.is_contiguous() && apart) {
    wanted.data = input.data_ptr();
    wanted.bytes = input.nbytes();
  }
  return submit(
      wanted, [this, input, output, row, apart](Call& call, const Fingerprint& mine) {
        const at::Tensor from = apart ? input.contiguous() : input.clone(), to = output.contiguous();
        call.keep({from, to});
        call.chunk_bytes = row.chunk_bytes != 0 ? row.chunk_bytes : call.segment->area_bytes() * call.segment->num_ranks();
        if (row.algorithm == Algorithm::hierarchical) {
          over_hosts(call, mine, row, from, to);
        } else if (call.checked && call.segment->all_shared()) {
          all_gather_in_place(call, peers(mine.shared).data(), to.data_ptr(), from.nbytes());
        } else {
          std::vector<char*> outputs(getSize());
          for (int rank = 0; rank < getSize(); ++rank) outputs[rank] = static_cast<char*>(to.data_ptr()) + rank * from.nbytes();
          all_gather(call, from.data_ptr(), outputs.data(), from.nbytes());
        }
        if (!to.is_same(output)) put(call.kind, output, to);
      },
      {output}, options.asyncOp);
}

bool Backend::quantizes(const at::Tensor& tensor) const {
  return quantize_ != Wire::exact && tensor.is_cpu() && tensor.is_contiguous() && tensor.numel() >= kLeastQuantized &&
         (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf);
}

Backend::WorkPtr Backend::reduce_scatter_quantized(at::Tensor& given_output, at::Tensor& given_input, RedOp reduce, Wire wire,
                                                   const std::string& key, bool async) {
  auto output = alias_of(given_output), input = alias_of(given_input);
  if (!poisoned()) (void)between(1);  // the same answer on all ranks, before they are told
  Wanted wanted{Kind::reduce_scatter, input.scalar_type(), input.numel(), reduce, static_cast<int>(wire), false};
  const Row row = next_row(wanted.kind, false, input.nbytes());
  return submit(
      wanted, [this, input, output, row, wire, key](Call& call, const Fingerprint& mine) {
        const size_t count = output.numel();
        const Backends streams = between(row.streams);
        HostsAgree agree(call, *streams[0], mine);
        std::vector<float>* residual = nullptr;
        if (!key.empty()) {
          residual = &scattered_residuals_[key];
          if (residual->size() != count * setup_.num_hosts) residual->assign(count * setup_.num_hosts, 0.0f);
        }
        deepytorch::reduce_scatter_quantized(call, Hosts{streams, setup_.num_hosts, setup_.ranks, agree}, setup_.host,
                                             Codec(wire), residual, &overflows_, input.data_ptr(), output.data_ptr(), count);
      },
      {output}, async);
}

Backend::WorkPtr Backend::all_gather_quantized(at::Tensor& given_output, at::Tensor& given_input, Wire wire, bool async) {
  auto output = alias_of(given_output), input = alias_of(given_input);
  if (!poisoned()) (void)between(1);
  Wanted wanted{Kind::all_gather, input.scalar_type(), input.numel(), RedOp::UNUSED, static_cast<int>(wire), false};
  const Row row = next_row(wanted.kind, false, output.nbytes());
  return submit(
      wanted, [this, input, output, row, wire](Call& call, const Fingerprint& mine) {
        call.chunk_bytes = row.chunk_bytes != 0 || !call.segment ? row.chunk_bytes : call.segment->area_bytes() * setup_.ranks.size();
        const Backends streams = between(row.streams);
        HostsAgree agree(call, *streams[0], mine);
        deepytorch::all_gather_quantized(call, Hosts{streams, setup_.num_hosts, setup_.ranks, agree}, Codec(wire), &overflows_,
                                         input.data_ptr(), output.data_ptr(), input.numel());
      },
      {output}, async);
}

Backend::WorkPtr Backend::broadcast(Tensors& given_tensors, const c10d::BroadcastOptions& options) {
  auto tensors = each(given_tensors, alias_of);
  TORCH_CHECK(tensors.size() == 1, "broadcast takes one tensor, found ", tensors.size());
  at::Tensor tensor = tensors[0] = as_real(tensors[0]);
  Wanted wanted{Kind::broadcast, tensor.scalar_type(), tensor.numel(), RedOp::UNUSED, static_cast<int>(options.rootRank),
                tensor.is_cuda(), options.timeout};
  const Row row = row_to_move(wanted, tensor, bytes_of(tensor));
  check_root(wanted.kind, options.rootRank, getSize());
  if (wanted.on_cuda || row.algorithm != Algorithm::shared_memory || tensor.is_sparse()) {
    check_gloo_moves(wanted.kind, tensor);
    Copied copied;
    const Tensors outputs = tensors;
    tensors = each(tensors, copied);
    const auto call = [tensors, options](c10d::Backend& engine) mutable { return engine.broadcast(tensors, options); };
    return delegate(wanted, call, outputs, std::move(copied));
  }
  return submit(
      wanted, [tensor, row, root = static_cast<int>(options.rootRank)](Call& call, const Fingerprint&) {
        call.chunk_bytes = row.chunk_bytes != 0 ? row.chunk_bytes : call.segment->area_bytes();
        const at::Tensor whole = tensor.contiguous();
        deepytorch::broadcast(call, whole.data_ptr(), whole.nbytes(), root);
        if (!whole.is_same(tensor) && call.segment->rank() != root) put(call.kind, tensor, whole);
      },
      tensors, options.asyncOp);
}

}  // namespace deepytorch
