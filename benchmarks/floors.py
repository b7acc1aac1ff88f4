"""Training loops written by hand, as fast as our collectives allow: what `train_step` is measured against.

A unit's parameters are views of one flat buffer; autograd returns their gradients together, right after the unit's
backward.

    stage  before a unit runs      its gradient is ready        after backward, for each unit
    0                              psum.start                   wait, AdamW on all
    2                              psum_scatter.start           wait, AdamW on the own shard, all_gather.start
    3      all_gather, next one's  psum_scatter.start, free     wait, AdamW on the own shard
           start; again in backward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from models import BETAS, DECAY, EPSILON, RATE, SEED, Batch, Model, Params, Step, Unit, part
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import fshard as fs


class Flat:
    """A unit whose parameters are views of one flat buffer, with AdamW's state for the range that is updated here."""

    def __init__(self, unit: Unit, params: Params, n: int) -> None:
        self.unit, self.names, self.shapes = (
            unit,
            list(params),
            [leaf.shape for leaf in params.values()],
        )
        self.sizes = [leaf.numel() for leaf in params.values()]
        self.sizes.append(-sum(self.sizes) % n)  # padding, so that all shards are equal
        leaves = [*(leaf.flatten() for leaf in params.values()), torch.zeros(self.sizes[-1])]
        self.full: Tensor | None = torch.cat(leaves)
        self.gathering: fs.mesh.Handle | None = None
        self.reducing: fs.mesh.Handle | None = None
        self.saved = False  # whether backward needs the parameters
        self.train(self.full)

    def train(self, shard: Tensor) -> None:
        """Say which range is updated here."""
        self.shard = shard
        self.first, self.second, self.count = (
            torch.zeros_like(shard),
            torch.zeros_like(shard),
            torch.zeros(()),
        )

    def own(self, mesh_size: int, index: int) -> Tensor:
        """Return the range of the full buffer that belongs to device `index`."""
        assert self.full is not None
        return self.full.chunk(mesh_size)[index]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the parameters, or their gradients, as views of a buffer."""
        return [
            x.view(shape) for x, shape in zip(buffer.split(self.sizes), self.shapes, strict=False)
        ]

    def run(self, x: Tensor, batch: Batch, reduce: Reduce) -> Tensor:
        """Run the unit on views of its buffer."""
        anchor = torch.zeros((), requires_grad=True)
        return self.unit(
            dict(zip(self.names, Used.apply(anchor, self, reduce), strict=True)), x, batch
        )

    def adamw(self, gradient: Tensor) -> None:
        """Update the range that is updated here, in place."""
        self.count += 1
        options = {
            "lr": RATE,
            "beta1": BETAS[0],
            "beta2": BETAS[1],
            "weight_decay": DECAY,
            "eps": EPSILON,
        }
        state = [self.shard], [gradient], [self.first], [self.second], [], [self.count]
        torch._fused_adamw_(*state, **options, amsgrad=False, maximize=False)

    # stage 3: full parameters are gathered and freed

    def begin(self) -> None:
        """Start the all-gather, unless it has finished or is in flight."""
        if self.full is None and self.gathering is None:
            self.gathering = fs.all_gather.start(self.shard, "data")

    def arrive(self) -> Tensor:
        """Wait for the full parameters; return them."""
        self.begin()
        if self.gathering is not None:
            self.full, self.gathering = self.gathering.wait(), None
        assert self.full is not None
        return self.full

    @contextmanager
    def passing(self, before: Flat | None) -> Iterator[None]:
        """Save a view's offset in the full buffer instead of the tensor; in backward, gather again."""
        full = self.arrive()
        begin = full.data_ptr()
        end, self.saved = begin + full.nbytes, False

        def pack(x: Tensor) -> Tensor | tuple[Any, ...]:
            if not begin <= x.data_ptr() < end:
                return x
            self.saved = True
            return x.shape, x.stride(), x.storage_offset()

        def unpack(packed: Tensor | tuple[Any, ...]) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            if self.full is None:
                self.arrive()
                if before is not None and before.saved:
                    before.begin()
            return self.full.as_strided(*packed)

        with saved_tensors_hooks(pack, unpack):
            yield
        self.full = None


Reduce = Callable[[Flat, Sequence[Tensor]], None]


