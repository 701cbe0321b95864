"""`deepytorch profile`: the time of a training step, by its parts.

`recorder` writes a record of each step while a script trains, by the `clock` of the scopes that `places` puts around
functions of deepytorch's and of torch's. `records` defines what is written. `run` starts the command, and `summary`
puts the ranks together; `advice`, `show` and `page` say what follows, on a terminal and as a page.
"""
