"""Graphs are compiled beside training, which goes on in eager meanwhile.

[Note: Compiled beside]
A graph that is to be compiled is described as data (`graph_data`, `job`), and sent to a process that compiles the same
graph for arguments of the same sizes (`worker`). It runs nothing: what it leaves are entries in the caches on disk that
`torch.compile` has, by the very keys that this process will look up. When it is done (`queue`), this process compiles
the graph the ordinary way and finds all of it there. If it does not, because something that the key covers is not the
same after all, it compiles in place: slow, and right.

The process has low priority, no terminal, and ends when its parent does. A graph that cannot be sent, on a GPU or with
operators that only this process knows, is compiled by this process, and training waits.
"""
