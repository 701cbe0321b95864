"""Discovery of this host's hardware from sysfs, procfs and (if installed) NVML.

No function here fails: what is not found is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from itertools import combinations
from pathlib import Path
from typing import Any

from deepytorch.comm.topology.host import Gpu, Host, NetworkDevice, NumaNode, PcieKind

_ETHERNET, _INFINIBAND = "1", "32"  # ARPHRD_*: what /sys/class/net/*/type holds
_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")  # PCI: VGA and 3D controllers
_NVLINKS_ASKED = 36  # NVML's own limit; a GPU with fewer links returns an error for the rest
# NVML's levels of the closest common ancestor of two GPUs
_SAME_SWITCH_UP_TO, _HOST_BRIDGE_UP_TO = 20, 40


def discover_host() -> Host:
    """Describe this host. GPUs come from NVML (`nvidia-ml-py`) if installed, else by number and name from torch.

    Discovery only reads, and makes no CUDA context. A CPU-only machine, another system than Linux or a container
    without sysfs give a host with fewer details, never an error.
    """
    gpus, nvlinks, pcie_paths = _gpus_by_nvml() or (_gpus_by_torch(), (), ())
    return Host(
        id=host_id(),
        cpus=os.cpu_count() or 1,
        numa_nodes=numa_nodes(),
        gpus=gpus,
        nvlinks=nvlinks,
        pcie_paths=pcie_paths,
        network=network_devices(),
        name=platform.node(),
    )


def host_id(proc: Path = Path("/proc"), shared_memory: Path = Path("/dev/shm")) -> str:
    """Return an id that is equal for two processes exactly when they can share memory: 16 hexadecimal digits.

    Such processes run under one kernel, reach each other without a network and see the same shared memory. The id is
    made of the boot id, the network namespace and the device of /dev/shm: network namespaces on one machine count as
    separate hosts, and so do containers that share no /dev/shm.
    """
    boot = _read(proc / "sys/kernel/random/boot_id") or platform.node()
    network, memory = "", ""
    with contextlib.suppress(OSError):
        network = str((proc / "self/ns/net").stat().st_ino)
    with contextlib.suppress(OSError):
        memory = str(shared_memory.stat().st_dev)
    return hashlib.sha256(f"{boot} {network} {memory}".encode()).hexdigest()[:16]


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes with their processors, by index."""
    nodes = []
    for folder in _listed(root):
        suffix = folder.name.removeprefix("node")
        cpulist = _read(folder / "cpulist") if suffix.isdigit() else None
        if cpulist is not None:
            nodes.append(NumaNode(int(suffix), cpulist))
    return tuple(sorted(nodes, key=lambda node: node.index))


def network_devices(
    net: Path = Path("/sys/class/net"), infiniband: Path = Path("/sys/class/infiniband")
) -> tuple[NetworkDevice, ...]:
    """Return the devices that lead out of the host: no loopback, bridges, ports of bridges, or devices that are down.

    A virtual device counts if it is a bond or has a peer elsewhere (veth, VLAN), as in containers.
    """
    tcp = [_tcp_device(folder) for folder in _listed(net) if _leads_out(folder)]
    rdma = [_rdma_device(port) for device in _listed(infiniband) for port in _listed(device / "ports")]
    return (*tcp, *(device for device in rdma if device is not None))


def _leads_out(folder: Path) -> bool:
    if _read(folder / "type") not in (_ETHERNET, _INFINIBAND) or _read(folder / "operstate") == "down":
        return False
    if (folder / "bridge").exists() or (folder / "brport").exists() or (folder / "bonding_slave").exists():
        return False
    if "virtual" not in folder.resolve().parts:
        return True
    return (folder / "bonding").exists() or _read(folder / "iflink") != _read(folder / "ifindex")


def _tcp_device(folder: Path) -> NetworkDevice:
    return NetworkDevice(folder.name, "tcp", _positive(_read(folder / "speed")), _node(folder / "device/numa_node"))


def _rdma_device(port: Path) -> NetworkDevice | None:
    if "ACTIVE" not in (_read(port / "state") or ""):
        return None
    device = port.parent.parent
    gigabit = (_read(port / "rate") or "").partition(" ")[0]  # "400 Gb/sec (4X NDR)"
    speed_mbit = None
    with contextlib.suppress(ValueError):
        speed_mbit = round(1000 * float(gigabit))
    name = device.name if port.name == "1" else f"{device.name}:{port.name}"
    return NetworkDevice(name, "rdma", speed_mbit, _node(device / "device/numa_node"))


_Gpus = tuple[tuple[Gpu, ...], tuple[tuple[int, int, int], ...], tuple[tuple[int, int, PcieKind], ...]]


