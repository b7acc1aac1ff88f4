"""A module's forward that stops where the next stage continues, or continues where one stopped.

A stage runs the forward from the beginning. A block of an earlier stage returns the shape of its
result; the first block of the next stage ends the run. Tensors that earlier stages have computed
replace those without values:

    stage 1 of 3, with block 1 of blocks 0 1 2

    embedding, blocks[0]    an `AbsentBlock`: its result has no values
    blocks[1]               a `PresentBlock`, called with the received values
    blocks[2]               an `AbsentBlock`, which sends values and raises `NextStage`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from enum import Enum
from functools import cache
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import _pop_mode_temporarily  # pyright: ignore[reportPrivateUsage]

from fshard.mesh.layout import (
    PyTree,
    Structure,
    flatten,
    flatten_with_paths,
    map_leaves,
    path_text,
    unflatten,
)
from fshard.mesh.layout.counting import without_counters
from fshard.mesh.layout.sharded import Sharded, flatten_shards
from fshard.mesh.spmd.scope import run_for_shapes
from fshard.pipeline.split.valueless import (
    WAY_OUT,
    Described,
    MissingValueError,
    StageError,
    ValuelessMode,
    described_as_meta,
    has_values,
    is_valueless,
)
from fshard.source import locate

_VALUES = (Tensor, Sharded, Described, str, bytes, int, float, complex, type(None))
PLAIN = (*_VALUES, Enum, torch.dtype, torch.device, FunctionType, type)
"""The types of arguments of blocks, besides trees of them.

Other objects, such as caches, may have a state. The forward of each stage makes its own, in which
the blocks of other stages leave tensors without values.
"""


class Arguments(NamedTuple):
    """The arguments of a call."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @staticmethod
    def of(microbatch: PyTree) -> Arguments:
        """Pass a dict by name, a tuple or list by position, anything else as one argument."""
        if isinstance(microbatch, dict):
            return Arguments((), microbatch)
        if isinstance(microbatch, tuple | list):
            return Arguments(microbatch, {})
        return Arguments((microbatch,), {})


class Key(NamedTuple):
    """A tensor that a stage sends.

    It is a leaf of a block's arguments or result, or of the result of a later operation.
    `operation` counts the operations of the forward since these arguments or this result, from 1;
    it is 0 for their own leaves. The inputs of the module are the result of block -1. The path of
    an operation's result begins with the name of the operation.
    """

    block: int
    is_result: bool
    operation: int
    path: str


class StageMessage(NamedTuple):
    """The message between stages.

    Args:
        inputs: the microbatch: its integers, and the shapes of its floating tensors.
        values: the tensors that later stages use.
    """

    inputs: Arguments
    values: Sequence[Any]


def without_floats(inputs: Arguments) -> Arguments:
    """Return the part of a microbatch that later stages receive: floating tensors are described."""

    def describe(x: Any) -> Any:
        if not isinstance(x, Tensor | Sharded):
            return x
        is_floating = x.dtype.is_floating_point or x.dtype.is_complex
        return Described.of(x) if is_floating else x

    return map_leaves(describe, inputs)


def device_of(tree: PyTree) -> torch.device:
    """Return the device of the tensors of a tree."""
    for x in flatten_shards(tree)[0]:
        if isinstance(x, Tensor) and not is_valueless(x):
            return x.device
    return torch.device("cpu")


# -- one run ---------------------------------------------------------------------------------------


class BlockRange(NamedTuple):
    """The blocks of a module that a stage has, and the tensors that it receives and sends."""

    title: str
    names: Sequence[str]
    begin: int
    end: int
    received: Sequence[Key] = ()
    sent: Sequence[Key] = ()

    def __str__(self) -> str:
        first, last = self.names[self.begin], self.names[self.end - 1]
        return f"the stage of {self.title} from {first} to {last}"


class NextStage(BaseException):  # no Exception: a forward may catch those
    """Raised when the first block of the next stage is called: this stage ends."""

    def __init__(self, values: Sequence[Any]) -> None:
        super().__init__()
        self.values = values


