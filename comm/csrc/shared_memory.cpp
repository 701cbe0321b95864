#include "shared_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace deepytorch {

namespace {


struct Range {
  size_t begin, end;
  size_t size() const { return end - begin; }
};

// Elements of `count` that rank `rank` of `num` reduces.
Range slice(size_t count, size_t element, int rank, int num) {
  const size_t step = kLine / element;
  const size_t lines = (count + step - 1) / step;
  const auto bound = [&](size_t part) { return std::min(count, (lines * part / num) * step); };
  return {bound(rank), bound(rank + 1)};
}

size_t elements_of(Call& call, size_t element, size_t parts = 1) {
  const size_t room = std::min(call.chunk_bytes, call.segment ? call.most_chunk_bytes() : call.chunk_bytes) / parts;
  return std::max<size_t>(room / kLine * kLine, kLine) / element;
}

void copy(void* target, const void* source, size_t bytes) {
  if (target != source && bytes != 0) std::memcpy(target, source, bytes);
}

// Results of payloads that all together exceed it are written past the caches: nobody would find them there.
size_t last_cache_bytes() {
#ifdef _SC_LEVEL3_CACHE_SIZE
  static const long found = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (found > 0) return static_cast<size_t>(found);
#endif
  return 32 << 20;
}

}  // namespace

void HostCopies::read(void* target, size_t offset, size_t size) { copy(target, data_ + offset, size); }
void HostCopies::write(size_t offset, const void* source, size_t size) { copy(data_ + offset, source, size); }

void all_reduce_one_shot(Call& call, void* data, size_t count) {
  Segment& segment = *call.segment;
  const int num = segment.num_ranks();
  const size_t element = element_size(call.dtype), chunk = elements_of(call, element);
  const void* inputs[kMaxLocalRanks];
  for (size_t at = 0; at < count; at += chunk) {
    const size_t size = std::min(chunk, count - at);
    const uint64_t exchange = segment.next_exchange();
    char* part = static_cast<char*>(data) + at * element;
    copy(segment.area(exchange, segment.rank()), part, size * element);
    call.sync();
    for (int rank = 0; rank < num; ++rank) inputs[rank] = segment.area(exchange, rank);
    kernels().reduce(part, nullptr, inputs, num, size, call.dtype, call.dtype, call.reduce, call.divisor);
  }
}

void all_reduce_two_shot(Call& call, void* data, size_t count) {
  Segment& segment = *call.segment;
  const int num = segment.num_ranks(), me = segment.rank();
  const size_t element = element_size(call.dtype), chunk = elements_of(call, element);
  const size_t chunks = (count + chunk - 1) / chunk;
  const uint64_t first = segment.next_exchange(chunks);
  const bool streamed = count * element * num > last_cache_bytes();
  const auto take = streamed ? kernels().stream : copy;
  const auto size_of = [&](size_t number) { return std::min(chunk, count - number * chunk); };
  const auto at = [&](size_t number, size_t begin) { return static_cast<char*>(data) + (number * chunk + begin) * element; };
  const auto in_area = [&](size_t number, int rank, size_t begin) {
    return segment.area(first + number, rank) + begin * element;
  };
  const auto bring = [&](size_t number) {  // what others reduce
    for (int rank = 0; rank < num; ++rank) {
      const Range part = slice(size_of(number), element, rank, num);
      if (rank != me) copy(in_area(number, me, part.begin), at(number, part.begin), part.size() * element);
    }
  };
  const auto reduce = [&](size_t number) {
    const Range own = slice(size_of(number), element, me, num);
    const void* inputs[kMaxLocalRanks];
    for (int rank = 0; rank < num; ++rank) inputs[rank] = in_area(number, rank, own.begin);
    inputs[me] = at(number, own.begin);
    kernels().reduce(in_area(number, me, own.begin), streamed ? nullptr : at(number, own.begin), inputs, num, own.size(),
                     call.dtype, call.dtype, call.reduce, call.divisor);
  };
  const auto take_out = [&](size_t number) {
    for (int rank = 0; rank < num; ++rank) {
      const Range part = slice(size_of(number), element, rank, num);
      if (rank != me || streamed) take(at(number, part.begin), in_area(number, rank, part.begin), part.size() * element);
    }
  };
  for (size_t turn = 0; turn < chunks + 2; ++turn) {
    if (turn >= 2) take_out(turn - 2);
    if (turn >= 1 && turn <= chunks) reduce(turn - 1);
    if (turn < chunks) bring(turn);
    if (turn <= chunks) call.sync();
  }
}

