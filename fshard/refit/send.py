"""Send versions of weights from one mesh to an engine on another: `Refit`.

    learn     once: what each device of the engine needs, by layouts or by traces of its loader
    move      what a device lacks arrives beside what it has
    check     for each link the digests of what was sent and of what is stored are equal
    decide    once for all processes: see `decision`
    take      the engine has the new version, or all keep the old one

Every process of both meshes calls `Refit` and `send`; on others these return at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fshard.errors import RefitError
from fshard.mesh.collectives.api import all_gather, all_to_all, psum
from fshard.mesh.collectives.ledger import uncounted
from fshard.mesh.layout import Layout, Mesh, PyTree
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.between import (
    AXIS,
    Shards,
    copy_overlap,
    meeting_of,
    numbers_held,
    record_sent,
    run_rounds,
    way_between,
)
from fshard.mesh.reshard.crossing import Crossing, MeshSide
from fshard.mesh.reshard.rounds import Portion, Rounds
from fshard.mesh.runtimes.process import machines_of
from fshard.mesh.spmd.run import run_on_devices
from fshard.mesh.spmd.scope import parting, require
from fshard.refit.decision import TAKE, decision_on
from fshard.refit.delta import Change, bits, pack, unpack
from fshard.refit.digests import digest
from fshard.refit.engines import ArrayEngine, SourceTree, TensorEngine
from fshard.refit.plan import RefitPlan
from fshard.refit.traced import Target, Trace
from fshard.source import Site, call_site

_CALLER = "Refit.send"
_refits = count()
"""Numbers of refits: all processes make them in one order. They name decisions in the store."""


class Refit:
    """Sends versions of arrays to an engine on another mesh: all of a version or nothing.

    Args:
        source: a tree of arrays, such as parameters of `shard_params`: those of the first version,
            or any that are alike.
        target: a layout, or a tree of layouts like `source`, on the engine's mesh: the engine has
            arrays. Or the trace of this device's loader, on a device of `mesh`, and None on others:
            the engine has tensors, which `send` writes in place. See `fs.refit.trace`.
        mesh: the engine's, with traces.
        into: what the trace was made with: the engine's module, or a dict of tensors.
        dtype: of the engine's arrays; None for that of each array of the source. With traces the
            loader casts.
        delta: send the elements that have changed since the last version alone. Both sides then
            have a copy of what was sent.
        check: compare digests of all elements before a version is taken.

    Attributes:
        plan: what a version sends, a `RefitPlan`.
        version: the number of the last version that was taken; None before the first.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> trainer = fs.make_mesh({"data": 4})
    >>> engine = fs.make_mesh({"model": 2}, devices=range(4, 6))
    >>> params = {"w": fs.device_put(torch.arange(16.0), fs.Layout(trainer, P("data")))}
    >>> refit = Refit(params, fs.Layout(engine, P("model")))
    >>> weights = refit.send(1, params)
    >>> weights["w"], refit.version, refit.plan.bytes
    (Sharded f32[16@model] on Mesh(model=2 on 4, 5; virtual, cpu), 1, 64)
    """

    def __init__(
        self,
        source: PyTree,
        target: PyTree | Trace | None,
        *,
        mesh: Mesh | None = None,
        into: Target | None = None,
        dtype: torch.dtype | None = None,
        delta: bool = False,
        check: bool = True,
    ) -> None:
        tree = SourceTree.of("Refit", source)
        self._source = tree
        self._source_mesh = tree.mesh
        self._delta = delta
        self._check = check
        self._number = next(_refits)
        self.version: int | None = None

        if target is None or isinstance(target, Trace):
            if mesh is None:
                raise RefitError(
                    "Refit: mesh must be the engine's mesh, with a trace as target; got None."
                )
            engine: ArrayEngine | TensorEngine = TensorEngine(tree, mesh, target, into, keeps=delta)
        else:
            engine = ArrayEngine(tree, target, dtype)
        self._engine = engine
        self._meeting = meeting_of(self._source_mesh, engine.mesh)
        self._all_rounds: list[Rounds] = []
        if self._meeting is not None:
            self._all_rounds = self._plan_rounds(self._meeting)
        self._sent: dict[int, list[Tensor]] = {}  # with a delta: copies, by the number of a device
        self.plan = self._plan()

    def _plan_rounds(self, meeting: Mesh) -> list[Rounds]:
        """Return the rounds of all arrays, for each dtype in which they are sent."""
        incoming = self._engine.incoming(meeting)
        machines = machines_of(meeting)
        leaves_of: dict[torch.dtype, list[int]] = {}
        crossings: list[Crossing] = []
        for index, (name, x) in enumerate(self._source.arrays.items()):
            if x.layout.spec.unreduced:
                raise RefitError(
                    f"Refit: {name} of the source must have no sums; got {x.layout.spec}. "
                    "Reshard it first."
                )
            of_leaf = incoming[name]
            leaves_of.setdefault(of_leaf.dtype, []).append(index)
            before = MeshSide.of(x.layout)
            shape = x.shape or (1,)
            crossings.append(Crossing(before, of_leaf.side, shape, meeting.devices, machines))

        way = way_between(self._source_mesh, self._engine.mesh)
        result: list[Rounds] = []
        for dtype, leaves in leaves_of.items():
            result.append(Rounds(leaves, [crossings[leaf] for leaf in leaves], dtype, way))
        return result

    def _plan(self) -> RefitPlan:
        links: dict[tuple[int, int], int] = {}
        unused: list[str] = []
        names = [*self._source.arrays]
        for rounds in self._all_rounds:
            for sender, receiver in np.argwhere(rounds.sent).tolist():
                link = (rounds.devices[sender], rounds.devices[receiver])
                links[link] = links.get(link, 0) + int(rounds.sent[sender, receiver])
            for leaf, crossing in zip(rounds.leaves, rounds.crossings, strict=True):
                if not crossing.new_regions.any():
                    unused.append(names[leaf])
        return RefitPlan(len(names), links, unused=tuple(unused))

    def send(self, version: int, source: PyTree | None = None) -> PyTree:
        """Send a version of the arrays; return the engine's arrays, or None if it has tensors.

        Either the engine takes all of it, and `version` is the current one everywhere, or every
        process raises and the engine keeps what it had.

        Args:
            version: its number, higher than that of the last one.
            source: a tree of arrays like those of `Refit`; by default those.
        """
        site = call_site()
        tree = self._source if source is None else SourceTree.of(_CALLER, source)
        self._validate(version, tree)
        if self._meeting is None:
            self.version = version
            return self._engine.take({})

        try:
            self._engine.validate()
            shards, problems = self._move(self._meeting, tree, site)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self._decide(version, text)
            error.add_note(_left_text(version, text, self.version))
            raise
        decision = self._decide(version, problems)
        if decision != TAKE:
            raise RefitError(_left_text(version, decision, self.version))
        result = self._engine.take(shards)
        if self._delta:
            self._keep_sent(tree)
        self.version = version
        return result

    def _validate(self, version: int, tree: SourceTree) -> None:
        """Raise unless this can be the next version."""
        current = -1 if self.version is None else self.version
        is_next = isinstance(version, int) and version > current
        if not is_next:
            raise RefitError(
                f"{_CALLER}: version must be an integer above the current one, {current}; "
                f"got {version!r}."
            )
        expected = self._source.arrays
        problems = [f"{name} is missing" for name in expected if name not in tree.arrays]
        problems += [f"{name} was not in it" for name in tree.arrays if name not in expected]
        if problems:
            raise RefitError(
                f"{_CALLER}: the source must have the arrays that Refit was made with; "
                f"{problems[0]}. Make another Refit."
            )
        for name, x in tree.arrays.items():
            before = expected[name]
            has_layout = _without_memory(x) == _without_memory(before)
            is_alike = has_layout and x.shape == before.shape and x.dtype == before.dtype
            if not is_alike:
                raise RefitError(
                    f"{_CALLER}: {name} must be like that of Refit, {before!r}; got {x!r}."
                )

    def _decide(self, version: int, problem: str) -> str:
        """Return the decision of all processes, to which a problem here contributes."""
        assert self._meeting is not None
        if self._meeting.runtime != "process":
            return problem or TAKE  # virtual devices end together, see `_move`
        decision = decision_on(f"refit/{self._number}/{version}", self._meeting)
        return decision.leave(problem) if problem else decision.vote()

    # -- moving ------------------------------------------------------------------------------------

    def _move(
        self, meeting: Mesh, tree: SourceTree, site: Site
    ) -> tuple[dict[int, list[Tensor]], str]:
        """Move a version; return the engine's new shards by device, and what is wrong with them."""
        old_shards = _shards_by_number(tree)
        engine_numbers = numbers_held(self._engine.mesh)
        current_shards: dict[int, Sequence[Tensor]] = {}
        if self._delta and self.version is not None:
            current_shards = {number: self._engine.shards(number) for number in engine_numbers}
        new_shards: dict[int, list[Tensor]] = {}
        problems: list[str] = []

        def on_device(index: int) -> None:
            number = meeting.devices[index]
            nothing: list[Tensor | None] = [None] * len(tree.arrays)
            old: Shards = old_shards.get(number, nothing)
            new: Shards = nothing
            if number in engine_numbers:
                new_shards[number] = self._engine.new_shards(number)
                new = new_shards[number]
            group = require(_CALLER).group((AXIS,), _CALLER)
            with parting(group):
                is_delta = self._delta and _have_all(self.version)
                if is_delta and number in engine_numbers:
                    for x, current in zip(new_shards[number], current_shards[number], strict=True):
                        x.copy_(current)
                for rounds in self._all_rounds:
                    if is_delta:
                        sent_before = self._sent.get(number, nothing)
                        sent = _run_delta(rounds, index, old, sent_before, new)
                    else:
                        sent = rounds.sent[index].tolist()
                        run_rounds(rounds, index, old, new, meeting, site)
                    record_sent(rounds, index, sent, site)
                    if self._check:
                        problems.extend(self._wrong(rounds, index, old, new))
                if meeting.runtime != "process":
                    _share_problems(problems)

        with torch.no_grad():
            run_on_devices(meeting, on_device)
        return new_shards, "; ".join(problems[:4])

    def _wrong(self, rounds: Rounds, index: int, old: Shards, new: Shards) -> list[str]:
        """Return what is wrong with the new shards of a device, by digests from the senders."""
        names = [*self._source.arrays]
        count_of_pairs = np.sum([crossing.counts > 0 for crossing in rounds.crossings], 0)
        sent: list[Tensor] = []
        for pair in rounds.outgoing(index):
            for portion in pair.portions:
                sent.append(_digest(portion, old, rounds.dtype))
        row = torch.stack(sent) if sent else torch.empty(0, dtype=torch.int64)
        with uncounted():
            expected = all_to_all(row, AXIS, counts=count_of_pairs.tolist())

        problems: list[str] = []
        arrived: list[Portion] = []
        for pair in rounds.incoming(index):
            arrived += pair.portions
        for value, portion in zip(expected, arrived, strict=True):
            actual = _digest(portion, new, rounds.dtype)
            if not torch.equal(actual, value.to(actual.device)):
                regions, boxes = portion.elements
                first = regions[0][:, 0].tolist()
                size = sum([box.size for box in boxes])
                problems.append(
                    f"{names[portion.leaf]} arrived with other values on device "
                    f"{rounds.devices[index]}, in the {size} elements from {first} on"
                )
        return problems

    def _keep_sent(self, tree: SourceTree) -> None:
        """Keep a copy of what was sent, in the dtypes in which it was."""
        dtypes: dict[int, torch.dtype] = {}
        for rounds in self._all_rounds:
            dtypes.update(dict.fromkeys(rounds.leaves, rounds.dtype))
        for number, shards in _shards_by_number(tree).items():
            if number not in self._sent:
                self._sent[number] = [
                    torch.empty_like(x, dtype=dtypes[leaf]) for leaf, x in enumerate(shards)
                ]
            for copy, x in zip(self._sent[number], shards, strict=True):
                copy.copy_(x)


