"""Benchmark suites: the gain of deepytorch on this machine, relative to eager and to stock torch.compile."""
