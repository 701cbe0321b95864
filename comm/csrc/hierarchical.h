// reduce_scatter and all_gather over several hosts, in chunks that overlap: values are summed inside a host before they
// leave it, and arrive at a host once for all of its ranks. (The all_reduce is shared_memory.h's, with a `Between`.)
#pragma once

#include <algorithm>

#include "between.h"
#include "shared_memory.h"

namespace deepytorch {

// The same local rank of every host, and where all ranks are.
struct Hosts {
  Backends streams;
  int num_hosts;
  const std::vector<int>& ranks;  // [host * ranks of a host + local rank]
  HostsAgree& agree;

  int rank(int host, int local, int per_host) const { return ranks[host * per_host + local]; }
};

// What a reduce_scatter does inside a host, chunk by chunk: each rank brings what the others sum, and sums its own.
class HostSums {
 public:
  // room: elements of a chunk that each rank gets, all of which have to fit into an area. Without a segment a host is one rank.
  HostSums(Call& call, const Hosts& hosts, size_t room, const void* input, size_t output_count)
      : call_(call), hosts_(hosts), room_(room), input_(static_cast<const char*>(input)), output_count_(output_count) {}

  size_t size_of(size_t chunk) const { return std::min(room_, output_count_ - chunk * room_); }
  // Waits until all ranks of the host have brought theirs.
  void bring(size_t chunk);
  // The host's sum of what that chunk holds for this local rank of `host`; `size_of(chunk)` elements go to `target`.
  void sum_for(int host, void* target, Dtype target_dtype) const;

 private:
  const char* at_input(int host, int local) const;
  char* in_area(int from, int host, int local) const;

  Call& call_;
  const Hosts& hosts_;
  size_t room_;
  const char* input_;
  size_t output_count_;
  size_t chunk_ = 0;
  uint64_t exchange_ = 0;
};

// Equal parts that are on their way to the same local rank of every host.
struct Flight {
  at::Tensor sent, received;  // bytes, host after host
  c10::intrusive_ptr<c10d::Work> work;

  void prepare(const Hosts& hosts, size_t bytes_of_a_part);
  void start(Call& call, const Hosts& hosts, size_t chunk);
  char* part_for(int host, size_t bytes) const { return static_cast<char*>(sent.data_ptr()) + host * bytes; }
  const char* part_from(int host, size_t bytes) const { return static_cast<const char*>(received.data_ptr()) + host * bytes; }
};

// Each needs a segment with more areas than chunks that are on their way: see `areas_needed`.
void reduce_scatter_between(Call& call, const Hosts& hosts, int depth, const void* input, void* output, size_t output_count);
void all_gather_between(Call& call, const Hosts& hosts, int depth, const void* input, void* output, size_t input_bytes);

}  // namespace deepytorch