def _left_text(version: int, decision: str, current: int | None) -> str:
    kept = "no version" if current is None else f"version {current}"
    return (
        f"Refit.send: version {version} was not taken: {decision}. All processes keep {kept}. Make "
        "another Refit of processes that have not ended, or send again."
    )


def _share_problems(problems: list[str]) -> None:
    """Let all virtual devices have a problem if one has."""
    with uncounted():
        total = int(psum(torch.tensor(len(problems)), AXIS))
    if total and not problems:
        problems.append("other values have arrived on another device")


def _without_memory(x: Sharded) -> Layout:
    """Return the layout of an array as if it was in the devices' memory: any other is read, too."""
    return x.layout.with_memory("device")


def _shards_by_number(tree: SourceTree) -> dict[int, list[Tensor]]:
    """Return the caller's shards of all arrays, by the number of their device."""
    arrays = [*tree.arrays.values()]
    result: dict[int, list[Tensor]] = {}
    for row, number in enumerate(numbers_held(arrays[0].mesh)):
        result[number] = [x.shards[row].contiguous() for x in arrays]
    return result


def _have_all(version: int | None) -> bool:
    """Return True if all devices have the same version, which a change can be of."""
    number = -1 if version is None else version
    with uncounted():
        numbers = all_gather(torch.tensor([number]), AXIS).tolist()
    return number >= 0 and {*numbers} == {number}


