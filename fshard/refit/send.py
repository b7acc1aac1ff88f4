"""Send versions of weights from one mesh to an engine on another: `Refit`.

    learn     once: what each device of the engine needs, by layouts or by traces of its loader
    move      what a device lacks arrives beside what it has
    check     for each link the digests of what was sent and of what is stored are equal
    decide    once for all processes: see `decision`
    take      the engine has the new version, or all keep the old one

Every process of both meshes calls `Refit` and `send`; on others these return at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fshard.checkpoint.save import run_token
from fshard.errors import RefitError
from fshard.mesh.collectives.api import all_gather, all_to_all, psum
from fshard.mesh.collectives.ledger import uncounted
from fshard.mesh.layout import Mesh, PyTree
from fshard.mesh.layout.kinds import compute_device
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
from fshard.mesh.reshard.crossing import Crossing, MeshSide, crossing_of
from fshard.mesh.reshard.rounds import Portion, Rounds
from fshard.mesh.runtimes.process import machines_of
from fshard.mesh.spmd.run import run_on_devices
from fshard.mesh.spmd.scope import parting, require
from fshard.refit.decision import TAKE, Attempts
from fshard.refit.delta import Change, bits, pack, unpack
from fshard.refit.digests import digest
from fshard.refit.engines import ArrayEngine, SourceTree, TensorEngine
from fshard.refit.plan import RefitPlan
from fshard.refit.traced import Target, Trace
from fshard.source import Site, call_site

_CALLER = "Refit.send"
_refits: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
"""The number of refits between the same devices of one world, which make them in one order.

