"""`History`: what a function does on tensors without memory, and parts of it done again in real memory.

Every operation is noted with those that made what it reads, and a draw with the state of the generator that it begins
from.  So a value can be had by itself: what led to it is done again, whatever else was drawn in between.

    turn   0 a = empty    1 normal_(a)    2 b = empty    3 normal_(b)    4 c = b > 2    5 c.any()?    6 b *= 3
    a value that is looked at:    3 4 5, at once                         the parameters b, a:   3 4 6,  1

A draw that fills its tensor needs nothing of what was in it, not even `empty`.  What reads a value (4) is done before what
overwrites it (6), if anybody needs both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from warnings import catch_warnings, filterwarnings

import optree
import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from fshard.errors import LayoutError
from fshard.transforms.randomness import State, drawing_from, random_state

_tree: Any = optree
Made = TypeVar("Made")
Memories = dict[int, UntypedStorage]
"""Memory by its number."""


@dataclass(frozen=True)
class Place:
    """Where a tensor without memory lay at one moment: operations may move it, and `x.data = y` does without one.

    `whole`: it has all of its memory to itself.
    """

    memory: int
    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool
    whole: bool

    def within(self, memory: UntypedStorage) -> Tensor:
        """Return the tensor that lies so in real memory."""
        x = torch.empty(0, dtype=self.dtype, device=memory.device)
        x = x.set_(memory, self.offset, self.size, self.stride)  # pyright: ignore[reportArgumentType]
        x = x.conj() if self.conjugated else x
        return torch._neg_view(x) if self.negated else x  # pyright: ignore


@dataclass(frozen=True)
class Operation:
    """What was done.

    Args:
        func: by which operator.
        given: its args and kwargs, with places for tensors without memory.
        results: what came out.
        written: the memories that it writes to.
        after: the turns that made what it reads.
        random: where its draws begin; None if it draws nothing.
        filled: the tensor that it gives all its values, whatever was in it.
    """

    func: Any
    given: Any
    results: list[Place]
    written: set[int]
    after: set[int]
    random: State | None
    filled: Place | None

    @property
    def touched(self) -> set[int]:
        """Return the memories that it reads or writes to."""
        return _memories((self.given, self.results))

    def repeat(self, real: Memories) -> Any:
        """Do it again in real memory."""
        if self.filled is not None and self.filled.memory not in real:
            empty = torch.empty(self.filled.size, dtype=self.filled.dtype, device=self.filled.device)
            real[self.filled.memory] = empty.untyped_storage()
        if self.random is not None:
            self.random.set()
        aliases = any(argument.alias_info is not None for argument in self.func._schema.arguments)

        def realised(x: Any) -> Any:
            if isinstance(x, Place):
                return x.within(real[x.memory])
            return x.clone() if aliases and isinstance(x, Tensor) else x  # one from outside stays as it is

        args, kwargs = _tree.tree_map(realised, self.given)
        out = self.func(*args, **kwargs)
        found = [x for x in _tree.tree_leaves(out) if isinstance(x, Tensor)]
        for place, x in zip(self.results, found, strict=bool(self.results)):
            if place.memory not in real:
                real[place.memory] = _lying(x, place).untyped_storage()
        return out


class History(TorchDispatchMode):
    """Notes all operations on tensors without memory; to be entered within a FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Operation] = []
        self._memories: Memories = {}  # held, so that none is taken for another that came later
        self._maker: dict[int, int] = {}  # the turn that has written to a memory last
        self._generators: dict[torch.Generator, None] = {}  # of the function's own
        self._let_go = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _tree.tree_map(self._place, (args, kwargs or {}))  # before: an operation may move what it is given
        if any(isinstance(x, Tensor) for x in _written(func, *given)):
            raise LayoutError(
                f"init_params: the function changes a tensor that it has not made ({func}). Let it change a clone() of it."
            )
        if torch.Tag.data_dependent_output in func.tags:
            return self._seen(func, given)
        try:
            out = func(*args, **(kwargs or {}))
        except DynamicOutputShapeException:
            out = _tree.tree_map(_without_memory, self._seen(func, given))
        results = [self._place(x) for x in _tree.tree_leaves(out) if isinstance(x, FakeTensor)]
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draw(func, given, results)
        elif results or func._schema.is_mutable:
            self._note(func, given, results)
        return out

    def made(self, x: Any) -> bool:
        """Return whether a tensor's memory came out of an operation."""
        return isinstance(x, FakeTensor) and self._place(x).memory in self._maker

    def repeat(self, leaves: Sequence[Any], hand_over: Callable[[int, Tensor], None]) -> None:
        """Make leaves in real memory, one after the other; hand each over as soon as nothing more will be done to it."""
        wanted: dict[int, dict[int, tuple[int, Place]]] = {}
        for number, leaf in reversed([*enumerate(leaves)]):
            place = self._place(leaf)
            wanted.setdefault(place.memory, {})[id(leaf)] = number, place
        makers = [self._maker[memory] for memory in reversed(wanted)]
        before = self._hazards(self._leading_to(makers))
        turns: dict[int, None] = {}
        for maker in makers:
            turns |= dict.fromkeys(_closure([maker], before.__getitem__, turns))

        def end(memory: int, real: UntypedStorage) -> None:
            for number, place in wanted.get(memory, {}).values():
                hand_over(number, place.within(real))

        with drawing_from(random_state(*self._generators)):
            self._run([*turns], end)

    def _leading_to(self, turns: Iterable[int]) -> list[int]:
        """Return some turns and all that made what they read, in their order."""
        return _closure(turns, lambda turn: self._operations[turn].after)

    def _hazards(self, turns: Sequence[int]) -> dict[int, set[int]]:
        """Return which of some turns have to come before each: what made what it touches, or read what it overwrites."""
        maker: dict[int, int] = {}
        readers: dict[int, set[int]] = {}
        before: dict[int, set[int]] = {}
        for turn in turns:
            operation = self._operations[turn]
            touched = operation.touched
            before[turn] = {maker[memory] for memory in touched if memory in maker}
            for memory in touched - operation.written:
                readers.setdefault(memory, set()).add(turn)
            for memory in operation.written:
                before[turn] |= readers.pop(memory, set())
                maker[memory] = turn
        return before

    def _run(self, turns: Sequence[int], end: Callable[[int, UntypedStorage], None] | None = None) -> Any:
        """Do operations again, and let go of memory after the last that touches it; return what the last one gave."""
        last = {memory: turn for turn in turns for memory in self._operations[turn].touched}
        real: Memories = {}
        out: Any = None
        for turn in turns:
            out = self._operations[turn].repeat(real)
            for memory in self._operations[turn].touched:
                if last[memory] == turn:
                    own = real.pop(memory)
                    if end is not None:
                        end(memory, own)
                    self._let_go += own.nbytes()
            if self._let_go > _MUCH:
                self._let_go = 0
                _trim()
        return out

    def _note(self, func: Any, given: Any, results: list[Place], random: State | None = None) -> None:
        """Note an operation."""
        changed = _written(func, *given)
        read = _memories(given)
        filled = changed[0] if random is not None and changed and changed[0].whole and len(read) == 1 else None
        written = _memories(changed) | (_memories(results) - read)
        needed = (read if filled is None else set[int]()) | (written - read)
        after = {self._maker[memory] for memory in needed if memory in self._maker}
        self._maker.update(dict.fromkeys(written, len(self._operations)))
        self._operations.append(Operation(func, given, results, written, after, random, filled))

    def _draw(self, func: Any, given: Any, results: list[Place]) -> None:
        """Note a draw, and draw: without memory nothing was, and the generator was left as it is."""
        own = [x for x in _tree.tree_leaves(given) if isinstance(x, torch.Generator)]
        self._generators.update(dict.fromkeys(own))
        with _disable_current_modes():
            self._note(func, given, results, random_state(*own))
            _, after = self._again(own)
            after.set()

    def _seen(self, func: Any, given: Any) -> Any:
        """Return what an operation gives in real memory."""
        self._note(func, given, [])
        with _disable_current_modes():
            return self._again(())[0]

    def _again(self, generators: Collection[torch.Generator]) -> tuple[Any, State]:
        """Do the last operation again, with what leads to it; return what it gives and where it leaves generators."""
        with drawing_from(random_state(*self._generators)):
            out = self._run(self._leading_to([len(self._operations) - 1]))
            return out, random_state(*generators)

    def _place(self, x: Any) -> Any:
        """Return where a tensor without memory lies now; all else as it is."""
        if not isinstance(x, FakeTensor):
            return x
        memory = x.untyped_storage()
        number: int = memory._cdata  # pyright: ignore[reportPrivateUsage]
        self._memories[number] = memory
        whole = x.is_contiguous() and x.numel() * x.itemsize == memory.nbytes()
        at = (x.size(), x.stride(), int(x.storage_offset()))
        return Place(number, x.dtype, x.device, *at, x.is_conj(), x.is_neg(), whole)


