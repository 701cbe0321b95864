#include "hierarchical.h"

#include <algorithm>
#include <cstring>

namespace deepytorch {

namespace {


// Elements that each of the ranks contributes to a chunk: `parts` of them have to fit into an area.
size_t room_of(const Call& call, size_t element, size_t num_ranks, size_t parts) {
  const size_t bytes = std::min(call.chunk_bytes / num_ranks, call.segment->area_bytes() / parts);
  return std::max<size_t>(bytes / kLine * kLine, kLine) / element;
}

at::Tensor bytes_at(const void* data, size_t size, const Call& call) {
  return at::from_blob(
      const_cast<void*>(data), {static_cast<int64_t>(size)}, [kept = call.kept](void*) {}, at::TensorOptions().dtype(at::kByte));
}

}  // namespace

const char* HostSums::at_input(int host, int local) const {
  const size_t rank = hosts_.rank(host, local, call_.segment ? call_.segment->num_ranks() : 1);
  return input_ + (rank * output_count_ + chunk_ * room_) * element_size(call_.dtype);
}

char* HostSums::in_area(int from, int host, int local) const {
  return call_.segment->area(exchange_, from) + (local * hosts_.num_hosts + host) * room_ * element_size(call_.dtype);
}

void HostSums::bring(size_t chunk) {
  chunk_ = chunk;
  Segment* const segment = call_.segment;
  if (segment == nullptr) return;
  exchange_ = segment->next_exchange();
  const int me = segment->rank();
  const size_t bytes = size_of(chunk) * element_size(call_.dtype);
  for (int local = 0; local < segment->num_ranks(); ++local) {
    for (int host = 0; local != me && host < hosts_.num_hosts; ++host) {
      std::memcpy(in_area(me, host, local), at_input(host, local), bytes);
    }
  }
  call_.sync();
}

void HostSums::sum_for(int host, void* target, Dtype target_dtype) const {
  const int me = call_.segment ? call_.segment->rank() : 0, num = call_.segment ? call_.segment->num_ranks() : 1;
  const void* inputs[kMaxLocalRanks];
  for (int local = 0; local < num; ++local) inputs[local] = local == me ? at_input(host, me) : in_area(local, host, me);
  kernels().reduce(target, nullptr, inputs, num, size_of(chunk_), call_.dtype, target_dtype, call_.reduce, 1.0);
}

void Flight::prepare(const Hosts& hosts, size_t bytes_of_a_part) {
  sent = at::empty({static_cast<int64_t>(bytes_of_a_part) * hosts.num_hosts}, at::kByte);
  received = at::empty_like(sent);
}

void Flight::start(Call& call, const Hosts& hosts, size_t chunk) {
  hosts.agree.wait();
  c10d::AllToAllOptions options;
  options.timeout = remaining(call);
  std::vector<int64_t> even;
  work = hosts.streams[chunk % hosts.streams.size()]->alltoall_base(received, sent, even, even, options);
}

void reduce_scatter_between(Call& call, const Hosts& hosts, int depth, const void* input, void* output, size_t output_count) {
  const size_t element = element_size(call.dtype);
  const size_t room = room_of(call, element, hosts.ranks.size(), hosts.ranks.size());
  const size_t chunks = (output_count + room - 1) / room;
  HostSums sums(call, hosts, room, input, output_count);
  std::vector<Flight> flights(depth);
  const auto start = [&](size_t chunk) {
    Flight& flight = flights[chunk % depth];
    const size_t bytes = sums.size_of(chunk) * element;
    sums.bring(chunk);
    flight.prepare(hosts, bytes);
    for (int host = 0; host < hosts.num_hosts; ++host) sums.sum_for(host, flight.part_for(host, bytes), call.dtype);
    flight.start(call, hosts, chunk);
  };
  const auto finish = [&](size_t chunk) {
    Flight& flight = flights[chunk % depth];
    wait_for(flight.work, call, "between hosts,");
    const size_t size = sums.size_of(chunk);
    std::vector<const void*> inputs;
    for (int host = 0; host < hosts.num_hosts; ++host) inputs.push_back(flight.part_from(host, size * element));
    kernels().reduce(static_cast<char*>(output) + chunk * room * element, nullptr, inputs.data(), hosts.num_hosts, size,
                     call.dtype, call.dtype, call.reduce, call.divisor);
    flight = Flight();
  };
  for (size_t turn = 0; turn < chunks + depth - 1; ++turn) {
    if (turn < chunks) start(turn);
    if (turn + 1 >= static_cast<size_t>(depth)) finish(turn + 1 - depth);
  }
}

void all_gather_between(Call& call, const Hosts& hosts, int depth, const void* input, void* output, size_t input_bytes) {
  Segment& segment = *call.segment;
  const int per_host = segment.num_ranks(), me = segment.rank(), num_hosts = hosts.num_hosts;
  const size_t room = room_of(call, 1, hosts.ranks.size(), num_hosts);
  const size_t chunks = (input_bytes + room - 1) / room;
  const uint64_t first = segment.next_exchange(chunks);
  std::vector<c10::intrusive_ptr<c10d::Work>> works(depth);
  const auto size_of = [&](size_t chunk) { return std::min(room, input_bytes - chunk * room); };
  const auto start = [&](size_t chunk) {
    hosts.agree.wait();
    const size_t size = size_of(chunk);
    at::Tensor gathered = bytes_at(segment.area(first + chunk, me), size * num_hosts, call);
    at::Tensor own = bytes_at(static_cast<const char*>(input) + chunk * room, size, call);
    c10d::AllgatherOptions options;
    options.timeout = remaining(call);
    works[chunk % depth] = hosts.streams[chunk % hosts.streams.size()]->_allgather_base(gathered, own, options);
  };
  const auto finish = [&](size_t chunk) {
    wait_for(works[chunk % depth], call, "between hosts,");
    call.sync();
    const size_t size = size_of(chunk);
    for (int local = 0; local < per_host; ++local) {
      for (int host = 0; host < num_hosts; ++host) {
        const size_t rank = hosts.rank(host, local, per_host);
        std::memcpy(static_cast<char*>(output) + rank * input_bytes + chunk * room,
                    segment.area(first + chunk, local) + host * size, size);
      }
    }
  };
  for (size_t turn = 0; turn < chunks + depth - 1; ++turn) {
    if (turn < chunks) start(turn);
    if (turn + 1 >= static_cast<size_t>(depth)) finish(turn + 1 - depth);
  }
}

}  // namespace deepytorch
