"""The collectives of a program of torch.distributed: recorded by rank, and as a file of JSON.

    record_collectives ──> calls of this process ──(of all ranks)──> Recording ──> a file
                                                    the page of `fshard explore` <──┘

    {"format": "fshard collectives 1", "program": "train.py --steps 1",
     "axes": {"data": 2, "model": 2},
     "ranks": [[{"collective": "all_reduce", "group": [0, 2], "bytes": 4096,
                 "line": "train.py:31 in step"}, ...],
               ... of ranks 1 to 3]}

`bytes` are those of the tensors that a rank gives, `group` has the ranks that take part. The axes
name groups: ranks are numbered along them, the last axis first. Without axes there is one, "rank".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fshard.errors import PlanError
from fshard.source import call_site, site_of

FORMAT = "fshard collectives 1"

_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "isend": "send",
    "irecv": "recv",
}
"""The operators of torch whose names are not those of their functions, but for a last "_"."""

_GIVEN = {
    "all_gather": ("input_list", "input_tensors", "input_tensor", "inputs", "input"),
    "reduce_scatter": ("input_tensors", "input_tensor", "inputs", "input"),
    "all_to_all": ("input_tensors", "input"),
    "gather": ("input_tensors",),
    "scatter": ("input_tensors",),
}
"""The arguments that a rank gives; of other collectives they are all tensors."""

_WITHOUT_BYTES = ("barrier", "monitored_barrier")


class RecordedCall(NamedTuple):
    """A collective that a rank has called.

    Args:
        collective: the name of torch's function, such as "all_reduce".
        group: the ranks that take part; of "send" and "recv" the sender and the receiver.
        bytes: of the tensors that the rank gives, or that it receives.
        line: of the program.
    """

    collective: str
    group: tuple[int, ...]
    bytes: int
    line: str

    @property
    def sent(self) -> float:
        """The bytes that a rank sends by the algorithm that sends the fewest, as in a ledger."""
        n = len(self.group)
        factors = {
            "all_reduce": 2 * (n - 1) / n,
            "all_gather": n - 1,
            "reduce_scatter": (n - 1) / n,
            "all_to_all": (n - 1) / n,
            "recv": 0,
        }
        return factors.get(self.collective, 1 if n > 1 else 0) * self.bytes


# -- recording -------------------------------------------------------------------------------------


@contextmanager
def record_collectives() -> Generator[list[RecordedCall]]:
    """Record the collectives of this process inside the block, those of DDP and FSDP too.

    All collectives of torch are operators, those of its C++ too. They are recorded, not changed.

    >>> with record_collectives() as calls:
    ...     pass  # the step of a program
    >>> calls
    []
    """
    recorder = _Recorder()
    with recorder:
        yield recorder.calls


class _Recorder(TorchDispatchMode):
    """Write the operators of collectives into a list."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The operation of a DTensor runs on shards, and its collectives come here. Its module is
        # not imported: where there is a DTensor, it is loaded.
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self._record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _record(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        operator: str = func.overloadpacket.__name__
        collective = _NAMES.get(operator, operator.rstrip("_"))
        names = [argument.name for argument in func._schema.arguments]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        group: Any = values.get("process_group", values.get("group_name"))
        if group is None or collective in _WITHOUT_BYTES:
            return  # such as a wait

        given: list[Any] = [values[name] for name in _GIVEN.get(collective, ()) if name in values]
        tensors = [*_tensors(given or list(values.values()))]
        size = sum([x.nbytes for x in tensors])
        ranks = _members(group, values, collective)
        self.calls.append(RecordedCall(collective, ranks, size, _line()))


def _members(group: Any, values: Mapping[str, Any], collective: str) -> tuple[int, ...]:
    """Return the ranks of a group; of a message its two."""
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # pyright: ignore
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    ranks = dist.get_process_group_ranks(group)
    if collective == "send":
        return (dist.get_rank(), ranks[values["dst"]])
    if collective == "recv":
        return (ranks[values["src"]], dist.get_rank())
    return tuple(ranks)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(cast(Sequence[Any], value))


def _line() -> str:
    """Return the innermost line of the program itself: neither of torch nor of other packages."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        site = site_of(frame)
        is_of_package = "site-packages" in site.file or "dist-packages" in site.file
        is_here = (site.file, site.function) == (frame.f_code.co_filename, frame.f_code.co_name)
        if is_here and not is_of_package:
            return str(site)
        frame = frame.f_back
    return str(call_site())


# -- the file --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """The collectives of a program by rank.

    Args:
        program: its name, for readers.
        ranks: the calls of each rank, in order.
        axes: sizes of the mesh, whose product is the number of ranks.
    """

    program: str
    ranks: Sequence[Sequence[RecordedCall]] = field(repr=False)
    axes: Mapping[str, int]

    def __post_init__(self) -> None:
        if prod(self.axes.values()) != len(self.ranks):
            raise PlanError(
                f"Recording: axes must have a product of {len(self.ranks)}, the number of ranks; "
                f"got {dict(self.axes)}."
            )

    def axes_of(self, group: Sequence[int]) -> tuple[str, ...]:
        """Return the axes along which a group's ranks differ; the ranks if it is no such group.

        >>> pair = Recording("train.py", [[]] * 4, {"data": 2, "model": 2})
        >>> pair.axes_of([0, 2]), pair.axes_of([0, 1, 2, 3]), pair.axes_of([0, 3])
        (('data',), ('data', 'model'), ('ranks 0, 3',))
        """
        coordinates = [*product(*[range(size) for size in self.axes.values()])]
        columns = [*zip(*[coordinates[rank] for rank in group], strict=True)]
        names: list[str] = []
        members = 1
        for (name, size), column in zip(self.axes.items(), columns, strict=True):
            if len({*column}) > 1:
                names.append(name)
                members *= size
        is_pair = len(names) == 1 and len(group) == 2  # such as neighbours of a pipeline
        if names and (members == len(group) or is_pair):
            return tuple(names)
        return (f"ranks {', '.join(map(str, group))}",)

    def mismatch(self) -> str:
        """Return the first call in which ranks of a group differ; "" if there is none.

        Such ranks wait for each other for ever, or exchange other tensors.
        """
        calls: dict[tuple[int, ...], dict[int, list[RecordedCall]]] = {}
        for rank, of_rank in enumerate(self.ranks):
            for call in of_rank:
                if call.collective not in ("send", "recv"):
                    calls.setdefault(call.group, {}).setdefault(rank, []).append(call)
        for group, by_rank in calls.items():
            first = by_rank.get(group[0], [])
            for rank in group[1:]:
                text = _first_difference(group[0], first, rank, by_rank.get(rank, []))
                if text:
                    return text
        return ""

    def save(self, path: str | PathLike[str]) -> None:
        """Write the file."""
        ranks = [[call._asdict() for call in calls] for calls in self.ranks]
        content = {
            "format": FORMAT,
            "program": self.program,
            "axes": dict(self.axes),
            "ranks": ranks,
        }
        Path(path).write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Recording:
        """Read a file; raise naming what is wrong with it.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "collectives.json")
        >>> calls = [[RecordedCall("all_reduce", (0, 1), 8, "train.py:3 in step")]] * 2
        >>> Recording("train.py", calls, {"data": 2}).save(path)
        >>> Recording.load(path).ranks[1][0].sent
        8.0
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlanError(f"explore: {path} must be a file of JSON: {error}.") from None
        try:
            return cls._of(content)
        except PlanError as error:
            raise PlanError(f"explore: {path}: {error}") from None

    @classmethod
    def _of(cls, content: Any) -> Recording:
        is_recording = isinstance(content, dict) and content.get("format") == FORMAT
        if not is_recording:
            raise PlanError(
                f'it must be an object with "format": "{FORMAT}", as Recording.save writes it. '
                "A plan is shown from the TOML file of fshard plan -o."
            )
        ranks = content.get("ranks")
        if not isinstance(ranks, list) or not ranks:
            raise PlanError(f"ranks must be a list of the calls of each rank; got {ranks!r:.60}.")
        axes = content.get("axes") or {"rank": len(ranks)}
        has_sizes = isinstance(axes, dict) and all(_is_count(n) and n for n in axes.values())
        if not has_sizes:
            raise PlanError(f"axes must be sizes by name; got {axes!r:.60}.")
        read: list[list[RecordedCall]] = []
        for rank, calls in enumerate(ranks):
            if not isinstance(calls, list):
                raise PlanError(f"rank {rank} must have a list of calls; got {calls!r:.60}.")
            read.append([_call(call, rank, len(ranks)) for call in cast(list[Any], calls)])
        return cls(str(content.get("program", "")), read, axes)