_MUCH = 1 << 26


@cache
def _c_library() -> Any:
    return CDLL(None)


def _trim() -> None:
    """Give memory back that was let go: the C library keeps it, and small ones come to lie between large pieces."""
    if hasattr(_c_library(), "malloc_trim"):  # as glibc has it
        _c_library().malloc_trim(0)


def noted(function: Callable[[], Made]) -> tuple[History, Made]:
    """Run a function on tensors without memory; return what it did, and what it has made."""
    history = History()
    with catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), history:
        filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # as deepcopy does, and clones it then
        return history, function()


def _closure(starts: Iterable[int], before: Callable[[int], Iterable[int]], done: Collection[int] = ()) -> list[int]:
    """Return in order the turns that are to be done up to some, but for those that are done."""
    found: set[int] = set()
    left = [*starts]
    while left:
        turn = left.pop()
        if turn not in found and turn not in done:
            found.add(turn)
            left += before(turn)
    return sorted(found)


def _memories(tree: Any) -> set[int]:
    return {x.memory for x in _tree.tree_leaves(tree) if isinstance(x, Place)}


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return what an operator writes to."""
    arguments = func._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    names = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return [x for name in names if name in given for x in _tree.tree_leaves(given[name])]


def _without_memory(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _lying(x: Tensor, place: Place) -> Tensor:
    """Return what came out of an operation as it was foreseen to lie: some libraries choose other strides."""
    if (x.stride(), x.storage_offset(), x.is_conj(), x.is_neg()) == (
        place.stride, place.offset, place.conjugated, place.negated
    ):  # fmt: skip
        return x
    memory = torch.empty(place.offset + x.numel(), dtype=x.dtype, device=x.device).untyped_storage()
    place.within(memory).copy_(x)
    return place.within(memory)
