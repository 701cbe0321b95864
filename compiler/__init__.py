"""The compiler: from a graph that Dynamo captured to a compiled step, and the outputs of the step."""

if __name__ != "deepytorch.compiler":
    raise ImportError(
        f"this folder was imported as {__name__!r}, which would load it twice and register its operators twice: "
        "import `deepytorch.compiler` instead (`pip install -e .` makes it importable)"
    )