void all_reduce_through(Call& call, Copies& payload, size_t count, Between* between) {
  Segment* segment = call.segment;
  const int num = segment ? segment->num_ranks() : 1, me = segment ? segment->rank() : 0;
  const size_t element = element_size(call.dtype), chunk = elements_of(call, element);
  const size_t chunks = (count + chunk - 1) / chunk, depth = between ? between->depth() : 1;
  const uint64_t first = segment ? segment->next_exchange(chunks) : 0;
  char* direct = payload.direct();
  const auto size_of = [&](size_t number) { return std::min(chunk, count - number * chunk); };
  const auto area = [&](size_t number, int rank) { return segment->area(first + number, rank); };

  // An area is filled again when all have left it: a rank that comes to chunk k has taken chunk k - depth - 1 out for good.
  const int spare = segment != nullptr ? segment->areas() - areas_needed(static_cast<int>(depth), true) : 0;
  const size_t ahead = std::clamp(1 + spare, 1, kMostAhead);
  // Where the chunk is put together: what is copied out lies in one place, each time in another rank's memory.
  const auto home = [&](size_t number) { return direct != nullptr ? me : static_cast<int>((first + number) % num); };

  const auto bring = [&](size_t number) {
    const size_t size = size_of(number), base = number * chunk;
    if (direct == nullptr) {
      payload.read(area(number, me), base * element, size * element);
      return payload.asked();
    }
    for (int rank = 0; rank < num; ++rank) {
      const Range part = slice(size, element, rank, num);
      if (rank == me) continue;
      payload.read(area(number, me) + part.begin * element, (base + part.begin) * element, part.size() * element);
    }
  };
  const auto enter = [&](size_t number) {  // reduce this rank's slice and send it on its way
    const size_t size = size_of(number), base = number * chunk;
    const Range own = slice(size, element, me, num);
    const void* inputs[kMaxLocalRanks] = {direct + base * element};
    char* result = direct + base * element;
    if (segment != nullptr) {
      payload.arrived();
      call.sync();
      if (direct == nullptr && number + ahead < chunks) bring(number + ahead);  // on its way while this one is reduced
      for (int rank = 0; rank < num; ++rank) inputs[rank] = area(number, rank) + own.begin * element;
      result = area(number, home(number)) + own.begin * element;
      if (direct != nullptr) inputs[me] = direct + (base + own.begin) * element;
    }
    if (own.size() != 0 && (num > 1 || call.divisor != 1.0)) {
      kernels().reduce(result, nullptr, inputs, num, own.size(), call.dtype, call.dtype, call.reduce, call.divisor);
    }
    if (between != nullptr) between->start(number, result, own.size());
  };
  const auto leave = [&](size_t number) {  // take everybody's slices out
    if (between != nullptr) between->finish(number);
    if (segment == nullptr) return;
    call.sync();
    const size_t size = size_of(number), base = number * chunk;
    if (direct == nullptr) payload.write(base * element, area(number, home(number)), size * element);
    for (int rank = 0; rank < num && direct != nullptr; ++rank) {
      const Range part = slice(size, element, rank, num);
      payload.write((base + part.begin) * element, area(number, rank) + part.begin * element, part.size() * element);
    }
    payload.left();
  };

  for (size_t turn = 0; turn < chunks + depth - 1; ++turn) {
    if (turn < chunks) {
      if (segment != nullptr && direct != nullptr) bring(turn);
      for (size_t number = 0; turn == 0 && direct == nullptr && number < std::min(ahead, chunks); ++number) bring(number);
      enter(turn);
    }
    if (between != nullptr) {
      for (size_t number = turn + 1 > depth ? turn + 1 - depth : 0; number < std::min(turn, chunks); ++number) {
        between->advance(number);
      }
    }
    if (turn + 1 >= depth) leave(turn + 1 - depth);
  }
}

