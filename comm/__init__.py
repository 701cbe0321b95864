"""Collectives on torch.distributed. Empty so far: gradient reduction comes with its own milestone."""

if __name__ != "deepytorch.comm":
    raise ImportError(
        f"this folder was imported as {__name__!r}, which would load it twice and register its operators twice: "
        "import `deepytorch.comm` instead (`pip install -e .` makes it importable)"
    )
