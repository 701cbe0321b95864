// The interpreter's lock (GIL) beside ours.
//
// [Note: our locks and the interpreter's] Python threads come here with the interpreter's lock and wait for a lock of ours.
// So whoever holds one of ours must not wait for the interpreter's: he would wait for a thread that waits for him. That is
// easily done unseen. A tensor, a thread's state (at::ThreadLocalState: hooks of saved tensors, what a compiled backward
// keeps there) and a work may hold Python objects, and copying or dropping them takes the interpreter's lock. So they are
// made and copied before a lock is taken, and dropped after it is let go; the same holds for the last reference to a
// segment, whose end may call Python. And whoever waits for the end of a thread that drops tensors, as the destructors of
// groups do, lets go of the interpreter's lock before: Python calls them with it.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace deepytorch {

// Without the interpreter's lock for as long as it lives: what this thread waits for may need it.
class WithoutGil {
 public:
  WithoutGil() { if (Py_IsInitialized() && PyGILState_Check()) released_.emplace(); }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

}  // namespace deepytorch