void reduce_scatter(Call& call, const char* const* inputs, void* output, size_t output_count) {
  Segment& segment = *call.segment;
  const int num = segment.num_ranks(), me = segment.rank();
  const size_t element = element_size(call.dtype), chunk = elements_of(call, element, num), room = chunk * element;
  const void* parts[kMaxLocalRanks];
  for (size_t at = 0; at < output_count; at += chunk) {
    const size_t size = std::min(chunk, output_count - at);
    const uint64_t exchange = segment.next_exchange();
    for (int rank = 0; rank < num; ++rank) {
      if (rank != me) copy(segment.area(exchange, me) + rank * room, inputs[rank] + at * element, size * element);
    }
    call.sync();
    for (int rank = 0; rank < num; ++rank) parts[rank] = segment.area(exchange, rank) + me * room;
    parts[me] = inputs[me] + at * element;
    kernels().reduce(static_cast<char*>(output) + at * element, nullptr, parts, num, size, call.dtype, call.dtype,
                     call.reduce, call.divisor);
  }
}

void all_gather(Call& call, const void* input, char* const* outputs, size_t input_bytes) {
  Segment& segment = *call.segment;
  const int num = segment.num_ranks(), me = segment.rank();
  const size_t chunk = elements_of(call, 1);
  for (size_t at = 0; at < input_bytes; at += chunk) {
    const size_t size = std::min(chunk, input_bytes - at);
    const uint64_t exchange = segment.next_exchange();
    const char* part = static_cast<const char*>(input) + at;
    copy(segment.area(exchange, me), part, size);
    call.sync();
    for (int rank = 0; rank < num; ++rank) copy(outputs[rank] + at, rank == me ? part : segment.area(exchange, rank), size);
  }
}

namespace {

// The sizes that all ranks hand each other, as they stand at the beginning of each rank's area.
class Sizes {
 public:
  Sizes(Segment& segment, uint64_t exchange) : segment_(segment), exchange_(exchange), num_(segment.num_ranks()) {}

  static size_t bytes(int num) { return (2 * num * sizeof(uint64_t) + kLine - 1) / kLine * kLine; }
  uint64_t& sent(int from, int to) const { return table(from)[to]; }
  uint64_t& expected(int from, int to) const { return table(to)[num_ + from]; }

  // Throws on all ranks alike where one does not expect what it is sent.
  void check(const Call& call) const {
    for (int from = 0; from < num_; ++from) {
      for (int to = 0; to < num_; ++to) {
        if (sent(from, to) == expected(from, to)) continue;
        segment_.poison(std::string(name_of(call.kind)) + ", collective " + std::to_string(call.sequence) +
                        " of this group: local rank " + std::to_string(from) + " sends " + std::to_string(sent(from, to)) +
                        " bytes to local rank " + std::to_string(to) + ", which expects " +
                        std::to_string(expected(from, to)) + "; expected the same size on both");
        throw CommError(segment_.poison_message());
      }
    }
  }

 private:
  uint64_t* table(int rank) const { return reinterpret_cast<uint64_t*>(segment_.area(exchange_, rank)); }

  Segment& segment_;
  uint64_t exchange_;
  int num_;
};

}  // namespace

