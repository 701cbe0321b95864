"""The figures of `deepytorch gpu-check`: timed checks, beside the rivals that are installed and the device's limit.

What is compiled is compiled first, beside other checks; then each row is timed alone.
"""

from deepytorch.gpu_check.figures import attention, copies, loss, networks, step

SUBJECTS = (step, loss, attention, copies, networks)
