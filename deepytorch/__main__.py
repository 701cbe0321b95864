"""`python -m deepytorch`: the command line of a source tree that is not installed, through `PYTHONPATH`."""

from deepytorch.cli import main

if __name__ == "__main__":
    main()
