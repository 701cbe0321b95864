"""Launch settings of kernels: the fastest of a short list on this device, measured once and kept on disk.

A setting is measured when a kernel is first launched for a class of shapes, which is in a warm-up step; later processes
read the result. Nothing is measured without a GPU, or while a CUDA graph is recorded: then the first setting of the
list is used.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from deepytorch.log import logger
from deepytorch.private_files import add_to_private_json, cache_directory, read_private_json

Setting = TypeVar("Setting", bound=Hashable)

_ROUNDS, _WARM_UP = 5, 2
_VERSION = 1
_CHOSEN: dict[tuple[str, str], int] = {}  # (a device's file, a class of shapes) -> the place in the list


_FILES: dict[int, Path] = {}  # of devices, by their number
_FOLDER: list[Path] = []  # instead of the cache, if `keep_in` was called
_MEASURES = threading.Event()
_MEASURES.set()


def fastest(
    kernel: str,
    shape_class: str,
    settings: Sequence[Setting],
    launch: Callable[[Setting], object],
    margin: float = 0.0,
) -> Setting:
    """Return the setting with which `launch` takes the least time on the current CUDA device.

    A result that was found while a launch had too little memory holds for this process only.

    Args:
        kernel: The kernel's name, with a number that changes with its code or its list ("linear_cross_entropy/2").
        shape_class: The properties that the choice depends on; few values, so that few are measured ("bf16 H4096
            V131072").
        settings: The settings to choose from. The first one is taken if nothing can be measured. One that raises when
            launched is left out.
        launch: Runs the kernel. It is called several times, so it must not depend on its earlier results.
        margin: The share of the first setting's time that another one has to save to be chosen, for ranks that measure
            separately and should agree.
    """
    if len(settings) == 1 or not torch.cuda.is_available():
        return settings[0]
    found = known(kernel, shape_class, settings)
    if found is not None or measures_nothing():
        return settings[0] if found is None else found
    path, name = _place_of(kernel, shape_class, settings)
    place, lasts = _measure(kernel, settings, launch, margin)
    _CHOSEN[str(path), name] = place
    if lasts:
        add_to_private_json(path, name, place)  # ranks write at the same time
    return settings[place]


def measures_nothing() -> bool:
    """Return whether nothing is measured now, since a CUDA graph is recorded, or by `measure(False)`.

    Then `fastest`'s result must not be kept.
    """
    return not _MEASURES.is_set() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def keep_in(folder: Path) -> None:
    """Keep what this process chooses from now on in a folder, not in the cache, whose choices it does not see."""
    _FOLDER[:] = [folder]
    _FILES.clear()
    _CHOSEN.clear()


def measure(on: bool) -> None:
    """Switch measuring off, while others use the device at the same time, and on again. Of this process alone."""
    if on:
        _MEASURES.set()
    else:
        _MEASURES.clear()


def known(kernel: str, shape_class: str, settings: Sequence[Setting]) -> Setting | None:
    """Return the setting that `fastest` has found on the current CUDA device, in any process so far, or None."""
    if not torch.cuda.is_available():
        return None
    path, name = _place_of(kernel, shape_class, settings)
    key = (str(path), name)
    if key not in _CHOSEN:
        kept = _read(path).get(name)
        if not isinstance(kept, int) or not 0 <= kept < len(settings):
            return None
        _CHOSEN[key] = kept
    return settings[_CHOSEN[key]]


def _place_of(kernel: str, shape_class: str, settings: Sequence[Setting]) -> tuple[Path, str]:
    """Return the file of the current device's choices, and the name of a choice in it."""
    device = torch.cuda.current_device()
    if device not in _FILES:
        folder = _FOLDER[0] if _FOLDER else cache_directory() / "tuned"
        _FILES[device] = folder / f"{_device_name(device)}-{_VERSION}.json"
    return _FILES[device], f"{kernel} {shape_class} of {len(settings)}"


def _device_name(device: int) -> str:
    properties = torch.cuda.get_device_properties(device)
    name = "".join(each if each.isalnum() else "-" for each in properties.name)
    return f"{name}-sm{properties.major}{properties.minor}-torch{torch.__version__.replace('+', '-')}"


def _measure(
    kernel: str, settings: Sequence[Setting], launch: Callable[[Setting], object], margin: float
) -> tuple[int, bool]:
    """Return the place of the fastest setting, and whether the result lasts: every launch had enough memory."""
    times: dict[int, float] = {}
    lasts = True
    for place, setting in enumerate(settings):
        try:
            times[place] = _milliseconds(launch, setting)
        except Exception as error:  # most often too much shared memory for this device
            lasts = lasts and not isinstance(error, torch.OutOfMemoryError)
            logger.debug("%s with %s: %s", kernel, setting, error)
    if not times:
        return 0, lasts
    best = min(times, key=lambda place: times[place])
    return (0 if 0 in times and times[best] > (1.0 - margin) * times[0] else best), lasts


def _milliseconds(launch: Callable[[Setting], object], setting: Setting) -> float:
    for _ in range(_WARM_UP):
        launch(setting)
    taken = []
    for _ in range(_ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launch(setting)
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def _read(path: Path) -> dict[str, object]:
    content = read_private_json(path)
    return content if isinstance(content, dict) else {}