def _gpus_by_nvml() -> _Gpus | None:
    """Return GPUs, NVLinks and PCIe paths, or None without NVML or a GPU.

    All GPUs are listed, whatever CUDA_VISIBLE_DEVICES says.
    """
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
    except Exception:  # not installed, no driver, or a driver that does not answer: all are handled alike
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        gpus = tuple(_gpu_by_nvml(pynvml, index, handle) for index, handle in enumerate(handles))
        return (gpus, _nvlinks(pynvml, handles), _pcie_paths(pynvml, handles)) if gpus else None
    except Exception:
        return None
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def _gpu_by_nvml(nvml: Any, index: int, handle: Any) -> Gpu:
    name = _text(nvml.nvmlDeviceGetName(handle))
    memory = generation = width = None
    with contextlib.suppress(Exception):
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    with contextlib.suppress(Exception):
        generation = int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
        width = int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    return Gpu(
        index,
        name,
        memory,
        _node(Path("/sys/bus/pci/devices") / _bus_id(nvml, handle) / "numa_node"),
        generation,
        width,
    )


def _bus_id(nvml: Any, handle: Any) -> str:
    try:
        return _in_sysfs(nvml.nvmlDeviceGetPciInfo(handle).busId)
    except Exception:
        return "unknown"


def _in_sysfs(address: str | bytes) -> str:
    """Return a PCI address as sysfs spells it: four digits of the domain, in lower case."""
    domain, _, rest = _text(address).lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _nvlinks(nvml: Any, handles: list[Any]) -> tuple[tuple[int, int, int], ...]:
    index_of = {_bus_id(nvml, handle): index for index, handle in enumerate(handles)}
    pairs: dict[tuple[int, int], int] = {}
    to_switch = [0] * len(handles)
    for index, handle in enumerate(handles):
        for link in range(_NVLINKS_ASKED):
            peer = _peer_of_nvlink(nvml, handle, link, index_of)
            if peer is None:
                continue
            if peer < 0:
                to_switch[index] += 1
            elif index < peer:  # the other end reports the same link
                pairs[index, peer] = pairs.get((index, peer), 0) + 1
    for low, high in combinations(range(len(handles)), 2):
        through = min(to_switch[low], to_switch[high])
        if through:
            pairs[low, high] = pairs.get((low, high), 0) + through
    return tuple((low, high, links) for (low, high), links in sorted(pairs.items()))


def _peer_of_nvlink(nvml: Any, handle: Any, link: int, index_of: dict[str, int]) -> int | None:
    """Return the index of the GPU at the other end of an NVLink; -1: a switch; None: the link is absent or down."""
    try:
        if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
            return None
        address = _in_sysfs(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
    except Exception:
        return None
    return index_of.get(address, -1)


def _pcie_paths(nvml: Any, handles: list[Any]) -> tuple[tuple[int, int, PcieKind], ...]:
    paths: list[tuple[int, int, PcieKind]] = []
    for (low, first), (high, second) in combinations(enumerate(handles), 2):
        with contextlib.suppress(Exception):
            level = int(nvml.nvmlDeviceGetTopologyCommonAncestor(first, second))
            paths.append((low, high, _pcie_kind(level)))
    return tuple(paths)


def _pcie_kind(level: int) -> PcieKind:
    if level <= _SAME_SWITCH_UP_TO:
        return "same_switch"
    return "host_bridge" if level <= _HOST_BRIDGE_UP_TO else "across_sockets"


def _gpus_by_torch() -> tuple[Gpu, ...]:
    """Return GPUs by number, with their names only if CUDA is already initialised.

    Asking for a name would initialise CUDA, after which the process could not fork.
    """
    try:
        import torch

        known = torch.cuda.is_initialized()
        count = torch.cuda.device_count()
        properties = [torch.cuda.get_device_properties(index) if known else None for index in range(count)]
    except Exception:
        return ()
    nodes = gpu_nodes()
    if len(nodes) != count:  # some are hidden from this process, and it is not known which
        nodes = [None] * count
    return tuple(
        Gpu(index, "CUDA device", None, node)
        if found is None
        else Gpu(index, str(found.name), int(found.total_memory), node)
        for index, (found, node) in enumerate(zip(properties, nodes, strict=True))
    )


def gpu_nodes(devices: Path = Path("/sys/bus/pci/devices")) -> list[int | None]:
    """Return the NUMA nodes of NVIDIA GPUs in the order of their PCI addresses, which is NVML's order.

    None: the firmware does not say.
    """
    found = [
        device
        for device in _listed(devices)
        if _read(device / "vendor") == _NVIDIA and (_read(device / "class") or "").startswith(_DISPLAYS)
    ]
    return [_node(device / "numa_node") for device in found]


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # such as EINVAL, for the speed of a device that has none
        return None


def _positive(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else None


def _node(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None  # -1: the firmware did not say


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
