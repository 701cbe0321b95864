"""`deepytorch verify`: the same training script with the import and without, number by number.

`run` starts a process for each way to run it, `worker` is what such a process is, `recorder` what it writes down while
the script trains, `records` what is written, `compare` the judgement, and `show` how it is told.
"""
