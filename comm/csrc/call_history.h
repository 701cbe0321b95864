// What this rank has called lately, to be compared with what a rank of another host has called.
//
// [Note: calls between hosts] Ranks of one host compare every call through the segment before it runs. Between hosts the
// same would cost a message each way before every call that gloo or nccl runs. So hosts compare in the background: twice a
// second the group's first rank writes its last calls into the store, and one rank of every other host compares them with
// its own. A running digest finds a difference of any age. Until then at most half a second's calls have run.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "segment.h"

namespace deepytorch {

class CallHistory {
 public:
  // Adds a call under a number of its own: calls on another device, from another thread, may come in between.
  void add(const Fingerprint& call);
  uint64_t newest() const;  // how many there were
  // The last calls, for `difference` on another rank, which runs the same build.
  std::vector<uint8_t> lately() const;
  // Says how the calls of rank `other` differ from those of this rank, `rank`; empty if no difference is known.
  std::string difference(const std::vector<uint8_t>& theirs, int other, int rank) const;

 private:
  struct Entry {
    Fingerprint call;
    uint64_t digest;  // of this call and all before it
  };
  static constexpr size_t kKept = 8192, kShown = 32;

  mutable std::mutex mutex_;
  std::vector<Entry> ring_ = std::vector<Entry>(kKept);  // a call's place is its number modulo kKept
  uint64_t newest_ = 0, digest_ = 0;
};

}  // namespace deepytorch