def _digest(portion: Portion, shards: Shards, dtype: torch.dtype) -> Tensor:
    """Return the digest of a portion, as a device stores it."""
    shard = shards[portion.leaf]
    assert shard is not None
    pairs = zip(*portion.elements, strict=True)
    return digest(portion.shape, [(region, shard, box) for region, box in pairs], dtype)


# -- changes ---------------------------------------------------------------------------------------


def _run_delta(rounds: Rounds, index: int, old: Shards, sent: Shards, new: Shards) -> list[int]:
    """Send what differs from the last version, and write it into the new shards.

    Return the bytes that were sent to each device.

    Args:
        rounds: of the arrays.
        index: of the device.
        old: shards of the source.
        sent: what they were in the last version, in the dtype of the rounds.
        new: shards of the engine, which have the last version.
    """
    copy_overlap(rounds, index, old, new)
    outgoing = rounds.outgoing(index)
    incoming = rounds.incoming(index)
    total = [0] * len(rounds.devices)
    for number in range(rounds.count):
        counts = rounds.counts(number)
        boxes = [*rounds.boxes(outgoing, number)]
        row = _row(boxes, old, rounds.dtype)
        row_before = _row(boxes, sent, rounds.dtype)
        is_changed = (bits(row) != bits(row_before)).any(1)

        parcels: list[Tensor] = []
        sizes = [0] * len(counts)
        ends = counts[index].cumsum().tolist()
        for receiver in np.flatnonzero(counts[index]).tolist():
            begin = ends[receiver] - counts[index, receiver]
            positions = is_changed[begin : ends[receiver]].nonzero()[:, 0]
            parcel = pack(Change(positions, row[begin : ends[receiver]][positions]))
            sizes[receiver] = len(parcel)
            total[receiver] += len(parcel)
            parcels.append(parcel)
        parcel = torch.cat(parcels) if parcels else torch.empty(0, dtype=torch.uint8)
        with uncounted():
            matrix = all_gather(torch.tensor(sizes), AXIS).view(len(sizes), -1)
            arrived = all_to_all(parcel, AXIS, counts=matrix.tolist())

        boxes = [*rounds.boxes(incoming, number)]
        begins = np.cumsum([0, *[box.size for _, box in boxes]])
        offset = 0
        for source, packed in enumerate(arrived.split(matrix[:, index].tolist())):
            if len(packed):
                change = unpack(packed, rounds.dtype)
                _write(boxes, begins, change._replace(positions=change.positions + offset), new)
            offset += int(counts[source, index])
    return total


def _row(boxes: Sequence[tuple[int, Any]], shards: Shards, dtype: torch.dtype) -> Tensor:
    """Return the values of boxes one after another."""
    values: list[Tensor] = [torch.empty(0, dtype=dtype)]
    for leaf, box in boxes:
        shard = shards[leaf]
        assert shard is not None
        values.append(box.of(shard).reshape(-1).to(dtype))
    return torch.cat(values)


def _write(boxes: Sequence[tuple[int, Any]], begins: Any, change: Change, new: Shards) -> None:
    """Write changed elements of a row into the boxes that the row is of."""
    positions = change.positions
    bounds = torch.searchsorted(positions, torch.as_tensor(begins)).tolist()
    for number, (leaf, box) in enumerate(boxes):
        first = bounds[number]
        last = bounds[number + 1]
        if first == last:
            continue
        shard = new[leaf]
        assert shard is not None
        rest = positions[first:last] - int(begins[number])
        offsets = torch.full_like(rest, box.offset)
        for length, stride in zip(reversed(box.lengths), reversed(box.strides), strict=True):
            offsets += rest % length * stride
            rest = rest // length
        shard.view(-1)[offsets] = change.values[first:last].to(shard.dtype)
