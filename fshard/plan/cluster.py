"""`Cluster`: the numbers of a machine that time depends on. A value, read from a TOML file and written to one.

peak numbers    of the vendor: operations by dtype, memory and its bandwidth, links
efficiency      the part of them that programs get: seven constants, the same for every model
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fshard.errors import PlanError
from fshard.mesh.layout import Mesh

PRESETS = ("a100", "h100", "h200", "b200", "cpu")


@dataclass(frozen=True)
class NetworkLink:
    """A level of the network: between the devices of a group of so many (0: of any number).

    Args:
        devices: of a group, such as those of a node.
        bandwidth: bytes per second that a device sends.
        latency: seconds of a message.
    """

    devices: int
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Efficiency:
    """The part of peak numbers that programs get.

    Args:
        matmul: of peak operations, in large matrix products.
        half: the operations of a product that gets half of that.
        attention: of peak operations, in fused attention.
        memory: of the memory's bandwidth.
        launch: seconds of the smallest operation.
        link: of a link's bandwidth.
        overlap: 1 if collectives run beside the computation, as on GPUs; 0 if they take the same cores.
    """

    matmul: float = 0.75
    half: float = 2e9
    attention: float = 0.5
    memory: float = 0.8
    launch: float = 4e-6
    link: float = 0.8
    overlap: int = 1


@dataclass(frozen=True)
class Cluster:
    """A machine: see `cluster`.

    Args:
        name: of the device.
        flops: operations per second of matrix products, by dtype, such as {"bf16": 989e12}; others take "f32".
        memory: bytes of a device.
        bandwidth: bytes per second of its memory.
        host, disk: bytes per second between a device and these.
        links: from the innermost level to the outermost, which takes any number of devices.
        efficiency: the part that programs get.
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    host: float
    disk: float
    links: tuple[NetworkLink, ...]
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        sizes = [link.devices for link in self.links]
        errors = [] if "f32" in self.flops else ['flops must have "f32"']
        errors += [] if sizes and not sizes[-1] and all(sizes[:-1]) and sizes[:-1] == sorted(sizes[:-1]) else [
            f"links must go from small groups to devices=0, which is any number; got {sizes}"
        ]  # fmt: skip
        numbers = {name: getattr(self, name) for name in ("memory", "bandwidth", "host", "disk")}
        numbers |= {f"flops.{dtype}": x for dtype, x in self.flops.items()}
        numbers |= {f"links[{i}].bandwidth": link.bandwidth for i, link in enumerate(self.links)}
        errors += [f"{name} must be > 0; got {x}" for name, x in numbers.items() if not x > 0]
        if errors:
            raise PlanError(f"cluster {self.name}: {'; '.join(errors)}.")

    def peak(self, dtype: str) -> float:
        """Return the operations per second of matrix products in a dtype."""
        return self.flops.get(dtype, self.flops["f32"])

    def seconds_of_operation(self, name: str, dtype: str, flops: int, traffic: int) -> float:
        """Return the time of an operation: of its arithmetic or of its memory, whichever is longer."""
        part = self.efficiency
        reached = (
            part.attention
            if "attention" in name
            else part.matmul * flops / (flops + part.half)
            if flops
            else 1.0
        )
        arithmetic = flops / (self.peak(dtype) * reached)
        return max(arithmetic, traffic / (self.bandwidth * part.memory), part.launch)

    def level(self, mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, float, float]:
        """Return the level of the network that a group along some axes uses, its bandwidth and its latency.

        Devices are numbered along the mesh, the last axis first. A group with several devices in a node has the links of
        all of them to other nodes.
        """
        members, stride = {0}, 1
        for axis, size in reversed(mesh.axes):
            if axis in axes:
                members = {member + stride * i for member in members for i in range(size)}
            stride *= size
        bandwidth = float("inf")
        for number, link in enumerate(self.links):
            inner = self.links[number - 1].devices if number else 1
            senders = len([member for member in members if member < inner])
            bandwidth = min(bandwidth, link.bandwidth * senders)
            if not link.devices or max(members) < link.devices:
                return number, bandwidth * self.efficiency.link, link.latency
        raise AssertionError("the last link takes any number of devices")

    def level_between(self, source: int, to: int) -> tuple[int, float, float]:
        """Return the level of the network between two devices, its bandwidth and its latency."""
        number = next(
            i
            for i, link in enumerate(self.links)
            if not link.devices or source // link.devices == to // link.devices
        )
        bandwidth = min(link.bandwidth for link in self.links[: number + 1])
        return number, bandwidth * self.efficiency.link, self.links[number].latency

    def save(self, path: str | Path) -> None:
        """Write a TOML file, which `cluster` reads."""
        tables = {"flops": dict(self.flops), "efficiency": asdict(self.efficiency)}
        lines = [f'name = "{self.name}"', *(f"{key} = {getattr(self, key)!r}" for key in _NUMBERS)]
        for title, table in tables.items():
            lines += ["", f"[{title}]", *(f"{key} = {x!r}" for key, x in table.items())]
        for link in self.links:
            lines += ["", "[[links]]", *(f"{key} = {x!r}" for key, x in asdict(link).items())]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


