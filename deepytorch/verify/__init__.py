"""`deepytorch verify`: a training script with the import and without, compared number by number.

`run` starts a process for each way to run the script. `worker` is the program of such a process, `recorder` writes
records while the script trains, and `records` defines them. `compare` judges the differences, and `show` prints the
verdict.
"""
