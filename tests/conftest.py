"""What every test stands on: caches of its own, fixed seeds, and the marks that need a machine to run on."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# Before torch is imported, by this process or by one that a test starts: no test reads or fills a cache of the user's,
# none reaches for the network, and none is switched by the user's environment.
for _name in [name for name in os.environ if name.startswith("DEEPYTORCH")]:
    del os.environ[_name]
if "PYTEST_XDIST_WORKER" in os.environ:  # the native code is compiled once for all processes of a run
    _CACHES = Path(os.environ["XDG_CACHE_HOME"]).parent / os.environ["PYTEST_XDIST_WORKER"]
    _SHARED = Path(os.environ["XDG_CACHE_HOME"])
    _CACHES.mkdir(mode=0o700, exist_ok=True)
else:
    _CACHES = Path(tempfile.mkdtemp(prefix="deepytorch-tests-"))
    _SHARED = _CACHES / "xdg"
    _SHARED.mkdir(mode=0o700)
    atexit.register(shutil.rmtree, _CACHES, ignore_errors=True)
for _name, _folder in {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "HF_HOME": "huggingface",
    "MPLCONFIGDIR": "matplotlib",
}.items():
    (_CACHES / _folder).mkdir(mode=0o700, exist_ok=True)
    os.environ[_name] = str(_CACHES / _folder)
os.environ["XDG_CACHE_HOME"] = str(_SHARED)
if not Path("/dev/nvidiactl").exists():  # before a kernel is imported
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["DEEPYTORCH_COMPILE"] = "wait"  # but for the tests of what runs meanwhile
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg", PYTHONHASHSEED="0")

import torch  # noqa: E402

# pytest listens to loggers that do not propagate, and torch writes every graph and guard down for who listens here.
logging.getLogger("torch.__trace").propagate = True

from hypothesis import HealthCheck, settings  # noqa: E402

from deepytorch.switch import SWITCH  # noqa: E402

SWITCH.enabled = False  # tests say themselves what is compiled; those of the import run in processes of their own

from deepytorch.comm.group.native import native as collectives  # noqa: E402
from deepytorch.errors import BuildError  # noqa: E402
from deepytorch.extension import Extension  # noqa: E402
from deepytorch.passes.ops.native import can_run  # noqa: E402
from deepytorch.passes.ops.native import native as operators  # noqa: E402
from deepytorch.private_files import cache_directory, prepare_private  # noqa: E402

# The same examples in every run: what a search finds elsewhere becomes a test of its own.
settings.register_profile(
    "deepytorch",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
settings.load_profile("deepytorch")


def pytest_configure(config: pytest.Config) -> None:
    """Take the native code from an earlier run of the same sources, compiler and torch, or compile attention: tests
    have deadlines, and the first that packs would wait for it."""
    if hasattr(config, "workerinput"):
        return  # the first process does it for all
    for extension in (collectives, operators):
        kept = _kept(config, extension)
        if kept is not None and kept.exists():
            for folder in (cache_directory(), _file(extension).parent.parent, _file(extension).parent):
                prepare_private(folder)
            shutil.copyfile(kept, _file(extension))
    if can_run():
        with contextlib.suppress(BuildError):  # tests that need it will say so
            operators.build()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep what was compiled for the next run."""
    for extension in (collectives, operators):
        kept = _kept(session.config, extension)
        if kept is not None and _file(extension).exists() and not kept.exists():
            for older in kept.parent.glob(f"{extension.name}-*.so"):
                older.unlink()
            shutil.copyfile(_file(extension), kept.with_suffix(".new"))
            kept.with_suffix(".new").replace(kept)


def _kept(config: pytest.Config, extension: Extension) -> Path | None:
    if hasattr(config, "workerinput") or getattr(config, "cache", None) is None:
        return None  # the first process does it for all; or pytest's cache is switched off
    folder = Path(config.cache.mkdir("deepytorch-native"))  # type: ignore[union-attr]
    return folder / f"{extension.name}-{extension.digest()}.so"


def _file(extension: Extension) -> Path:
    return cache_directory() / "native" / extension.digest() / f"{extension.name}.so"


def pytest_collection_finish() -> None:
    """Look for garbage less often: compilers make a million objects a test, and a tenth of the time went."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, with the reason."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reasons = {
        "gpu": None if num_gpus else "needs a CUDA device",
        "multigpu": None if num_gpus > 1 else f"needs two CUDA devices, found {num_gpus}",
        "lab": _why_no_lab(),
    }
    for item in items:
        for mark, reason in reasons.items():
            if reason is not None and item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_lab() -> str | None:
    if sys.platform != "linux":
        return "network namespaces are Linux only"
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    return None if shutil.which("ip") else "needs the ip command (iproute2)"


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Every test begins with the same seeds and without the graphs that another one compiled."""
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