class Used(torch.autograd.Function):
    """(anchor) -> the parameters of a unit; backward gets all their gradients at once, right after the unit's own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, flat: Flat, reduce: Reduce) -> tuple[Tensor, ...]:
        ctx.flat, ctx.reduce = flat, reduce
        return tuple(flat.views(flat.arrive()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.reduce(ctx.flat, gradients)
        return None, None, None


class Reducer:
    """Starts to reduce a unit's gradients from one of two buffers: no more than two are ever under way."""

    def __init__(
        self, flats: list[Flat], start: Callable[[Tensor], fs.mesh.Handle], *, release: bool = False
    ) -> None:
        size = max(sum(flat.sizes) for flat in flats)
        self.buffers, self.busy = [torch.zeros(size), torch.zeros(size)], list[Flat]()
        self.start, self.release, self.results = start, release, dict[Flat, Tensor]()

    def __call__(self, flat: Flat, gradients: Sequence[Tensor]) -> None:
        if len(self.busy) == 2:
            self._wait(self.busy[0])
        buffer, other = self.buffers
        self.buffers = [other, buffer]
        used = buffer[: sum(flat.sizes)]  # the padding belongs to no parameter
        torch._foreach_copy_(flat.views(used), list(gradients))
        flat.reducing = self.start(used)
        self.busy.append(flat)
        if self.release:
            flat.full = None

    def _wait(self, flat: Flat) -> None:
        self.busy.remove(flat)
        assert flat.reducing is not None
        self.results[flat], flat.reducing = flat.reducing.wait(), None

    def take(self, flat: Flat) -> Tensor:
        """Return a unit's reduced gradient, and free it."""
        if flat in self.busy:
            self._wait(flat)
        return self.results.pop(flat)


def flats_of(model: Model, n: int) -> list[Flat]:
    params = model.init(SEED)
    return [Flat(unit, part(params, name), n) for name, unit in model.units.items()]


def forward(flats: list[Flat], batch: Batch, reduce: Reduce) -> Tensor:
    """Return the loss."""
    x = batch["inputs"]
    for flat in flats:
        x = flat.run(x, batch, reduce)
    return x


def inside(mesh: fs.Mesh, step: Step) -> Step:
    """Make a step that calls collectives: they need to know their device."""
    return lambda index: fs.run(step, index, mesh=mesh)[0]


def own_index(mesh: fs.Mesh) -> int:
    return fs.run(lambda: fs.axis_index("data"), mesh=mesh)[0]


# -- the loops -----------------------------------------------------------------------------------------------------


def local(model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """No communication: what a step costs without the others."""
    flats = flats_of(model, mesh.size)
    gradients = {flat: torch.zeros_like(flat.shard) for flat in flats}

    def keep(flat: Flat, given: Sequence[Tensor]) -> None:
        torch._foreach_copy_(flat.views(gradients[flat]), list(given))

    def step(index: int) -> Tensor:
        loss = forward(flats, data[index], keep)
        loss.backward()
        for flat in flats:
            flat.adamw(gradients[flat])
        return loss.detach()

    return step


def floor_0(model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """Everything is replicated; gradients are summed as they become ready."""
    flats = flats_of(model, mesh.size)
    reduce = Reducer(flats, lambda gradient: fs.psum.start(gradient, "data"))

    def step(index: int) -> Tensor:
        loss = forward(flats, data[index], reduce)
        (loss / mesh.size).backward()
        for flat in reversed(flats):
            flat.adamw(reduce.take(flat))
        return loss.detach()

    return inside(mesh, step)


def floor_2(model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """Gradients are summed and scattered as they become ready; each device updates its shard, and all gather."""
    n, index_here, flats = mesh.size, own_index(mesh), flats_of(model, mesh.size)
    reduce = Reducer(flats, lambda gradient: fs.psum_scatter.start(gradient, "data"))
    for flat in flats:
        flat.train(flat.own(n, index_here))

    def step(index: int) -> Tensor:
        loss = forward(flats, data[index], reduce)
        (loss / n).backward()
        for flat, after in zip([*reversed(flats), None], [None, *reversed(flats)], strict=True):
            if flat is not None:
                flat.adamw(reduce.take(flat))
                flat.gathering = fs.all_gather.start(flat.shard, "data")
            if after is not None:
                after.arrive()
                after.shard = after.own(n, index_here)
        return loss.detach()

    return inside(mesh, step)


def floor_3(reshard: bool, model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """Each device stores its shards; a unit is unsharded while it is used."""
    n, index_here, flats = mesh.size, own_index(mesh), flats_of(model, mesh.size)
    reduce = Reducer(flats, lambda gradient: fs.psum_scatter.start(gradient, "data"), release=True)
    for flat in flats:
        flat.train(flat.own(n, index_here).clone())
        flat.full = None

    def step(index: int) -> Tensor:
        x = data[index]["inputs"]
        for flat, before, after in zip(flats, [None, *flats], [*flats[1:], None], strict=False):
            flat.arrive()
            if after is not None:
                after.begin()
            with (
                flat.passing(before) if reshard and after is not None else nullcontext()
            ):  # the last one stays
                x = flat.run(x, data[index], reduce)
        if reshard:
            flats[-2].begin()
        (x / n).backward()
        for flat in reversed(flats):
            flat.adamw(reduce.take(flat))
        return x.detach()

    return inside(mesh, step)
