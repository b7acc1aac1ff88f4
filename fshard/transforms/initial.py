"""`init_params`: parameters that are born sharded.

The function that makes them runs twice: first on tensors without memory, which says what it makes and by which
operations; then these operations are done again, one after the other, in real memory.  A tensor is cut, and let go, as
soon as no later operation touches its memory.  So no device ever holds the whole model, and the numbers are the ones
that the function would have drawn by itself.

    run without memory     a = empty(..), normal_(a), b = zeros(..), c = a[0], ...
    repeat                 a ──────────────┐ last touched: cut it, let it go       b ──┐ cut, let go
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from fshard.errors import LayoutError
from fshard.mesh.mesh import Mesh
from fshard.mesh.placing import device_put
from fshard.mesh.tree import PyTree, flatten_with_paths, unflatten
from fshard.transforms.rules import Choice, Rules, layouts_of, named, parts_of

_tree: Any = optree


def init_params(
    init_fn: Callable[[], PyTree], rules: Rules, *, mesh: Mesh, seed: int | None = None, frozen: Choice = None
) -> PyTree:
    """Return the parameters that `init_fn()` makes, laid out by rules, without holding all of them at once.

    Args:
        init_fn: makes a tree of tensors, drawing from torch's default generator or from constants.  It must not look at
            values: no `.item()`, no branch on a tensor.
        rules: see `shard_params`.
        mesh: the devices.
        frozen: which are not to be trained: see `shard_params`.
        seed: draw as after `torch.manual_seed(seed)`, and leave the generator as it was; None: draw from it as it is.

    Nothing is sent: every process draws all numbers and keeps its pieces.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 4})
    >>> params = fs.init_params(lambda: {"w": torch.randn(2, 2), "b": torch.zeros(2)}, fs.fsdp("data"), mesh=mesh, seed=0)
    >>> fs.typeof(params["w"]), torch.equal(fs.unshard(params["w"]), torch.randn(2, 2, generator=torch.manual_seed(0)))
    (f32[2, 2]{flat:data}, True)
    """
    recording = _Recording()
    try:
        with recording.noted_seeds(), FakeTensorMode(allow_non_fake_inputs=True), recording:
            made = init_fn()
    except DataDependentOutputException as error:
        by = next(frame.name for frame in reversed(extract_tb(error.__traceback__)) if not _is_below(frame.filename))
        raise LayoutError(
            f"init_params: the function cannot be run without memory: {by} looks at a value. "
            "Call it and lay its result out with fs.shard_params, or draw without looking."
        ) from error
    except (RuntimeError, TypeError) as error:
        raise LayoutError(
            f"init_params: the function cannot be run without memory ({str(error).strip().splitlines()[0]}). "
            "If it has to look at values, call it and lay its result out with fs.shard_params."
        ) from error
    paths, leaves, structure = flatten_with_paths(made)
    foreign = [named(parts_of(path)) for path, leaf in zip(paths, leaves, strict=True) if not recording.made(leaf)]
    if foreign:
        raise LayoutError(
            f"init_params: {', '.join(foreign)} was not made by the function. Lay it out with fs.shard_params."
        )
    layouts = layouts_of(made, rules, mesh, frozen, "init_params")
    placed: dict[int, Any] = {}

    def place(number: int, x: Tensor) -> None:
        placed[number] = device_put(x.detach(), layouts[number])

    state = torch.get_rng_state()
    if seed is not None:
        torch.manual_seed(seed)
    try:
        with torch.no_grad():
            recording.repeat(leaves, place)
    finally:
        if seed is not None:
            torch.set_rng_state(state)
    first = {id(leaf): number for number, leaf in reversed([*enumerate(leaves)])}  # a tied leaf is one
    return unflatten(structure, [placed[first[id(leaf)]] for leaf in leaves])


def _is_below(filename: str) -> bool:
    """Return whether a file is of what runs functions, here or in torch, and not of what initialises."""
    return filename == __file__ or ("/torch/" in filename and "/torch/nn/" not in filename)


@dataclass(frozen=True)
class _Place:
    """Where a tensor without memory lay at one moment: operations may move it, and `x.data = y` does without one."""

    memory: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    def within(self, memory: UntypedStorage) -> Tensor:
        """Return the tensor that lies so in real memory."""
        x = torch.empty(0, dtype=self.dtype, device=memory.device)
        x = x.set_(memory, self.offset, self.size, self.stride)  # pyright: ignore[reportArgumentType]
        x = x.conj() if self.conjugated else x
        return torch._neg_view(x) if self.negated else x  # pyright: ignore


class _Operation(NamedTuple):
    """What was done: on which tensors, and what came out."""

    func: Any
    args: Any
    kwargs: Any
    results: list[_Place]

    def places(self) -> list[_Place]:
        """Return where all that it touches lies."""
        return [x for x in _tree.tree_leaves((self.args, self.kwargs, self.results)) if isinstance(x, _Place)]

    def repeat(self, real: dict[int, UntypedStorage]) -> None:
        """Do it again in real memory."""
        args, kwargs = _tree.tree_map(
            lambda x: x.within(real[x.memory]) if isinstance(x, _Place) else x, (self.args, self.kwargs)
        )
        out = [x for x in _tree.tree_leaves(self.func(*args, **kwargs)) if isinstance(x, Tensor)]
        for place, x in zip(self.results, out, strict=True):
            if place.memory not in real:
                real[place.memory] = _lying(x, place).untyped_storage()


class _Recording(TorchDispatchMode):
    """Notes all operations on tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self.memories: dict[int, UntypedStorage] = {}  # held, so that none is taken for another that came later
        self._drawn = torch.get_rng_state()

    @contextmanager
    def noted_seeds(self) -> Generator[None]:
        """Note seeds that are set, to be set again; leave torch's generator as it was."""
        before = self._drawn
        try:
            yield
            self._note_seed()
        finally:
            torch.set_rng_state(before)

    def _note_seed(self) -> None:
        """Note if a seed was set since the last draw: without memory a draw leaves the generator as it is, so one is made."""
        with _disable_current_modes():
            state = torch.get_rng_state()
            if not state.equal(self._drawn):
                self.operations.append(_Operation(torch.set_rng_state, (state,), {}, []))
            torch.rand(1)
            self._drawn = torch.get_rng_state()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note_seed()
        places, named_places = _tree.tree_map(self._place, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        results = [self._place(x) for x in _tree.tree_leaves(out) if isinstance(x, FakeTensor)]
        if results or func._schema.is_mutable:
            self.operations.append(_Operation(func, places, named_places, results))
        return out

    def made(self, x: Any) -> bool:
        """Return whether a tensor's memory came out of an operation."""
        return isinstance(x, FakeTensor) and x.untyped_storage()._cdata in self.memories  # pyright: ignore

    def repeat(self, leaves: Sequence[FakeTensor], place: Callable[[int, Tensor], None]) -> None:
        """Do all operations in real memory; hand over each leaf as soon as nothing more will be done to it."""
        last = {x.memory: turn for turn, operation in enumerate(self.operations) for x in operation.places()}
        ends: dict[int, list[int]] = {}
        for memory, turn in last.items():
            ends.setdefault(turn, []).append(memory)
        wanted: dict[int, dict[int, tuple[int, _Place]]] = {}
        for number, leaf in reversed([*enumerate(leaves)]):
            own = self._place(leaf)
            wanted.setdefault(own.memory, {})[id(leaf)] = number, own
        real: dict[int, UntypedStorage] = {}
        for turn, operation in enumerate(self.operations):
            operation.repeat(real)
            for memory in ends.get(turn, ()):
                for number, own in wanted.get(memory, {}).values():
                    place(number, own.within(real[memory]))
                real.pop(memory, None)

    def _place(self, x: Any) -> Any:
        """Return where a tensor without memory lies now; all else as it is."""
        if not isinstance(x, FakeTensor):
            return x
        memory = x.untyped_storage()
        number: int = memory._cdata  # pyright: ignore[reportPrivateUsage]
        self.memories[number] = memory
        return _Place(number, x.dtype, x.size(), x.stride(), int(x.storage_offset()), x.is_conj(), x.is_neg())


def _lying(x: Tensor, place: _Place) -> Tensor:
    """Return what came out of an operation as it was foreseen to lie: some libraries choose other strides."""
    if (x.stride(), x.storage_offset(), x.is_conj(), x.is_neg()) == (
        place.stride, place.offset, place.conjugated, place.negated
    ):  # fmt: skip
        return x
    memory = torch.empty(place.offset + x.numel(), dtype=x.dtype, device=x.device).untyped_storage()
    place.within(memory).copy_(x)
    return place.within(memory)