class StageRun:
    """A stage in one call.

    Args:
        blocks: those of the stage.
        values: the tensors that it has received; None for the first stage.
        device: that tensors without values claim to be on.
    """

    def __init__(
        self, blocks: BlockRange, values: Sequence[Any] | None, device: torch.device
    ) -> None:
        self._blocks = blocks
        self._next_block = 0
        self._transforms_around = _transforms_around()
        self._received = dict(zip(blocks.received, values or (), strict=True))
        self._sent: dict[Key, Any] = dict.fromkeys(blocks.sent)

        # The point of the forward: of what was computed last, a key without its path. Only at these
        # points tensors are received or sent.
        self._point: tuple[int, bool, int] = (-1, True, 0)
        self._points = {key[:3] for key in (*blocks.received, *blocks.sent)}

        # The first stage has all values: it needs the mode only where operations are counted.
        counts_operations = any([operation for _, _, operation in self._points])
        self._mode: ValuelessMode | None = None
        if counts_operations:
            self._mode = ValuelessMode(device, self._observe)
            self._mode.arrived = values is None
        elif values is not None:
            self._mode = ValuelessMode(device)

    def forward(self, call: Callable[..., Any], inputs: Arguments) -> Any:
        """Run a module's forward."""
        token = _active.set(self)
        try:
            self._record(-1, inputs, is_result=True)
            with self._mode or nullcontext():
                result = call(*inputs.args, **inputs.kwargs)
                return self._finish(result)
        except (RuntimeError, NotImplementedError) as error:
            # Of a meta tensor, of which the forward has read a value, for one.
            has_all_values = self._mode is None or self._mode.arrived
            if has_all_values:
                raise
            raise MissingValueError(
                f"{self._blocks} runs the code before its blocks without values: {error}. "
                "Read values of integer inputs alone, in blocks too."
            ) from error
        finally:
            _active.reset(token)

    def call_block(self, index: int, block: Callable[..., Any], arguments: Arguments) -> Any:
        """Call a block of this stage."""
        self._validate_call(index)
        self._record(index, arguments, is_result=False)
        name = self._blocks.names[index]
        if self._mode is not None:
            self._mode.arrived = True
            arguments = self._fill(arguments)
            self._validate_values(f"{name} is called with", arguments)
        try:
            # Within a block all tensors have values, and operations are not counted.
            with nullcontext() if self._mode is None else _pop_mode_temporarily():
                result = block(*arguments.args, **arguments.kwargs)
        except RuntimeError as error:
            objects = objects_in(arguments)
            if objects:
                error.add_note(
                    f"{name} is called with {objects}, in which blocks of other stages leave "
                    "tensors without values. What a block reads from it must be an argument or a "
                    "result of blocks."
                )
            raise
        return self._record(index, result, is_result=True)

    def call_absent(
        self, index: int, shapes: Callable[[Arguments], Any], arguments: Arguments
    ) -> Any:
        """Replace a block of another stage: return a result without values, or end the stage."""
        self._validate_call(index)
        self._record(index, arguments, is_result=False)
        if index < self._blocks.end:
            return self._record(index, shapes(arguments), is_result=True)

        values = self._fill([*self._sent.values()])
        self._validate_values(f"{self._blocks} must send values; it has", values)
        self._validate_operations()
        raise NextStage(values)

    # -- tensors that are received and sent --------------------------------------------------------

    def _record(self, index: int, tree: Any, *, is_result: bool) -> Any:
        """Set the values of received leaves, and keep those that are sent; return the tree."""
        self._point = index, is_result, 0
        if index < 0 and self._mode is not None:
            self._mode.inputs = {id(x): x for x in leaves_by_path(tree).values()}
        if self._point in self._points:
            self._exchange(tree, "")
        return tree

    def _observe(self, name: str, xs: Sequence[Tensor], result: Any) -> None:
        """Count an operation of the forward, and record its result likewise."""
        if any([isinstance(y, Tensor | Sharded) for y in flatten(result)[0]]):
            block, is_result, count = self._point
            self._point = block, is_result, count + 1
            if self._point in self._points:
                self._exchange(result, name)

    def _exchange(self, tree: Any, name: str) -> None:
        for path, x in leaves_by_path(tree).items():
            key = Key(*self._point, name + path)
            if self._mode is not None and key in self._received:
                value = self._received[key]
                # Not the dtypes, which differ under autocast.
                if key.operation and x.shape != value.shape:
                    raise self._other_way(f"{name} returns {Described.of(x)}")
                self._mode.values[id(x)] = x, value
                if isinstance(x, Tensor):
                    untyped: Any = x
                    untyped.value_of_stage = value  # see `value_of`
            if key in self._sent:
                self._sent[key] = x

    def _fill(self, tree: Any) -> Any:
        """Return a tree with the values that were received."""
        values = {} if self._mode is None else self._mode.values

        def fill(x: Any) -> Any:
            _, value = values.get(id(x), (x, x))
            return value

        return map_leaves(fill, tree)

    # -- checks ------------------------------------------------------------------------------------

    def _finish(self, result: Any) -> Any:
        """Raise unless the forward has passed the blocks, and its result has values."""
        if self._next_block < len(self._blocks.names):
            name = self._blocks.names[self._next_block]
            raise self._other_way(f"it returns before {name} is called")
        result = self._fill(result)
        self._validate_values("the result has", result)
        return result

    def _validate_call(self, index: int) -> None:
        """Raise unless the forward itself calls a block, and calls each once, first to last."""
        self.validate_caller(index)
        if index != self._next_block:
            names = [*self._blocks.names, "the end"]
            raise self._other_way(f"it calls {names[index]} instead of {names[self._next_block]}")
        self._next_block += 1

    def _other_way(self, text: str) -> StageError:
        """Return an error of a forward that differs from the one with the sample."""
        return StageError(
            "blocks must be called once, in order, with the same operations around them as with "
            f"the sample; in {self._blocks} the forward differs: {text}. Blocks that are skipped "
            "or called again must be inside of one block, or have pipeline=1."
        )

    def validate_caller(self, index: int) -> None:
        """Raise if a block is called where a pipeline sends no gradients."""
        name = self._blocks.names[index]
        if _transforms_around() != self._transforms_around:
            raise StageError(
                f"blocks must be called by the forward itself; got {name} inside of vmap, grad or "
                "another transform of torch.func, which ends with the stage. Transform within a "
                "block, or train with pipeline=1."
            )
        function = _function_around()
        if function is not None:
            raise StageError(
                f"blocks must be called by the forward itself; got {name} inside of "
                f"{function}.apply, a torch.autograd.Function, through which stages send no "
                "gradient. Call it outside of the function, or train with pipeline=1; of a "
                "reentrant checkpoint, write checkpoint(..., use_reentrant=False)."
            )

    def _validate_values(self, subject: str, tree: PyTree) -> None:
        """Raise if a leaf has no value, which on an abstract mesh is the case of all."""
        lacks_values = is_valueless if self._mode is None else self._mode.lacks_values
        missing: list[str] = []
        for path, x in leaves_by_path(tree).items():
            if lacks_values(x):
                missing.append(f"{path_text(path) or 'a tensor'}: {Described.of(x)}")
        if missing and has_values():
            raise MissingValueError(f"{subject} {', '.join(missing)} without values. {WAY_OUT}")

    def _validate_operations(self) -> None:
        """Raise unless the results of operations that are sent were computed."""
        missing = [key.path for key, x in self._sent.items() if key.operation and x is None]
        if missing:
            raise self._other_way(f"it has not computed {', '.join(missing)}")