def _first_difference(
    rank: int, calls: Sequence[RecordedCall], other: int, others: Sequence[RecordedCall]
) -> str:
    """Return the first call of one group in which two of its ranks differ; "" if none does."""
    for number in range(max(len(calls), len(others))):
        texts: list[str] = []
        for of_rank in (calls, others):
            if number < len(of_rank):
                call = of_rank[number]
                # Ranks may gather shards of other sizes, and only the root may give a tensor.
                size = f" of {call.bytes:,} bytes" if call.collective == "all_reduce" else ""
                texts.append(f"{call.collective}{size} at {call.line}")
            else:
                texts.append("none")
        ours, theirs = texts
        if ours.partition(" at ")[0] != theirs.partition(" at ")[0]:
            group = ", ".join(map(str, (calls or others)[0].group))
            return (
                f"Call {number + 1} of the group {group} differs: rank {rank} has {ours}, "
                f"rank {other} has {theirs}."
            )
    return ""


def _is_count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**63


def _call(value: Any, rank: int, world: int) -> RecordedCall:
    """Return a call as it is in a file; raise if a field is missing or of another type."""
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    group = fields.get("group")
    is_group = isinstance(group, list) and group and all(_is_count(x) and x < world for x in group)
    is_call = (
        is_group
        and isinstance(fields.get("collective"), str)
        and isinstance(fields.get("line"), str)
        and _is_count(fields.get("bytes"))
    )
    if not is_call:
        raise PlanError(
            f"a call of rank {rank} must have a collective, a group of ranks below {world}, bytes "
            f"and a line; got {value!r:.80}."
        )
    return RecordedCall(
        fields["collective"], tuple(cast(list[int], group)), fields["bytes"], fields["line"]
    )
