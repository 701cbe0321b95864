"""The shaping of links between simulated hosts: rates, and the tc commands that enforce them."""

from __future__ import annotations

import re

from deepytorch.errors import ConfigError

MTU_BYTES = 1500
NUM_FLOW_LEAVES = 1024  # two of four connections share a leaf in 0.6 % of the cases; made in 0.1 s

# Measured with single TCP flows of 50 Mbit to 4 Gbit, cores idle and busy: a burst of 32 us loses up to 18 % at 4 Gbit;
# one of 128 us lets 64 KB pass at 1.2x the rate. Segments of 250 us spare the cores, whose limit is 340 Mbit with
# single frames.
_BURST_US = 64
_SEGMENT_US = 250
_QUEUE_MS = 50
_FRAME_BYTES = MTU_BYTES + 14
_MAX_SEGMENT_BYTES = 65536
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_MIN_BITS_PER_S, _MAX_BITS_PER_S = 10**6, 10**11

_OTHER_LEAF = 0x2  # for frames other than TCP over IPv4 (ARP), or for everything if flows have no cap
_FIRST_FLOW_LEAF = 0x10


def parse_rate(text: str, name: str = "rate") -> int:
    """Return the bits per second that `text` names, as tc writes them: `200mbit`, `1.5gbit`. Raises `ConfigError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)", text.strip().lower())
    bits_per_s = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not _MIN_BITS_PER_S <= bits_per_s <= _MAX_BITS_PER_S:
        raise ConfigError(
            f"{name} is {text!r}, expected a number and kbit, mbit or gbit (powers of 1000, per second), from 1mbit to "
            "100gbit: 200mbit, for example."
        )
    return bits_per_s


def segment_bytes(rate_bits_per_s: int) -> int:
    """Return the largest segment that a sender may pass to its link in one piece (GSO)."""
    return _bytes_in(rate_bits_per_s, _SEGMENT_US, _FRAME_BYTES, _MAX_SEGMENT_BYTES)


def link_commands(device: str, rate_bits_per_s: int) -> list[str]:
    """Return the tc commands that let `device` send `rate_bits_per_s` in total."""
    return [
        *_root_commands(device, rate_bits_per_s),
        *_leaf_commands(device, _OTHER_LEAF, rate_bits_per_s, rate_bits_per_s),
    ]


def flow_commands(device: str, rate_bits_per_s: int, flow_bits_per_s: int) -> list[str]:
    """Return the tc commands that limit what `device` sends, in total and per TCP connection.

    A connection has the leaf that its ports and its destination hash to; leaves borrow from the total up to the cap.
    """
    assured_bits_per_s = rate_bits_per_s // (NUM_FLOW_LEAVES + 1)
    commands = [
        *_root_commands(device, rate_bits_per_s),
        *_leaf_commands(device, _OTHER_LEAF, assured_bits_per_s, rate_bits_per_s),
    ]
    for index in range(NUM_FLOW_LEAVES):
        commands += _leaf_commands(device, _FIRST_FLOW_LEAF + index, assured_bits_per_s, flow_bits_per_s)
    return [*commands, f"filter add dev {device} parent 1: protocol all bpf bytecode '{_flow_hash()}'"]


def _root_commands(device: str, rate_bits_per_s: int) -> list[str]:
    return [
        f"qdisc add dev {device} root handle 1: htb default {_OTHER_LEAF:x}",
        f"class add dev {device} parent 1: classid 1:1 htb {_htb(rate_bits_per_s, rate_bits_per_s)}",
    ]


def _leaf_commands(device: str, leaf: int, assured_bits_per_s: int, cap_bits_per_s: int) -> list[str]:
    queue_bytes = _bytes_in(cap_bits_per_s, _QUEUE_MS * 1000, 16 * _FRAME_BYTES, 2**31)
    return [
        f"class add dev {device} parent 1:1 classid 1:{leaf:x} htb {_htb(assured_bits_per_s, cap_bits_per_s)}",
        f"qdisc add dev {device} parent 1:{leaf:x} handle {leaf:x}: bfifo limit {queue_bytes}",
    ]


def _htb(assured_bits_per_s: int, cap_bits_per_s: int) -> str:
    burst_bytes = _bytes_in(cap_bits_per_s, _BURST_US, 2 * _FRAME_BYTES, 2**31)
    return (
        f"rate {assured_bits_per_s}bit ceil {cap_bits_per_s}bit burst {burst_bytes} cburst {burst_bytes} "
        f"quantum {2 * _FRAME_BYTES}"
    )


def _bytes_in(rate_bits_per_s: int, time_us: int, at_least: int, at_most: int) -> int:
    return max(at_least, min(at_most, rate_bits_per_s * time_us // 8_000_000))


def _flow_hash() -> str:
    """Return a classic BPF program that assigns a leaf to a frame.

    Each instruction is `(code, jump if true, jump if false, operand)`.
    """
    hash_bits = NUM_FLOW_LEAVES.bit_length() - 1
    program = [
        (0x28, 0, 0, 12),  # A = EtherType
        (0x15, 0, 13, 0x0800),  # not IPv4: to the end
        (0x30, 0, 0, 23),  # A = protocol
        (0x15, 0, 11, 6),  # not TCP: to the end
        (0xB1, 0, 0, 14),  # X = length of the IPv4 header
        (0x40, 0, 0, 14),  # A = source and destination port
        (0x02, 0, 0, 0),  # keep A
        (0x20, 0, 0, 30),  # A = destination address
        (0x07, 0, 0, 0),  # X = A
        (0x60, 0, 0, 0),  # A = the kept value
        (0xAC, 0, 0, 0),  # A ^= X
        (0x24, 0, 0, 0x9E3779B1),  # A *= 2^32 / golden ratio, which spreads ports that follow each other
        (0x74, 0, 0, 32 - hash_bits),  # A = its upper bits
        (0x04, 0, 0, 0x10000 + _FIRST_FLOW_LEAF),  # A += class 1:(first leaf)
        (0x16, 0, 0, 0),  # return A, a class
        (0x06, 0, 0, 0),  # return 0: the default leaf
    ]
    return ",".join([str(len(program)), *(" ".join(map(str, step)) for step in program)])