# The frames that `_function_around` looks for.
_FUNCTION_APPLY: Any = torch.autograd.Function.apply
_APPLY_CODE = _FUNCTION_APPLY.__func__.__code__
_FORWARD_CODE = StageRun.forward.__code__


def _function_around() -> str | None:
    """Return the name of the torch.autograd.Function that calls a block, if one does."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code is not _FORWARD_CODE:
        if frame.f_code is _APPLY_CODE:
            return frame.f_locals["cls"].__name__
        frame = frame.f_back
    return None


def _transforms_around() -> tuple[int, int]:
    """Return the levels of torch.func's transforms and of forward-mode derivatives here."""
    interpreter: Any = torch._C._functorch.peek_interpreter_stack()  # pyright: ignore
    level = 0 if interpreter is None else interpreter.level()
    return level, forward_ad._current_level  # pyright: ignore[reportPrivateUsage]


def objects_in(arguments: Arguments) -> str:
    """Return the arguments that may have a state, by their paths."""
    objects: list[str] = []
    for path, x in leaves_by_path(arguments).items():
        if not isinstance(x, PLAIN):
            objects.append(f"{path}: {type(x).__name__}")
    return ", ".join(objects)


def value_of(x: Any) -> Any:
    """Return the value that a stage has received for a meta tensor; anything else as it is.

    A checkpoint calls a block again in the backward, when no stage runs, with the arguments of the
    forward.
    """
    return getattr(x, "value_of_stage", x) if is_valueless(x) else x


