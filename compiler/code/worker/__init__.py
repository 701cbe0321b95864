"""Compilation of graphs in the background, while training goes on in eager.

[Note: The compile process]
A graph to compile is described as data (`graph_data`, `job`) and sent to a worker process, which compiles the same
graph for arguments of the same sizes (`worker`). The worker runs nothing: it leaves entries in `torch.compile`'s caches
on disk, under the very keys that this process will look up. When the worker is done (`queue`), this process compiles
the graph the ordinary way and finds everything in the caches. If it does not, because something that the key covers
differs after all, it compiles in place: slow, and right.

The worker has low priority, no terminal, and ends when its parent does. A graph that cannot be sent, because it is on a
GPU or has operators that only this process knows, is compiled by this process, and training waits.

With the option `gpu_background` a graph on a GPU is sent, too. The worker then compiles from fake tensors, and both
sides keep the parts of the key (`keys`), so that a report can say why code was not found.
"""
