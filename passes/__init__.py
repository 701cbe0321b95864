"""Rewrites of one FX graph each, and the analyses that prove them."""

if __name__ != "deepytorch.passes":
    raise ImportError(
        f"this folder was imported as {__name__!r}, which would load it twice and register its operators twice: "
        "import `deepytorch.passes` instead (`pip install -e .` makes it importable)"
    )
