// What this rank has called lately, to be compared with what a rank of another host has called.
//
// [Note: calls between hosts] Ranks of one host compare every call through the segment before it runs. Between hosts that
// would cost a message each way in front of every call that gloo or nccl runs. So it is done beside: twice a second the
// group's first rank writes its last calls into the store, and one rank of every other host holds them against its own. A
// running digest finds a difference however long ago it was. Until then at most half a second's calls have run.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "segment.h"

namespace deepytorch {

class CallHistory {
 public:
  // The next call. It is numbered anew: calls of another device, from another thread, may come in between.
  void add(const Fingerprint& call);
  uint64_t newest() const;  // how many there were
  // The last calls, for `difference` on another rank, which runs the same build.
  std::vector<uint8_t> lately() const;
  // What rank `other` has called otherwise than this one, `rank`, in words; empty where nothing is known of that.
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
