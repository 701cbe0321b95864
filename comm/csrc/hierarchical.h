// reduce_scatter and all_gather over several hosts, in chunks that overlap: values are summed inside a host before they
// leave it, and arrive at a host once for all of its ranks. (The all_reduce is shared_memory.h's, with a `Between`.)
#pragma once

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

// Each needs a segment with more areas than chunks that are on their way: see `areas_needed`.
void reduce_scatter_between(Call& call, const Hosts& hosts, int depth, const void* input, void* output, size_t output_count);
void all_gather_between(Call& call, const Hosts& hosts, int depth, const void* input, void* output, size_t input_bytes);

}  // namespace deepytorch
