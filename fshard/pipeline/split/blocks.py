"""Stages of a module with blocks: each is the module itself, without the blocks of the others.

    forward     tokens ── before ──> blocks[0] ── between ──> blocks[1] ── between ──> blocks[2] ── after ──> logits
    stage 0     tokens ── before ──> blocks[0] ── between ──> the arguments of blocks[1], where it stops
    stage 1     the same forward from the beginning, without values, up to blocks[1], called with the received values

One forward without values finds which weights each stage uses, and which tensors of earlier stages: inputs, arguments and
results of blocks, and results of operations around them. A tensor that several blocks receive, such as a mask, is sent
once; one that is computed from integers is not sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.copying import copied
from fshard.mesh.layout import PyTree, flatten, map_leaves
from fshard.pipeline.split.block_stage import (
    AbsentBlock,
    Arguments,
    BlockRange,
    BlockStage,
    Key,
    PresentBlock,
    StageRun,
    device_of,
    leaves_by_path,
    located,
    specialize,
    without_floats,
)
from fshard.pipeline.split.valueless import (
    MissingValueError,
    StageError,
    ValuelessMode,
    as_meta,
    described_as_meta,
    is_valueless,
)


class Blocks:
    """A module, its blocks, and which weights it uses between them.

    Args:
        module: any whose forward calls each block once.
        paths: of lists of blocks; of a list in a list, its own blocks.

    `names` are the paths of the blocks, in the order of their calls.
        sample: a microbatch.
    """

    def __init__(self, module: nn.Module, paths: Iterable[str], sample: PyTree) -> None:
        self._module = module
        self._tensors = {id(x): x for x in (*module.parameters(), *module.buffers())}
        self._meta = dict[int, Tensor]()
        for key, x in self._tensors.items():
            meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
            self._meta[key] = (
                nn.Parameter(meta, requires_grad=False) if isinstance(x, nn.Parameter) else meta
            )
        names = list[str]()
        for path in paths:
            names += _names_of_blocks(path, _list_of_blocks(module, path))
        self._set_blocks(names)
        self._trace = self._find_uses(sample)
        calls = self._trace.called
        if calls != sorted(calls):
            self._set_blocks([names[index] for index in calls])
            self._trace = self._find_uses(sample)

    def _set_blocks(self, names: Sequence[str]) -> None:
        self.names = names
        self.blocks = [self._module.get_submodule(name) for name in names]
        self._meta_blocks = [copied(block, {**self._meta}) for block in self.blocks]

    def stages(self, sizes: Sequence[int]) -> list[nn.Module]:
        """Return stages with these numbers of blocks."""
        ranges = [*pairwise(accumulate(sizes, initial=0))]
        owned: list[set[int]] = [
            {
                id(x)
                for block in self.blocks[begin:end]
                for x in (*block.parameters(), *block.buffers())
            }
            for begin, end in ranges
        ]
        for keys, (begin, end) in zip(owned, ranges, strict=True):
            keys |= {
                key
                for key, x in self._meta.items()
                if any(begin <= block < end for block in self._trace.used[id(x)])
            }
        owned[0] |= self._tensors.keys() - {
            key for keys in owned for key in keys
        }  # used by no stage
        return [self._make_stage(*bounds, keys) for bounds, keys in zip(ranges, owned, strict=True)]

    def _make_stage(self, begin: int, end: int, owned: set[int]) -> nn.Module:
        tensors = {key: x if key in owned else self._meta[key] for key, x in self._tensors.items()}
        absent = {
            id(block): AbsentBlock.of(index, meta)
            for index, (block, meta) in enumerate(zip(self.blocks, self._meta_blocks, strict=True))
            if not begin <= index < end
        }
        stage = copied(self._module, {**tensors, **absent})
        for index in range(begin, end):
            specialize(PresentBlock, stage.get_submodule(self.names[index]), _index=index)
        absent_tensors = {id(self._meta[key]) for key in self._meta.keys() - owned}
        for child in stage.modules():
            for registered in (vars(child)["_parameters"], vars(child)["_buffers"]):
                for name in [name for name, x in registered.items() if id(x) in absent_tensors]:
                    vars(child)[name] = registered.pop(
                        name
                    )  # an attribute, for the forward, but not the stage's
        keys = self._tensors_sent_to(begin), self._tensors_sent_to(end)
        blocks = BlockRange(type(self._module).__name__, self.names, begin, end, *keys)
        return specialize(BlockStage, stage, _blocks=blocks)

    def _find_uses(self, sample: PyTree) -> UseTrace:
        """Trace after the call of which blocks each tensor is used; of the first, if before it."""
        copy, title = copied(self._module, {**self._meta}), type(self._module).__name__
        for index, name in enumerate(self.names):
            specialize(PresentBlock, copy.get_submodule(name), _index=index)
        run = UseTrace(BlockRange(title, self.names, 0, len(self.names)), device_of(sample))
        is_complete = True
        try:
            with torch.enable_grad(), torch.random.fork_rng():
                inputs = without_floats(Arguments.of(sample))
                run.forward(copy, map_leaves(described_as_meta, inputs))
        except StageError as error:
            is_complete = False
            has_called_all = len(run.called) >= len(self.names)
            if not (has_called_all and isinstance(error, MissingValueError)):
                raise located(error, copy) from error
        if sorted(run.called) != [*range(len(self.names))]:
            calls = ", ".join(self.names[index] for index in run.called) or "none"
            raise ValueError(
                f"blocks must be modules that the forward of {title} calls once; got the calls {calls}. Give the ones "
                "to split at: blocks=."
            )
        if not is_complete:  # the end reads values: it may use any weight and any input
            for x in self._meta.values():
                run.used.setdefault(id(x), {len(self.names) - 1})
            for x in run.inputs():
                run.used[id(x)].add(len(self.names) - 1)
        return run

    def _tensors_sent_to(self, block: int) -> list[Key]:
        """Return the tensors that are computed before a block and used from it on, except registered ones."""
        registered, trace = {id(x) for x in self._meta.values()}, self._trace
        keys = list[Key]()
        for number, computed in trace.computed.items():
            before = [key for key in computed.keys if key[:2] <= (block, False)]
            is_used = max(trace.used[number], default=0) >= block > 0
            if before and is_used and number not in registered:
                # Operations are counted only where no block has the tensor as an argument or a result.
                keys.append(next((key for key in before if not key.operation), before[0]))
        return keys


class Computed(NamedTuple):
    """A tensor that the forward computes: all of its keys, and the tensor, which keeps its id."""

    keys: list[Key]
    tensor: Tensor


class UseTrace(StageRun):
    """A run of a module without values: which blocks are called, and which tensors are used since which call."""

    def __init__(self, blocks: BlockRange, device: torch.device) -> None:
        super().__init__(blocks, None, device)
        self.called: list[int] = []
        self.used: dict[int, set[int]] = defaultdict(set)
        self.computed: dict[int, Computed] = {}  # by the id of the tensor
        self._is_in_block = False
        self._mode: ValuelessMode | None = ValuelessMode(device, self._observe)

    def _observe(self, name: str, xs: Iterable[Any], result: Any) -> None:
        has_values = any(isinstance(y, Tensor) for y in flatten(result)[0])  # a shape needs none
        for x in xs:
            if has_values or id(x) not in self.computed:
                self.used[id(x)].add(max(self.called, default=0))
        if has_values and not self._is_in_block:
            block, is_result, count = self._point
            self._point = block, is_result, count + 1
            self._add_keys(result, name)

    def call_block(self, index: int, block: Callable[..., Any], arguments: Arguments) -> Any:
        """Call a block without values."""
        self.validate_caller(index)
        self.called.append(index)
        self._record(index, arguments, is_result=False)
        self._observe_leaves(arguments)
        self._is_in_block = True
        result = block(*arguments.args, **arguments.kwargs)
        self._is_in_block = False
        return self._record(index, self._without_values(arguments, result), is_result=True)

    def _without_values(self, arguments: Arguments, result: Any) -> Any:
        """Return a block's result as other stages see it: without values, except for its arguments."""
        given = {id(x) for x in leaves_by_path(arguments).values()}
        return map_leaves(lambda x: x if id(x) in given else as_meta(x), result)

    def _record(self, index: int, tree: Any, *, is_result: bool) -> Any:
        self._point = index, is_result, 0
        self._add_keys(tree, "")
        if index < 0 and self._mode is not None:
            self._mode.inputs = {id(x): x for x in leaves_by_path(tree).values()}
        return tree

    def inputs(self) -> list[Any]:
        """Return the tensors of the microbatch."""
        return [] if self._mode is None else [*self._mode.inputs.values()]

    def _add_keys(self, tree: Any, name: str) -> None:
        for path, x in leaves_by_path(tree).items():
            if is_valueless(x):
                computed = self.computed.setdefault(id(x), Computed([], x))
                computed.keys.append(Key(*self._point, name + path))

    def _finish(self, result: Any) -> Any:
        self._observe_leaves(result)
        return result

    def _observe_leaves(self, tree: Any) -> None:
        last_call = max(self.called, default=0)
        for x in leaves_by_path(tree).values():
            self.used[id(x)].add(last_call)


def _names_of_blocks(path: str, blocks: nn.Module) -> list[str]:
    names = list[str]()
    for name, block in blocks.named_children():
        if isinstance(block, nn.ModuleList | nn.ModuleDict):  # is not called itself
            names += _names_of_blocks(f"{path}.{name}", block)
        else:
            names.append(f"{path}.{name}")
    return names


def _list_of_blocks(module: nn.Module, path: str) -> nn.Module:
    try:
        blocks = module.get_submodule(path)
    except AttributeError:
        blocks = None
    if blocks is None or not [*blocks.children()]:
        lists = [
            name
            for name, child in module.named_modules()
            if name and isinstance(child, nn.ModuleList | nn.Sequential)
        ]
        raise ValueError(
            f'blocks must be a list of blocks of {type(module).__name__}; got "{path}". It has {", ".join(lists) or "none"}.'
        )
    return blocks
