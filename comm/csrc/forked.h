// Whether a process was forked, without a system call: a group asks before every call.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace deepytorch {

// Forks between the process that loaded this library and this one: another number in a forked child than in its parent.
inline std::atomic<uint32_t> num_forks{0};
inline const int counts_forks = pthread_atfork(nullptr, nullptr, [] { ++num_forks; });

}  // namespace deepytorch
