// The parts of `Backend` as one translation unit: reading torch's headers takes most of the time that compiling takes.
#include "backend/backend.cpp"
#include "backend/collectives.cpp"
#include "backend/handed_on.cpp"
#include "backend/moves.cpp"
#include "backend/work_queue.cpp"
