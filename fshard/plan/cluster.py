"""`Cluster`: the numbers of a machine on which time depends, as a value that a TOML file holds.

peak numbers    of the vendor: operations by dtype, memory and its bandwidth, links
efficiency      the part of them that programs get: ten constants, the same for every model
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from math import log, sqrt
from pathlib import Path
from typing import Any, NamedTuple

from fshard.errors import PlanError
from fshard.mesh.layout import Mesh
from fshard.tables import Table, TableCell, TableColumn, Tabular

PRESETS = ("a100", "h100", "h200", "b200", "cpu")
"""The names of `cluster`: the files of the folder `clusters`."""


# Note [The slowest of many]
# A step waits for the slowest of its n devices, and a collective between nodes for the most
# loaded of the links of n nodes. Both are the largest of n samples, which for a normal
# distribution of mean 1 and deviation d is about
#
#     1 + d sqrt(2 ln n)
#
# (Fisher and Tippett 1928; the leading term for large n). So times grow with the logarithm of
# n, faster at first. d is `spread` for devices of one kind, whose speeds differ by their chips
# and their cooling, and `collisions` for links, where a network hashes several flows to one.
# One pair of numbers holds for all machines of GPUs: it was fitted to published runs.


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
        overlap: 1 if collectives run beside the computation, as on GPUs; 0 if they take the same
            cores.
        contention: of a collective's time, that the computation beside it loses.
        spread, collisions: see Note [The slowest of many].
    """

    matmul: float = 0.75
    half: float = 2e9
    attention: float = 0.5
    memory: float = 0.8
    launch: float = 4e-6
    link: float = 0.8
    overlap: int = 1
    contention: float = 0.0
    spread: float = 0.0
    collisions: float = 0.0


class NetworkLevel(NamedTuple):
    """A level of the network, as some devices use it.

    Args:
        number: of the level, 0 for the innermost.
        bandwidth: bytes per second.
        latency: seconds of a message.
    """

    number: int
    bandwidth: float
    latency: float


