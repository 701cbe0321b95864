"""Random small models on random batches, trained by eager and by deepytorch: `python -m tests.fuzz --minutes 10`."""
