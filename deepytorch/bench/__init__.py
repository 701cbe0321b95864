"""Benchmark suites: what deepytorch gains on this machine, against eager and against stock torch.compile."""