void exchange(Call& call, const std::vector<Part>& sent, const std::vector<Part>& received) {
  Segment& segment = *call.segment;
  const int num = segment.num_ranks(), me = segment.rank();
  const size_t head = Sizes::bytes(num), room_of_all = segment.area_bytes() - head;
  size_t total = 0;
  for (const auto& parts : {&sent, &received}) for (const Part& part : *parts) total += part.bytes;
  const auto take = total * num > last_cache_bytes() ? kernels().stream : copy;

  // The areas after the sizes are divided among those that a rank has something for; the same sum on every rank.
  const auto place = [&](const auto& bytes_to, int from, int to) {
    size_t parts = 0, before = 0;
    for (int rank = 0; rank < num; ++rank) {
      if (rank == from || bytes_to(rank) == 0) continue;
      before += rank < to;
      ++parts;
    }
    const size_t room = parts == 0 ? 0 : room_of_all / parts / kLine * kLine;
    return std::pair(room, head + before * room);
  };
  const auto own_bytes = [&](int to) { return sent[to].bytes; };

  uint64_t number = segment.next_exchange();
  const Sizes sizes(segment, number);
  for (int rank = 0; rank < num; ++rank) {
    sizes.sent(me, rank) = sent[rank].bytes;
    sizes.expected(rank, me) = received[rank].bytes;
  }
  const auto bring = [&](size_t turn) {
    for (int to = 0; to < num; ++to) {
      if (to == me || sent[to].bytes == 0) continue;
      const auto [room, at] = place(own_bytes, me, to);
      const size_t begin = turn * room;
      if (begin < sent[to].bytes) copy(segment.area(number, me) + at, sent[to].data + begin, std::min(room, sent[to].bytes - begin));
    }
  };
  bring(0);
  call.sync();
  sizes.check(call);

  size_t turns = 1;
  std::vector<std::pair<size_t, size_t>> places(num);  // of what comes from each rank
  for (int from = 0; from < num; ++from) {
    for (int to = 0; to < num; ++to) {
      if (to == from || sizes.sent(from, to) == 0) continue;
      const auto found = place([&](int rank) { return sizes.sent(from, rank); }, from, to);
      turns = std::max<size_t>(turns, (sizes.sent(from, to) + found.first - 1) / found.first);
      if (to == me) places[from] = found;
    }
  }
  take(received[me].data, sent[me].data, sent[me].bytes);
  for (size_t turn = 0;; ++turn) {
    for (int from = 0; from < num; ++from) {
      const auto [room, at] = places[from];
      const size_t begin = turn * room;
      if (from == me || begin >= received[from].bytes) continue;
      take(received[from].data + begin, segment.area(number, from) + at, std::min(room, received[from].bytes - begin));
    }
    if (turn + 1 == turns) return;
    number = segment.next_exchange();
    bring(turn + 1);
    call.sync();
  }
}

void broadcast(Call& call, void* data, size_t bytes, int root) {
  Segment& segment = *call.segment;
  const size_t chunk = elements_of(call, 1);
  for (size_t at = 0; at < bytes; at += chunk) {
    const size_t size = std::min(chunk, bytes - at);
    char* part = static_cast<char*>(data) + at;
    char* area = segment.area(segment.next_exchange(), root);
    if (segment.rank() == root) copy(area, part, size);
    call.sync();
    if (segment.rank() != root) copy(part, area, size);
  }
}

void all_reduce_in_place(Call& call, char* const* peers, size_t count) {
  const int num = call.segment->num_ranks(), me = call.segment->rank();
  const size_t element = element_size(call.dtype);
  constexpr size_t block = 32 << 10;  // bytes that go from one source to all targets while they are in the first cache
  const Range own = slice(count, element, me, num);
  const void* inputs[kMaxLocalRanks];
  for (size_t at = own.begin; at < own.end; at += block / element) {
    const size_t size = std::min(block / element, own.end - at);
    for (int rank = 0; rank < num; ++rank) inputs[rank] = peers[rank] + at * element;
    kernels().reduce(peers[0] + at * element, num > 1 ? peers[1] + at * element : nullptr, inputs, num, size, call.dtype,
                     call.dtype, call.reduce, call.divisor);
    for (int rank = 2; rank < num; ++rank) copy(peers[rank] + at * element, peers[0] + at * element, size * element);
  }
  call.sync();
}

void reduce_scatter_in_place(Call& call, char* const* peers, void* output, size_t output_count) {
  const int num = call.segment->num_ranks(), me = call.segment->rank();
  const void* inputs[kMaxLocalRanks];
  for (int rank = 0; rank < num; ++rank) inputs[rank] = peers[rank] + me * output_count * element_size(call.dtype);
  kernels().reduce(output, nullptr, inputs, num, output_count, call.dtype, call.dtype, call.reduce, call.divisor);
  call.sync();
}

void all_gather_in_place(Call& call, char* const* peers, void* output, size_t input_bytes) {
  for (int rank = 0; rank < call.segment->num_ranks(); ++rank) {
    copy(static_cast<char*>(output) + rank * input_bytes, peers[rank], input_bytes);
  }
  call.sync();
}

}  // namespace deepytorch