It names their decisions. Devices of neither mesh need not count them.
"""


class Refit:
    """Sends versions of arrays to an engine on another mesh: all of a version or nothing.

    Args:
        source: a tree of arrays, such as parameters of `shard_params`: those of the first version,
            or any that are alike. They stay alive until others are sent.
        target: a layout, or a tree of layouts like `source`, on the engine's mesh: the engine has
            arrays. Or the trace of this device's loader, on a device of `mesh`, and None on others:
            the engine has tensors, which `send` writes in place. See `fs.refit.trace`.
        mesh: the engine's, with traces.
        into: what the trace was made with: the engine's module, or a dict of tensors.
        dtype: of the engine's arrays; None for that of each array of the source. With traces the
            loader casts.
        delta: send the elements that have changed since the last version alone. The trainer keeps
            a copy of what was sent; an engine with tensors keeps what has arrived. The arrays of
            another engine must not be written.
        check: compare digests of all elements before a version is taken.

    A device of the engine needs the new shards beside the old ones, by a trace the elements that
    arrive, once. Both sides need one round more, of 16 MiB at most, and a MiB for digests.

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
    >>> weights["w"]
    Sharded f32[16@model] on Mesh(model=2 on 4, 5; virtual, cpu), 64 B, 32 B on each of 2 devices
    >>> refit.version, refit.plan.bytes
    (1, 64)
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
        self._source = tree.types()
        self._default: SourceTree | None = tree
        self._source_mesh = tree.mesh
        self._delta = delta
        self._check = check
        self.version: int | None = None
        # The version that both sides have a copy of, which a change can be of; None for none.
        self._base: int | None = None

        if target is None or isinstance(target, Trace):
            if mesh is None:
                raise RefitError(
                    "Refit: mesh must be the engine's mesh, with a trace as target; got None."
                )
            engine: ArrayEngine | TensorEngine = TensorEngine(
                self._source, mesh, target, into, keeps=delta
            )
        else:
            engine = ArrayEngine(self._source, target, dtype)
        self._engine = engine
        self._meeting = meeting_of(self._source_mesh, engine.mesh)
        self._all_rounds: list[Rounds] = []
        self._cast_leaves: set[int] = set()
        if self._meeting is not None:
            devices = self._meeting.devices
            key = run_token(), devices  # new processes of a later world have counted none before it
            _refits[key] += 1
            name = f"refit/{'-'.join(map(str, devices))}/{_refits[key]}"
            self._attempts = Attempts(name, self._meeting)
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
            if of_leaf.is_cast:
                self._cast_leaves.add(index)
            before = MeshSide.of(x.layout)
            shape = x.shape or (1,)
            make = crossing_of if isinstance(of_leaf.side, MeshSide) else Crossing
            crossings.append(make(before, of_leaf.side, shape, meeting.devices, machines))

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
            source: a tree of arrays like those of `Refit`. The first version is of those by
                default.

        Processes begin once all have come, so an argument that one of them refuses is an error on
        all at once. After an error the links of all that have not ended are as before, on one
        machine; between machines the group of both meshes is lost by an error on the way.
        """
        site = call_site()
        if self._meeting is None:
            self._validate(version, source)
            self.version = version
            self._default = None
            return self._engine.take({})

        attempt = self._attempts.next()
        try:
            tree = self._validate(version, source)
            self._engine.validate()
            old_shards = _shards_by_number(tree)
            new_shards: dict[int, list[Tensor]] = {}
            for number in numbers_held(self._engine.mesh):
                new_shards[number] = self._engine.new_shards(number)

            problem = attempt.begin()
            if not problem:
                with attempt.links():
                    problem = self._move(version, old_shards, new_shards, site)
        except BaseException as error:
            self._base = None
            cause = attempt.fail(error)
            if cause and isinstance(error, Exception):
                raise RefitError(_left_text(version, cause, self.version)) from error
            error.add_note(_left_text(version, type(error).__name__, self.version))
            raise
        decision = attempt.leave(problem) if problem else attempt.vote()
        if decision != TAKE:
            self._base = None
            raise RefitError(_left_text(version, decision, self.version))

        result = self._engine.take(new_shards)
        self.version = version
        self._default = None  # they are no later version, and need not stay in memory
        if self._delta:
            self._keep_sent(old_shards)
            self._base = version
        return result

    def _validate(self, version: int, source: PyTree | None) -> SourceTree:
        """Return the arrays to send; raise unless they can be the next version."""
        current = -1 if self.version is None else self.version
        is_number = isinstance(version, int) and not isinstance(version, bool)
        if not is_number or version <= current:
            raise RefitError(
                f"{_CALLER}: version must be an integer above the current one, {current}; "
                f"got {version!r}."
            )
        if source is not None:
            tree = SourceTree.of(_CALLER, source)
        elif self._default is not None:
            tree = self._default
        else:
            raise RefitError(
                f"{_CALLER}: source must be given; got None, and the arrays that Refit was made "
                f"with are an earlier version. Write send({version}, params)."
            )
        self._validate_names(tree)
        for name, x in tree.arrays.items():
            before = self._source.arrays[name]
            # Memory, unit and whether it is frozen may differ: no region depends on them.
            has_layout = MeshSide.of(x.layout) == MeshSide.of(before.layout)
            is_alike = has_layout and x.shape == before.shape and x.dtype == before.dtype
            if not is_alike:
                raise RefitError(
                    f"{_CALLER}: {name} must be like that of Refit, {before!r}; got {x!r}."
                )
        return tree

    def _validate_names(self, tree: SourceTree) -> None:
        """Raise unless leaves have the names, and are tied, as those of `Refit`."""
        expected = self._source.first_names
        problems = [f"{name} is missing" for name in expected if name not in tree.first_names]
        problems += [f"{name} was not in it" for name in tree.first_names if name not in expected]
        for name, first_name in tree.first_names.items():
            before = expected.get(name, first_name)
            if first_name != before:
                is_tied = f"{name} is tied to {first_name}" if first_name != name else "is not tied"
                was_tied = f"was tied to {before}" if before != name else "was not tied"
                problems.append(f"{name} {was_tied}, and {is_tied}")
        if problems:
            raise RefitError(
                f"{_CALLER}: the source must have the arrays that Refit was made with; "
                f"{problems[0]}. Make another Refit."
            )

    # -- moving ------------------------------------------------------------------------------------

    def _move(
        self,
        version: int,
        old_shards: Mapping[int, list[Tensor]],
        new_shards: Mapping[int, list[Tensor]],
        site: Site,
    ) -> str:
        """Move a version into the engine's new shards; return what is wrong with them, or ""."""
        meeting = self._meeting
        assert meeting is not None
        nothing: list[Tensor | None] = [None] * len(self._source.arrays)
        base_shards: dict[int, Sequence[Tensor]] = {}
        if self._base is not None:
            base_shards = {number: self._engine.shards(number) for number in new_shards}
        problems: list[str] = []

        def on_device(index: int) -> None:
            number = meeting.devices[index]
            old: Shards = old_shards.get(number, nothing)
            new: Shards = new_shards.get(number, nothing)
            group = require(_CALLER).group((AXIS,), _CALLER)
            # Processes see the record that one has made which failed, and keep their links: see `links`.
            is_process = meeting.runtime == "process"
            with nullcontext() if is_process else parting(group):
                has_base = self._have_one_base(version, meeting)
                is_delta = self._delta and has_base
                if is_delta and number in new_shards:
                    for x, base in zip(new_shards[number], base_shards[number], strict=True):
                        x.copy_(base)
                for rounds in self._all_rounds:
                    if is_delta:
                        sent_before = self._sent.get(number, nothing)
                        sent = _run_delta(rounds, index, old, sent_before, new, meeting)
                    else:
                        sent = rounds.sent[index].tolist()
                        run_rounds(rounds, index, old, new, meeting, site)
                    record_sent(rounds, index, sent, site)
                    if self._check:
                        problems.extend(self._wrong(rounds, index, old, new, meeting))
                if not is_process:
                    _share_problems(problems, meeting)

        with torch.no_grad():
            run_on_devices(meeting, on_device)
        return "; ".join(problems[:4])

    def _have_one_base(self, version: int, meeting: Mesh) -> bool:
        """Return True if all devices have the same base; raise unless they send one version."""
        base = -1
        if self._base is not None and not self._engine.is_written():
            base = self._base
        row = [version, base, int(self._delta)]
        device = compute_device(meeting)
        with uncounted():
            rows = all_gather(torch.tensor(row, device=device), AXIS).view(-1, len(row))
        versions, bases, deltas = rows.T.tolist()
        if {*versions} != {version}:
            pairs = zip(meeting.devices, versions, strict=True)
            shown = ", ".join([f"{sent} on device {number}" for number, sent in pairs])
            raise RefitError(f"{_CALLER}: version must be one number on all devices; got {shown}.")
        if len({*deltas}) > 1:
            with_delta = meeting.devices[deltas.index(1)]
            without = meeting.devices[deltas.index(0)]
            raise RefitError(
                "Refit: delta must be the same on all devices; got True on device "
                f"{with_delta}, False on device {without}."
            )
        return base >= 0 and {*bases} == {base}

    def _wrong(
        self, rounds: Rounds, index: int, old: Shards, new: Shards, meeting: Mesh
    ) -> list[str]:
        """Return what is wrong with the new shards of a device, by digests from the senders."""
        names = [*self._source.arrays]
        count_of_pairs = np.sum([crossing.counts > 0 for crossing in rounds.crossings], 0)
        device = compute_device(meeting)
        sent = [torch.empty(0, dtype=torch.int64, device=device)]
        for pair in rounds.outgoing(index):
            for portion in pair.portions:
                value = self._digest(portion, old, rounds.dtype)
                sent.append(value.view(1).to(device))  # that of an array in host memory is there
        row = torch.cat(sent)
        with uncounted():
            expected = all_to_all(row, AXIS, counts=count_of_pairs.tolist())

        problems: list[str] = []
        arrived: list[Portion] = []
        for pair in rounds.incoming(index):
            arrived += pair.portions
        for value, portion in zip(expected.tolist(), arrived, strict=True):
            actual = self._digest(portion, new, rounds.dtype)
            if int(actual) == value:
                continue
            regions, boxes = portion.elements
            first = regions[0][:, 0].tolist()
            size = sum([box.size for box in boxes])
            problems.append(
                f"{names[portion.leaf]} arrived with other values on device "
                f"{rounds.devices[index]}, in the {size} elements from {first} on"
            )
        return problems

    def _digest(self, portion: Portion, shards: Shards, dtype: torch.dtype) -> Tensor:
        """Return the digest of a portion, as a device stores it."""
        shard = shards[portion.leaf]
        assert shard is not None
        pairs = zip(*portion.elements, strict=True)
        parts = [(region, shard, box) for region, box in pairs]
        is_cast = portion.leaf in self._cast_leaves
        return digest(portion.shape, parts, dtype, is_cast=is_cast)

    def _keep_sent(self, shards_by_number: Mapping[int, list[Tensor]]) -> None:
        """Keep a copy of what was sent, in the dtypes in which it was."""
        dtypes: dict[int, torch.dtype] = {}
        for rounds in self._all_rounds:
            dtypes.update(dict.fromkeys(rounds.leaves, rounds.dtype))
        for number, shards in shards_by_number.items():
            if number not in self._sent:
                copies: list[Tensor] = []
                for leaf, x in enumerate(shards):
                    copies.append(torch.empty_like(x, dtype=dtypes[leaf]))
                self._sent[number] = copies
            for copy, x in zip(self._sent[number], shards, strict=True):
                copy.copy_(x)


