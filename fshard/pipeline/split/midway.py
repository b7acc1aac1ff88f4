"""A module's forward that stops where another stage continues, or continues where another one stopped.

A block of the stage is called with arguments of the current run; a block of another stage returns the shape of its
result, or ends the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from enum import Enum
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode_temporarily  # pyright: ignore[reportPrivateUsage]

from fshard.errors import LayoutError
from fshard.mesh.layout import PyTree, Structure, flatten, flatten_with_paths, unflatten
from fshard.pipeline.split.replay import Like, Lost, Replay, is_valueless, lost_at, without_memory, without_values

PLAIN = (Tensor, Like, str, bytes, int, float, complex, type(None), Enum, torch.dtype, torch.device, FunctionType, type)
"""The types that stages can send, besides trees of them."""


class Arguments(NamedTuple):
    """The arguments of a call."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @staticmethod
    def of(value: PyTree) -> Arguments:
        """Call a module with a microbatch: a dict by name, a tuple or list by position, anything else as one
        argument.
        """
        if isinstance(value, dict):
            return Arguments((), value)
        return Arguments(value, {}) if isinstance(value, tuple | list) else Arguments((value,), {})


class StageMessage(NamedTuple):
    """The message between stages: the arguments of the next block, and integers and shapes of the microbatch."""

    call: Arguments
    inputs: Arguments


def device_of(tree: PyTree) -> torch.device:
    """Return where the tensors of a tree are."""
    tensors = (x for x in flatten(tree)[0] if isinstance(x, Tensor) and not is_valueless(x))
    return next((x.device for x in tensors), torch.device("cpu"))


def describe(inputs: Arguments) -> Arguments:
    """Return the part of a microbatch that later stages receive."""
    return without_values(inputs, lambda x: x.is_floating_point() or x.is_complex())


# -- one run ----------------------------------------------------------------------------------------------------


class ForwardPart(NamedTuple):
    """Which blocks of a module a stage has."""

    title: str
    names: Sequence[str]
    begin: int
    end: int

    def __str__(self) -> str:
        return f"the stage of {self.title} from {self.names[self.begin]} to {self.names[self.end - 1]}"


class Reached(BaseException):  # no Exception: a forward may catch those
    """The first block of the next stage is called: here a stage ends."""

    def __init__(self, call: Arguments) -> None:
        super().__init__()
        self.call = call


class BlockRun:
    """A stage in one call; `mail` has the arguments of its first block, unless it is the first stage."""

    def __init__(self, part: ForwardPart, mail: Arguments | None, device: torch.device) -> None:
        self._part, self._mail = part, mail
        self._mode = None if mail is None else Replay(device)
        self._received: Mapping[int, tuple[object, Tensor]] = {}

    def of(self, module: Any, inputs: Arguments) -> Any:
        """Run a module's forward."""
        token = _now.set(self)
        try:
            with self._mode or nullcontext():
                return self._ended(module(*inputs.args, **inputs.kwargs))
        except Lost as error:
            raise LayoutError(
                f"{self._part} has no value for {lost_at(error.__traceback__)}: {error}, which has a shape only. "
                "A value that a later stage uses must be an argument of the blocks, or computed from integers."
            ) from None
        except (RuntimeError, NotImplementedError) as error:
            if self._mode is None or self._mode.arrived:
                raise
            raise LayoutError(
                f"{self._part} runs the code before it without values, but {lost_at(error.__traceback__)} needs them: "
                f"{next(iter(str(error).strip().splitlines()), type(error).__name__)}"
            ) from error
        finally:
            _now.reset(token)

    def called(self, place: int, given: Arguments) -> Arguments:
        """Return the actual arguments of a block of this stage."""
        if self._mode is None:
            return given
        if self._mode.arrived:
            call = self.real(given)
        else:
            own = _by_path(given)
            paths, received, structure = flatten_with_paths(self._mail, none_is_leaf=True)
            pairs = [(own.get(path), real) for path, real in zip(paths, received, strict=True)]
            self._received = {id(x): (x, real) for x, real in pairs if is_valueless(x) and isinstance(real, Tensor)}
            call = unflatten(structure, [x if isinstance(real, Like) else real for x, real in pairs])
            self._mode.arrived = True
        _check(f"{self._part.names[place]} is called with", call)
        return call

    def real(self, given: Arguments) -> Arguments:
        """Fill values into the arguments of a block, where they were received."""
        leaves, structure = flatten(given, none_is_leaf=True)
        return unflatten(structure, [self._received[id(x)][1] if id(x) in self._received else x for x in leaves])

    def at_work(self) -> AbstractContextManager[None]:
        """Return the context of a block that is run for real."""
        return nullcontext() if self._mode is None else _pop_mode_temporarily()

    def absent(self, place: int, given: Arguments, shapes: Shapes, training: bool) -> Any:
        """Replace a block of another stage."""
        if place >= self._part.end:
            if strange := [f"{p}: {type(x).__name__}" for p, x in _by_path(given).items() if not isinstance(x, PLAIN)]:
                raise LayoutError(
                    f"{self._part} ends where {self._part.names[place]} is called with {', '.join(strange)}: only tensors and "
                    "plain values can be sent. Let it be None there; of a cache, give use_cache=False."
                )
            raise Reached(without_values(self.real(given), is_valueless))
        return shapes.of(given, training)

    def _ended(self, result: Any) -> Any:
        """Return the result of the module."""
        if self._part.end < len(self._part.names) or (self._mode is not None and not self._mode.arrived):
            raise LayoutError(
                f"{self._part} does not reach the blocks that it was split at, as it did with the sample."
            )
        _check("the result has", result)
        return result


