#include "call_history.h"

#include <algorithm>
#include <cstring>
#include <sstream>

namespace deepytorch {

void CallHistory::add(const Fingerprint& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  digest_ = call.digest_between_hosts(digest_);
  Entry& entry = ring_[++newest_ % kKept];
  entry = {call, digest_};
  entry.call.sequence = newest_;
}

uint64_t CallHistory::newest() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return newest_;
}

std::vector<uint8_t> CallHistory::lately() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t count = std::min<uint64_t>(newest_, kShown);
  std::vector<uint8_t> shown(count * sizeof(Entry));
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(shown.data() + i * sizeof(Entry), &ring_[(newest_ - count + 1 + i) % kKept], sizeof(Entry));
  }
  return shown;
}

std::string CallHistory::difference(const std::vector<uint8_t>& theirs, int other, int rank) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t at = 0; at + sizeof(Entry) <= theirs.size(); at += sizeof(Entry)) {
    Entry their;
    std::memcpy(static_cast<void*>(&their), theirs.data() + at, sizeof their);
    const Entry& mine = ring_[their.call.sequence % kKept];
    if (mine.call.sequence != their.call.sequence || mine.digest == their.digest) continue;  // not there yet, or alike
    std::ostringstream out;
    if (mine.call.same_between_hosts(their.call)) {
      out << "ranks disagree on a collective before number " << their.call.sequence << " of this group, more than "
          << at / sizeof(Entry) << " calls ago: rank " << rank << " and rank " << other;
    } else {
      out << "ranks disagree on collective " << their.call.sequence << " of this group: rank " << other << " called "
          << their.call.describe() << ", rank " << rank << " called " << mine.call.describe();
    }
    out << "; expected the same call on every rank, in the same order: look at what leads to this call on each rank. It "
           "went to gloo or nccl, which may have run it, and calls after it, with wrong numbers";
    return out.str();
  }
  return "";
}

}  // namespace deepytorch