def _left_text(version: int, decision: str, current: int | None) -> str:
    kept = "no version" if current is None else f"version {current}"
    return (
        f"Refit.send: version {version} was not taken: {decision}. All processes keep {kept}. Make "
        "another Refit of processes that have not ended, or send again."
    )


def _share_problems(problems: list[str], meeting: Mesh) -> None:
    """Let all virtual devices have a problem if one has."""
    count_of_problems = torch.tensor(len(problems), device=compute_device(meeting))
    with uncounted():
        total = int(psum(count_of_problems, AXIS))
    if total and not problems:
        problems.append("other values have arrived on another device")


def _shards_by_number(tree: SourceTree) -> dict[int, list[Tensor]]:
    """Return the caller's shards of all arrays, by the number of their device."""
    arrays = [*tree.arrays.values()]
    result: dict[int, list[Tensor]] = {}
    for row, number in enumerate(numbers_held(arrays[0].mesh)):
        result[number] = [x.shards[row].contiguous() for x in arrays]
    return result


# -- changes ---------------------------------------------------------------------------------------


def _run_delta(
    rounds: Rounds, index: int, old: Shards, sent: Shards, new: Shards, meeting: Mesh
) -> list[int]:
    """Send what differs from the last version, and write it into the new shards.

    Return the bytes that were sent to each device.

    Args:
        rounds: of the arrays.
        index: of the device.
        old: shards of the source.
        sent: what they were in the last version, in the dtype of the rounds.
        new: shards of the engine, which have the last version.
        meeting: the mesh of all devices.
    """
    device = compute_device(meeting)
    copy_overlap(rounds, index, old, new)
    outgoing = rounds.outgoing(index)
    incoming = rounds.incoming(index)
    total = [0] * len(rounds.devices)
    for number in range(rounds.count):
        counts = rounds.counts(number)
        boxes = [*rounds.boxes(outgoing, number)]
        row = _row(boxes, old, rounds.dtype, device)
        row_before = _row(boxes, sent, rounds.dtype, device)
        is_changed = (bits(row) != bits(row_before)).any(1)

        parcels = [torch.empty(0, dtype=torch.uint8, device=device)]
        sizes = [0] * len(counts)
        ends = counts[index].cumsum().tolist()
        for receiver in np.flatnonzero(counts[index]).tolist():
            begin = ends[receiver] - counts[index, receiver]
            positions = is_changed[begin : ends[receiver]].nonzero()[:, 0]
            segment = row[begin : ends[receiver]]
            parcel = pack(Change(positions, segment[positions]), segment)
            sizes[receiver] = len(parcel)
            total[receiver] += len(parcel)
            parcels.append(parcel)
        with uncounted():
            matrix = all_gather(torch.tensor(sizes, device=device), AXIS).view(len(sizes), -1)
            matrix = matrix.cpu()
            arrived = all_to_all(torch.cat(parcels), AXIS, counts=matrix.tolist())

        boxes = [*rounds.boxes(incoming, number)]
        begins = np.cumsum([0, *[box.size for _, box in boxes]])
        offset = 0
        for source, packed in enumerate(arrived.split(matrix[:, index].tolist())):
            if len(packed):
                change = unpack(packed, rounds.dtype)
                _write(boxes, begins, change._replace(positions=change.positions + offset), new)
            offset += int(counts[source, index])
    return total


def _row(
    boxes: Sequence[tuple[int, Any]], shards: Shards, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the values of boxes one after another, on a device."""
    values = [torch.empty(0, dtype=dtype, device=device)]
    for leaf, box in boxes:
        shard = shards[leaf]
        assert shard is not None
        values.append(box.of(shard).reshape(-1).to(dtype).to(device))
    return torch.cat(values)


def _write(boxes: Sequence[tuple[int, Any]], begins: Any, change: Change, new: Shards) -> None:
    """Write changed elements of a row into the boxes that the row is of."""
    positions = change.positions
    bounds = torch.searchsorted(positions, torch.tensor(begins, device=positions.device)).tolist()
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
            quotient = rest // length
            offsets += (rest - quotient * length) * stride
            rest = quotient
        values = change.values[first:last].to(shard.dtype)
        # An array in host memory is written there.
        shard.view(-1)[offsets.to(shard.device)] = values.to(shard.device)