_NUMBERS = ("memory", "bandwidth", "host", "disk")


def cluster(name: str | Path, *, node: int | None = None) -> Cluster:
    """Return a machine by the name of its GPU, or from a TOML file.

    Args:
        name: "a100", "h100", "h200", "b200", "cpu", or the path of a file, as `fshard calibrate` writes it.
        node: devices of a node; default: as in the file.

    >>> cluster("h100", node=8).links[0].devices, cluster("h100").peak("bf16")
    (8, 989000000000000.0)
    """
    path = Path(name)
    if str(name) in PRESETS:
        text = (files("fshard.plan") / "clusters" / f"{name}.toml").read_text(encoding="utf-8")
    elif path.suffix == ".toml" and path.is_file():
        text = path.read_text(encoding="utf-8")
    else:
        raise PlanError(
            f"cluster must be one of {', '.join(PRESETS)}, or the path of a .toml file; got {str(name)!r}."
        )
    machine = _from_toml(text, str(name))
    if node is None:
        return machine
    if node < 1 or len(machine.links) < 2:
        raise PlanError(
            f"cluster {name}: node must be >= 1, of a machine with links in a node; got {node}."
        )
    return replace(machine, links=(replace(machine.links[0], devices=node), *machine.links[1:]))


def _from_toml(text: str, name: str) -> Cluster:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"cluster {name}: the file must be TOML; {error}.") from error
    errors = _key_errors(table, Cluster, "")
    links = table.get("links", [])
    errors += [
        error
        for i, link in enumerate(links)
        for error in _key_errors(link, NetworkLink, f"links[{i}].")
    ]
    errors += _key_errors(table.get("efficiency", {}), Efficiency, "efficiency.")
    if errors:
        raise PlanError(f"cluster {name}: {'; '.join(errors)}.")
    table["links"] = tuple([NetworkLink(**link) for link in links])
    table["efficiency"] = Efficiency(**table.get("efficiency", {}))
    return Cluster(**table)


def _key_errors(table: Mapping[str, Any], kind: Any, prefix: str) -> list[str]:
    """Return what is wrong with the keys of a table."""
    legal = {field.name: field for field in fields(kind)}
    needed = [key for key in legal if kind is not Efficiency and key != "efficiency"]
    errors = [
        f"{prefix}{key} is unknown; the keys are {', '.join(legal)}"
        for key in table
        if key not in legal
    ]
    errors += [f"{prefix}{key} is missing" for key in needed if key not in table]
    numeric = [
        key for key in table if key in legal and key not in ("name", "flops", "links", "efficiency")
    ]
    errors += [
        f"{prefix}{key} must be a number; got {table[key]!r}"
        for key in numeric
        if type(table[key]) not in (int, float)
    ]
    return errors