class Tracing(BlockRun):
    """A run of a module without values: which blocks have begun, and which tensors were used since."""

    def __init__(self, part: ForwardPart, device: torch.device) -> None:
        super().__init__(part, None, device)
        self.begun: list[int] = []
        self.used: dict[int, set[int]] = defaultdict(set)
        self._mode: Replay | None = Replay(device, self._note)

    def _note(self, xs: Sequence[Tensor]) -> None:
        for x in xs:
            self.used[id(x)].add(max(self.begun, default=0))

    def called(self, place: int, given: Arguments) -> Arguments:
        """Note it."""
        self.begun.append(place)
        return given

    def at_work(self) -> AbstractContextManager[None]:
        """Go on looking."""
        return nullcontext()

    def _ended(self, result: Any) -> Any:
        return result


_now: ContextVar[BlockRun | None] = ContextVar("run", default=None)


def _by_path(tree: PyTree) -> dict[str, Any]:
    paths, leaves, _ = flatten_with_paths(tree, none_is_leaf=True)
    return dict(zip(paths, leaves, strict=True))


def _check(where: str, tree: PyTree) -> None:
    lost = [f"{path or 'a tensor'}: {Like(x)}" for path, x in _by_path(tree).items() if is_valueless(x)]
    if lost:
        raise Lost(f"{where} {', '.join(lost)}")


def _own_call(kind: type, module: Any) -> Callable[..., Any]:
    """Return the plain call of a module, without stages or blocks."""
    after: Any = super(kind, module)
    return after.__call__


# -- what modules become ----------------------------------------------------------------------------------------


class Stage:
    """A module that is one stage of itself."""

    _part: ForwardPart

    def __call__(self, value: PyTree) -> Any:
        mail, inputs = (None, Arguments.of(value)) if self._part.begin == 0 else value
        run = BlockRun(self._part, mail, device_of(mail))
        try:
            return run.of(_own_call(Stage, self), without_memory(inputs))
        except Reached as reached:
            return StageMessage(reached.call, describe(inputs))


class Block:
    """A block of the stage that is run."""

    _place: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run, forward = _now.get(), vars(self).get("_around", _as_it_is)(_own_call(Block, self))
        if run is None:
            return forward(*args, **kwargs)
        call = run.called(self._place, Arguments(args, kwargs))
        with run.at_work():
            return forward(*call.args, **call.kwargs)


def around_blocks(stage: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Wrap the blocks of a stage with `around`; return False if it has none."""
    blocks = [part for part in stage.modules() if isinstance(part, Block)]
    for block in blocks:
        vars(block)["_around"] = around
    return bool(blocks)


def _as_it_is(call: Callable[..., Any]) -> Callable[..., Any]:
    return call


class Shapes:
    """The output shapes of a block for input shapes: it is run on meta tensors once for each."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._known: dict[Any, Any] = {}

    def of(self, given: Arguments, training: bool) -> Any:
        """Return the output of the block; its inputs are passed through."""
        leaves, structure = flatten(given, none_is_leaf=True)
        describe = [Like(x) if isinstance(x, Tensor) else x for x in leaves]
        plain = all(isinstance(x, PLAIN) for x in describe)
        key = (structure, tuple([(type(x), x) for x in describe]), training) if plain else None
        found = self._known.get(key)
        if found is None:
            found = self._compute(structure, describe, training)
        if plain:
            self._known[key] = found
        form, made = found
        return unflatten(form, [without_memory(x) if place is None else leaves[place] for place, x in made])

    def _compute(self, structure: Structure, describe: Sequence[Any], training: bool) -> tuple[Structure, list[Any]]:
        args, kwargs = unflatten(structure, given := [without_memory(x) for x in describe])
        with torch.no_grad():
            made, form = flatten(self.block.train(training)(*args, **kwargs), none_is_leaf=True)
        places = {id(x): place for place, x in enumerate(given) if isinstance(x, Tensor)}
        return form, [(places.get(id(x)), Like(x) if isinstance(x, Tensor) else x) for x in made]


class Absent(nn.Module):
    """Replaces a block of another stage."""

    def __init__(self, place: int, shapes: Shapes) -> None:
        super().__init__()
        self._place, self._shapes = place, shapes

    def __getattr__(self, name: str) -> Any:
        """Read attributes of the block, such as its index, from the forward."""
        return getattr(vars(self)["_shapes"].block, name) if "_shapes" in vars(self) else super().__getattr__(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a result without values, or end the stage."""
        run = _now.get()
        assert run is not None, "a stage must be called itself"
        return run.absent(self._place, Arguments(args, kwargs), self._shapes, self.training)


def become(kind: type, module: nn.Module, note: Any) -> Any:
    """Make a module an instance of its own subclass."""
    vars(module)["_part" if kind is Stage else "_place"] = note
    module.__class__ = _also(kind, type(module))
    return module


@cache
def _also(kind: type, own: type) -> type:
    return type(own.__name__, (kind, own), {"__module__": own.__module__})
