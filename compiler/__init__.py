"""From a captured graph to a compiled step: backend, capture, pipeline, manager, lower_region, runtime; outputs."""

if __name__ != "deepytorch.compiler":
    raise ImportError(
        f"this folder was imported as {__name__!r}, which would load it twice and register its operators twice: "
        "import `deepytorch.compiler` instead (`pip install -e .` makes it importable)"
    )