_active: ContextVar[StageRun | None] = ContextVar("active", default=None)


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by their paths, None included."""
    paths, leaves, _ = flatten_with_paths(tree, none_is_leaf=True)
    return dict(zip(paths, leaves, strict=True))


# -- modules that are stages and blocks ------------------------------------------------------------


def located(error: StageError, module: Any) -> StageError:
    """Return an error that names the innermost module whose forward raised it, and the line."""
    paths = {id(child): path for path, child in module.named_modules()}
    path, line = locate(error.__cause__ or error, paths)
    return type(error)(f"{path or type(module).__name__} ({line}): {error}")


class BlockStage:
    """A module that is one stage of itself."""

    _blocks: BlockRange

    def __call__(self, value: PyTree) -> Any:
        if self._blocks.begin == 0:
            inputs, values = Arguments.of(value), None
        else:
            inputs, values = value
        run = StageRun(self._blocks, values, device_of(values))
        call = _call_of_base_class(BlockStage, self)
        try:
            return run.forward(call, map_leaves(described_as_meta, inputs))
        except NextStage as end:
            return StageMessage(without_floats(inputs), end.values)
        except StageError as error:
            raise located(error, self) from error


class PresentBlock:
    """A block of the stage that is run; `_wrap` may wrap its call."""

    _index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = _call_of_base_class(PresentBlock, self)
        wrap = vars(self).get("_wrap")
        if wrap is not None:
            objects = objects_in(Arguments(args, kwargs))
            if objects:
                raise StageError(
                    "a block that is recomputed must be called with tensors and plain values; got "
                    f"{objects}, which it would change twice. Let it be None there; of a cache, "
                    "give use_cache=False."
                )
            block = wrap(block)

        run = _active.get()
        if run is None:  # in a checkpoint's backward
            args, kwargs = map_leaves(value_of, (args, kwargs))
            return block(*args, **kwargs)
        return run.call_block(self._index, block, Arguments(args, kwargs))


def wrap_blocks(stage: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Wrap the calls of a stage's blocks; return False if it has none."""
    blocks = [block for block in stage.modules() if isinstance(block, PresentBlock)]
    for block in blocks:
        vars(block)["_wrap"] = wrap
    return bool(blocks)