@dataclass(frozen=True, repr=False)
class Cluster(Tabular):
    """A machine: see `cluster`. Prints as a table, with units.

    Args:
        name: of the device.
        flops: operations per second of matrix products, by dtype, such as {"bf16": 989e12}; others
            take "f32".
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
        errors = list[str]()
        if "f32" not in self.flops:
            errors.append('flops must have "f32"')

        sizes = [link.devices for link in self.links]
        ends_in_any_number = bool(sizes) and sizes[-1] == 0
        grows = all(sizes[:-1]) and sizes[:-1] == sorted(sizes[:-1])
        if not ends_in_any_number or not grows:
            errors.append(
                f"links must go from small groups to devices=0, which is any number; got {sizes}"
            )

        # Each of them divides a number of bytes or operations.
        rates = {name: vars(self)[name] for name in _NUMBERS}
        for dtype, flops in self.flops.items():
            rates[f"flops.{dtype}"] = flops
        for index, link in enumerate(self.links):
            rates[f"links[{index}].bandwidth"] = link.bandwidth
        for name, rate in rates.items():
            if not rate > 0:  # NaN is refused too
                errors.append(f"{name} must be > 0; got {rate}")
        if errors:
            raise PlanError(f"cluster {self.name}: {'; '.join(errors)}.")

    def peak(self, dtype: str) -> float:
        """Return the operations per second of matrix products in a dtype."""
        return self.flops.get(dtype, self.flops["f32"])

    def seconds_of_operation(self, name: str, dtype: str, flops: int, traffic: int) -> float:
        """Return the time of an operation: of arithmetic or memory, whichever is longer.

        Products reach a part of the peak that grows with their size: `half` operations reach one
        half of what large ones do.
        """
        part = self.efficiency
        if "attention" in name:
            reached = part.attention
        elif flops:
            reached = part.matmul * flops / (flops + part.half)
        else:
            reached = 1.0  # no arithmetic: any number but 0
        seconds_of_arithmetic = flops / (self.peak(dtype) * reached)
        seconds_of_memory = traffic / (self.bandwidth * part.memory)
        return max(seconds_of_arithmetic, seconds_of_memory, part.launch)

    # -- the network ------------------------------------------------------------------------------

    def level(self, mesh: Mesh, axes: tuple[str, ...]) -> NetworkLevel:
        """Return the level of the network that a group along some axes uses.

        Devices are numbered along the mesh, the last axis first. A group with several devices in a
        node has the links of all of them to other nodes.
        """
        members = _group_of_first_device(mesh, axes)
        bandwidth = float("inf")
        inner = 1  # devices inside of which the links of the level before connect
        for number, link in enumerate(self.links):
            # A ring leaves each inner group through all of its members at once.
            senders = len([member for member in members if member < inner])
            bandwidth = min(bandwidth, link.bandwidth * senders)
            takes_any_number = link.devices == 0
            if takes_any_number or max(members) < link.devices:
                return self._reached(number, bandwidth, mesh.size)
            inner = link.devices
        raise AssertionError("the last link takes any number of devices")

    def level_between(self, source: int, target: int, devices: int = 1) -> NetworkLevel:
        """Return the level of the network between two devices of a mesh."""
        bandwidth = float("inf")
        for number, link in enumerate(self.links):
            bandwidth = min(bandwidth, link.bandwidth)
            takes_any_number = link.devices == 0
            if takes_any_number or source // link.devices == target // link.devices:
                return self._reached(number, bandwidth, devices)
        raise AssertionError("the last link takes any number of devices")

    def _reached(self, number: int, bandwidth: float, devices: int) -> NetworkLevel:
        """Return a level that all of some devices use at once."""
        reached = bandwidth * self.efficiency.link
        if number > 0:
            nodes = devices // self.links[number - 1].devices
            reached /= _slowest(nodes, self.efficiency.collisions)
        return NetworkLevel(number, reached, self.links[number].latency)

    def slowest(self, devices: int) -> float:
        """Return the time of the slowest of some devices, of which the mean is 1."""
        return _slowest(devices, self.efficiency.spread)

    @property
    def steady(self) -> Cluster:
        """The machine with devices that are all alike."""
        return replace(self, efficiency=replace(self.efficiency, spread=0.0))

    def table(self) -> Table:
        """Return the numbers with their units, as a table."""
        columns = (TableColumn("what"), TableColumn("of"), TableColumn("amount", "count"))
        table = Table(columns, title=self.name)
        table.add("memory", "of a device", _rounded(self.memory, 1e9, "GB"))
        table.add("bandwidth", "of the memory", _rounded(self.bandwidth, 1e9, "GB/s"))
        for name, rate in (("host", self.host), ("disk", self.disk)):
            table.add(
                TableCell("bandwidth", text=""), f"to the {name}", _rounded(rate, 1e9, "GB/s")
            )
        for number, (dtype, rate) in enumerate(self.flops.items()):
            name = TableCell("peak", text="" if number else None)
            table.add(name, dtype, _rounded(rate, 1e12, "TFLOP/s"))

        for link in self.links:
            group = f"of {link.devices:,} devices" if link.devices else "of any number of devices"
            table.add("link", group, _rounded(link.bandwidth, 1e9, "GB/s"))
            table.add("latency", group, _rounded(link.latency, 1e-6, "µs"))

        table.add_section()
        for number, (name, part) in enumerate(asdict(self.efficiency).items()):
            amount = TableCell(part, f"{part:g}")
            if name == "launch":
                amount = _rounded(part, 1e-6, "µs")
            elif name == "half":
                amount = _rounded(part, 1e9, "GFLOP")
            table.add(TableCell("efficiency", text="" if number else None), name, amount)
        return table

    def save(self, path: str | Path) -> None:
        """Write a TOML file, which `cluster` reads."""
        lines = [f'name = "{self.name}"']
        lines += _toml_lines({name: vars(self)[name] for name in _NUMBERS})
        lines += ["", "[flops]", *_toml_lines(self.flops)]
        lines += ["", "[efficiency]", *_toml_lines(asdict(self.efficiency))]
        for link in self.links:
            lines += ["", "[[links]]", *_toml_lines(asdict(link))]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


_NUMBERS = ("memory", "bandwidth", "host", "disk")
"""The fields of a cluster that are one number each."""


def _rounded(number: float, unit: float, name: str) -> TableCell:
    """Return the cell of a number in a unit: 84e9 bytes are 84 GB."""
    return TableCell(number, f"{number / unit:,.6g} {name}")


def _slowest(samples: int, deviation: float) -> float:
    """Return the largest of some samples, of mean 1: see Note [The slowest of many]."""
    return 1 + deviation * sqrt(2 * log(max(samples, 1)))


def _group_of_first_device(mesh: Mesh, axes: tuple[str, ...]) -> set[int]:
    """Return the devices of the first device's group along some axes.

    On a mesh of (data=2, model=4) the group along "data" is {0, 4}, along "model" {0, 1, 2, 3}.
    """
    members = {0}
    stride = 1
    for axis, size in reversed(mesh.axes):
        if axis in axes:
            members = {member + stride * index for member in members for index in range(size)}
        stride *= size
    return members


def _toml_lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {value!r}" for key, value in table.items()]


# -- machines by name ------------------------------------------------------------------------------


MACHINES = f"one of {', '.join(PRESETS)}, or the path of a .toml file"
"""The names that `cluster` takes, for errors."""


def is_machine(name: str | Path) -> bool:
    """Return True for a name that `cluster` takes."""
    path = Path(name)
    is_file = path.suffix == ".toml" and path.is_file()
    return str(name) in PRESETS or is_file


def cluster(name: str | Path, *, node: int | None = None) -> Cluster:
    """Return a machine by the name of its GPU, or from a TOML file.

    Args:
        name: "a100", "h100", "h200", "b200", "cpu", or the path of a file, as `fshard calibrate`
            writes it.
        node: devices of a node; default: as in the file.

    >>> cluster("h100", node=8).links[0].devices, cluster("h100").peak("bf16")
    (8, 989000000000000.0)
    """
    if not is_machine(name):
        raise PlanError(f"cluster: name must be {MACHINES}; got {str(name)!r}.")
    if str(name) in PRESETS:
        preset = files("fshard.plan") / "clusters" / f"{name}.toml"
        text = preset.read_text(encoding="utf-8")
    else:
        text = Path(name).read_text(encoding="utf-8")
    machine = _from_toml(text, str(name))
    if node is None:
        return machine
    has_links_in_a_node = len(machine.links) > 1
    if node < 1 or not has_links_in_a_node:
        raise PlanError(
            f"cluster {name}: node must be >= 1, of a machine with links in a node; got {node}."
        )
    inner, *outer = machine.links
    return replace(machine, links=(replace(inner, devices=node), *outer))


def assert_cluster(machine: object, caller: str) -> None:
    """Raise if a machine is no cluster, such as a name of one."""
    if not isinstance(machine, Cluster):
        name = repr(machine) if isinstance(machine, str) else "..."
        raise PlanError(
            f"{caller}: cluster must be a Cluster; got {machine!r}. "
            f"Write cluster=fs.plan.cluster({name}), which takes {', '.join(PRESETS)} or a file."
        )


def _from_toml(text: str, name: str) -> Cluster:
    """Return the machine of a file; one error names all keys that are wrong."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"cluster {name}: the file must be TOML; {error}.") from error

    errors = [*_unknown(table, Cluster, ""), *_missing(table, Cluster, "")]
    errors += _not_numbers({key: table[key] for key in _NUMBERS if key in table}, "")
    errors += _not_numbers(table.get("flops", {}), "flops.")
    links = table.get("links", [])
    if not isinstance(links, list):
        errors.append(f"links must be tables [[links]]; got {links!r}")
        links = []
    for index, link in enumerate(links):
        prefix = f"links[{index}]."
        errors += [*_unknown(link, NetworkLink, prefix), *_missing(link, NetworkLink, prefix)]
        errors += _not_numbers(link, prefix)
    # Each constant of efficiency has a default, so that none can be missing.
    efficiency = table.get("efficiency", {})
    errors += _unknown(efficiency, Efficiency, "efficiency.")
    errors += _not_numbers(efficiency, "efficiency.")
    if errors:
        raise PlanError(f"cluster {name}: {'; '.join(errors)}.")

    table["links"] = tuple([NetworkLink(**link) for link in links])
    table["efficiency"] = Efficiency(**efficiency)
    return Cluster(**table)


def _field_names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def _unknown(table: Any, kind: Any, prefix: str) -> list[str]:
    if not isinstance(table, Mapping):  # `_not_numbers` names it
        return []
    legal = _field_names(kind)
    errors = list[str]()
    for key in table:
        if key not in legal:
            errors.append(f"{prefix}{key} is unknown; the keys are {', '.join(legal)}")
    return errors


def _missing(table: Any, kind: Any, prefix: str) -> list[str]:
    if not isinstance(table, Mapping):
        return []
    needed = [name for name in _field_names(kind) if name != "efficiency"]
    return [f"{prefix}{key} is missing" for key in needed if key not in table]


def _not_numbers(table: Any, prefix: str) -> list[str]:
    """List the values of a table that are no numbers; a bool is none."""
    if not isinstance(table, Mapping):
        return [f"{prefix.rstrip('.')} must be a table; got {table!r}"]
    errors = list[str]()
    for key, value in table.items():
        if type(value) not in (int, float):
            errors.append(f"{prefix}{key} must be a number; got {value!r}")
    return errors
