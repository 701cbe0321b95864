// The order of our locks and the interpreter's lock (GIL).
//
// [Note: our locks and the interpreter's] Python threads come here with the GIL and wait for a lock of ours. So a thread
// that holds a lock of ours must not wait for the GIL: the two threads would wait for each other. Such a wait is easily
// overlooked. A tensor, a thread's state (at::ThreadLocalState: hooks of saved tensors, objects that a compiled backward
// keeps there) and a work may hold Python objects, and copying or dropping them takes the GIL. So they are made and copied
// before a lock is taken, and dropped after the lock is released; the same holds for the last reference to a segment,
// whose destructor may call Python. A thread that waits for the end of another thread that drops tensors, as in the
// destructors of groups, releases the GIL first: Python calls the destructors with the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace deepytorch {

// Releases the GIL for the lifetime of this object: the thread that this one waits for may need the GIL.
class WithoutGil {
 public:
  WithoutGil() { if (Py_IsInitialized() && PyGILState_Check()) released_.emplace(); }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

}  // namespace deepytorch
