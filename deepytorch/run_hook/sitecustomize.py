"""The `sitecustomize` of processes below `deepytorch run`: it imports deepytorch where torch is about to be imported.

Every Python that COMMAND starts runs this first, whatever its version and its packages: so it imports next to nothing,
and has no syntax that an older one lacks. The `sitecustomize` that it hides runs as ever. The environment switches it
on and off and says nothing else: the names of what is imported stand here.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

# torch, and the packages that integrations attach to. Where one of these imports torch, its own import is under way:
# an integration would find half of it. A question whether there is a torch (`find_spec("torch")`) counts as an import.
HOSTS = frozenset(
    (
        "accelerate", "deepspeed", "lightning", "lightning_fabric", "megatron", "peft", "pytorch_lightning", "torch",
        "transformers", "trl",
    )
)  # fmt: skip


class Finder:
    """A finder on `sys.meta_path` that imports deepytorch before the first of `HOSTS`, and leaves finding to others."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Return what the other finders say, those that deepytorch has added among them; None for most modules."""
        if name not in HOSTS or self not in sys.meta_path:
            return None
        from importlib.util import find_spec

        place = sys.meta_path.index(self)
        del sys.meta_path[place]  # once is enough, and `find_spec` would ask it again
        if find_spec(name) is None or ("torch" not in sys.modules and find_spec("torch") is None):
            sys.meta_path.insert(place, self)
            return None
        import_deepytorch()
        return find_spec(name)


def import_deepytorch() -> None:
    """Import deepytorch, or say that this Python cannot."""
    try:
        __import__("deepytorch")
    except ImportError as error:
        if sys.stderr is None or os.environ.get("LOCAL_RANK", "0") != "0":
            return
        why = "is not installed there" if error.name == "deepytorch" else f"cannot be imported there ({error})"
        sys.stderr.write(
            f"deepytorch run: deepytorch {why}, so that {sys.executable} trains without it. "
            "Install it in that environment, or run a command of one that has it.\n"
        )


def is_wanted() -> bool:
    """Return whether this process is to import deepytorch once it imports torch."""
    if os.environ.get("DEEPYTORCH_RUN", "").strip().lower() != "on":
        return False
    if os.environ.get("DEEPYTORCH", "").strip().lower() == "off":
        return False
    given = getattr(sys, "orig_argv", [])
    if "-m" in given and sys.argv[0] == "-m":
        program = given[given.index("-m") + 1].replace(".", os.sep)
    else:
        program = sys.argv[0]
    return os.path.join("torch", "_inductor", "") not in program  # Inductor's processes train nothing


def run_hidden() -> None:
    """Import the `sitecustomize` that this one hides, and leave the name to it.

    Its errors, and that there is none, reach the caller as they would have without this one.
    """
    own = os.path.dirname(os.path.abspath(__file__))
    place = [os.path.abspath(entry) for entry in sys.path].index(own)
    entry = sys.path.pop(place)
    del sys.modules["sitecustomize"]
    try:
        __import__("sitecustomize")
    finally:
        sys.path.insert(place, entry)  # for programs that hand their `sys.path` to those that they start


if __name__ == "sitecustomize":
    if is_wanted():
        sys.meta_path.insert(0, Finder())
    run_hidden()