class AbsentBlock(nn.Module):
    """Replaces a block of another stage: it returns results without values, or ends the stage.

    Their shapes are found on meta tensors, once for each input. Hooks that the forward registers on
    it, as those of transformers that collect hidden states, are called.
    """

    @staticmethod
    def of(index: int, block: nn.Module) -> AbsentBlock:
        """Return the replacement of a block, which is an instance of the class of the block, too.

        Unless torch defines the class: no reason known.
        """
        absent = AbsentBlock(index, block)
        base = type(block)
        if not base.__module__.startswith("torch."):
            absent.__class__ = _subclass_of_both(AbsentBlock, base, f"Absent{base.__name__}")
        return absent

    def __init__(self, index: int, block: nn.Module) -> None:
        super().__init__()
        self._index = index
        vars(self)["_block"] = block  # no submodule, whose parameters would be the stage's
        self._shapes: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Read attributes of the block, such as its index, from the forward."""
        if "_block" in vars(self):
            return getattr(vars(self)["_block"], name)
        return super().__getattr__(name)  # before `__init__` has ended

    __call__: Callable[..., Any] = nn.Module.__call__  # not that of the block's class

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return a result without values, or end the stage."""
        run = _active.get()
        if run is None:  # in a checkpoint's backward
            raise StageError(
                f"a checkpoint must have blocks of one stage; got block {self._index} of another "
                "one. Checkpoint each block by itself, or leave checkpoints out, and recompute by "
                "the plugin: recompute=1."
            )
        return run.call_absent(self._index, self._result_without_values, Arguments(args, kwargs))

    def forget_shapes(self) -> None:
        """Find the shapes of results again: the block has changed."""
        self._shapes.clear()

    def _result_without_values(self, arguments: Arguments) -> Any:
        """Return meta tensors as results; arguments that the block returns are passed through."""
        leaves, structure = flatten(arguments, none_is_leaf=True)
        described = [Described.of(x) for x in leaves]
        key = self._shape_key(structure, described)
        result = self._shapes.get(key)
        if result is None:
            result = self._find_result(structure, described)
            if key is not None:
                self._shapes[key] = result

        # The same tensor where the block returns the same one, of its arguments or twice.
        tensors = list(leaves)
        for index, x in result.leaves:
            if index is None or index == len(tensors):
                tensors.append(described_as_meta(x))
            else:
                tensors.append(tensors[index])
        return unflatten(result.structure, tensors[len(leaves) :])

    def _shape_key(self, structure: Structure, described: Sequence[Any]) -> Hashable:
        """Return what the shapes of results depend on; None if that is unknown."""
        if not all([isinstance(x, PLAIN) for x in described]):
            return None
        # The text of a number has its type and its sign, which are lost where -0.0 == 0.
        texts = [repr(x) if isinstance(x, int | float | complex) else x for x in described]
        types = [type(x) for x in described]
        return structure, tuple(types), tuple(texts), self.training

    def _find_result(self, structure: Structure, described: Sequence[Any]) -> _BlockResult:
        """Call the block on meta tensors."""
        metas = [described_as_meta(x) for x in described]
        args, kwargs = unflatten(structure, metas)
        block: nn.Module = vars(self)["_block"]
        if block.training != self.training:
            block.train(self.training)
        with torch.no_grad(), run_for_shapes(), without_counters():
            outputs, output_structure = flatten(block(*args, **kwargs), none_is_leaf=True)

        first_index: dict[int, int] = {}
        for index, x in enumerate([*metas, *outputs]):
            if isinstance(x, Tensor):
                first_index.setdefault(id(x), index)
        result_leaves = [(first_index.get(id(x)), Described.of(x)) for x in outputs]
        return _BlockResult(output_structure, result_leaves)


class _BlockResult(NamedTuple):
    """The result of an absent block.

    Of each leaf: the index among arguments and results where the tensor occurs first, and its
    shape; or None, and the leaf itself.
    """

    structure: Structure
    leaves: list[tuple[int | None, Any]]


def _call_of_base_class(kind: type, module: Any) -> Callable[..., Any]:
    """Return the call of a module's own class."""
    base: Any = super(kind, module)
    return base.__call__


def specialize(kind: type, module: nn.Module, **attributes: Any) -> Any:
    """Make a module an instance of a subclass of a kind and its own class; set attributes."""
    vars(module).update(attributes)
    module.__class__ = _subclass_of_both(kind, type(module), type(module).__name__)
    return module


@cache
def _subclass_of_both(kind: type, base: type, name: str) -> type:
    return type(name, (kind, base), {"__module__": base.__module__})
