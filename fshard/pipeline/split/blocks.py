"""Stages of a module with blocks: each is the module itself, without the blocks of the others.

    forward     tokens ── before ──> blocks[0] ── between ──> blocks[1] ── after ──> logits
    stage 0     tokens ── before ──> blocks[0] ── between ──> the arguments of blocks[1]: it stops
    stage 1     the same forward from the beginning, without values, up to blocks[1], which is
                called with the received values ── after ──> logits

One forward without values finds which weights each stage uses, and which tensors of earlier stages:
inputs, arguments and results of blocks, and results of operations around them. A tensor that some
blocks receive, such as a mask, is sent once; one that is computed from integers is not sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, pairwise
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

    `names` are the paths of the blocks, as they are called, and `blocks` the modules there.

    Args:
        module: any whose forward calls each block once.
        paths: of lists of blocks; of a list in a list, its own blocks.
        sample: a microbatch.
    """

    def __init__(self, module: nn.Module, paths: Iterable[str], sample: PyTree) -> None:
        self._module = module
        # The parameters and buffers by their ids, and a meta tensor in place of each.
        self._tensors = {id(x): x for x in _tensors_in(module)}
        self._meta = {key: _meta_like(x) for key, x in self._tensors.items()}

        names = list[str]()
        for path in paths:
            names += _names_of_blocks(path, _list_of_blocks(module, path))
        self._set_blocks(names)
        self._trace = self._find_uses(sample)

        # The forward may call them in another order; a stage has consecutive calls.
        calls = self._trace.called
        if calls != sorted(calls):
            self._set_blocks([names[index] for index in calls])
            self._trace = self._find_uses(sample)

    def _set_blocks(self, names: Sequence[str]) -> None:
        self.names = names
        self.blocks = [self._module.get_submodule(name) for name in names]
        self._meta_blocks = [copied(block, {**self._meta}) for block in self.blocks]

    # -- stages ------------------------------------------------------------------------------------

    def stages(self, sizes: Sequence[int]) -> list[nn.Module]:
        """Return stages with these numbers of blocks."""
        ranges = [range(begin, end) for begin, end in pairwise(accumulate(sizes, initial=0))]
        owned = [self._tensors_of_stage(blocks) for blocks in ranges]
        used = set(chain(*owned))
        owned[0] |= self._tensors.keys() - used  # no stage uses them, but one must have them
        pairs = zip(ranges, owned, strict=True)
        return [self._make_stage(blocks, tensors) for blocks, tensors in pairs]

    def _tensors_of_stage(self, blocks: range) -> set[int]:
        """Return the tensors, by id, that a stage uses in its blocks or after their calls."""
        owned = set[int]()
        for block in blocks:
            owned |= {id(x) for x in _tensors_in(self.blocks[block])}
        for key, meta in self._meta.items():
            users = self._trace.used[id(meta)]
            if any([user in blocks for user in users]):
                owned.add(key)
        return owned

    def _make_stage(self, blocks: range, owned: set[int]) -> nn.Module:
        """Return a copy of the module with these blocks, which shares the tensors that it owns."""
        instead: dict[int, Any] = {}
        for key, x in self._tensors.items():
            instead[key] = x if key in owned else self._meta[key]
        for index, block in enumerate(self.blocks):
            if index not in blocks:
                instead[id(block)] = AbsentBlock.of(index, self._meta_blocks[index])
        stage = copied(self._module, instead)
        for index in blocks:
            specialize(PresentBlock, stage.get_submodule(self.names[index]), _index=index)

        absent = {id(meta) for key, meta in self._meta.items() if key not in owned}
        for child in stage.modules():
            _unregister(child, absent)
        received = self._tensors_sent_to(blocks.start)
        sent = self._tensors_sent_to(blocks.stop)
        title = type(self._module).__name__
        block_range = BlockRange(title, self.names, blocks.start, blocks.stop, received, sent)
        return specialize(BlockStage, stage, _blocks=block_range)

    def _tensors_sent_to(self, block: int) -> list[Key]:
        """Return the tensors that are computed before a block and used from it on.

        Parameters and buffers are not sent: the stage that uses one has it.
        """
        if block == 0:
            return []
        trace = self._trace
        registered = {id(x) for x in self._meta.values()}
        keys = list[Key]()
        for number, computed in trace.computed.items():
            is_used = max(trace.used[number], default=0) >= block
            before = [key for key in computed.keys if key[:2] <= (block, False)]
            if before and is_used and number not in registered:
                # Operations are counted only where no block has the tensor as an argument or a
                # result: their count may differ from the sample's.
                of_blocks = [key for key in before if not key.operation]
                keys.append(of_blocks[0] if of_blocks else before[0])
        return keys

    # -- the trace ---------------------------------------------------------------------------------

    def _find_uses(self, sample: PyTree) -> UseTrace:
        """Trace after the call of which blocks each tensor is used; of the first, if before it."""
        copy = copied(self._module, {**self._meta})
        title = type(self._module).__name__
        for index, name in enumerate(self.names):
            specialize(PresentBlock, copy.get_submodule(name), _index=index)

        trace = UseTrace(BlockRange(title, self.names, 0, len(self.names)), device_of(sample))
        is_complete = True
        try:
            with torch.enable_grad(), torch.random.fork_rng():
                inputs = without_floats(Arguments.of(sample))
                trace.forward(copy, map_leaves(described_as_meta, inputs))
        except StageError as error:
            # The code after the last block may read values, which the last stage will have.
            is_complete = False
            has_called_all = len(trace.called) >= len(self.names)
            if not (has_called_all and isinstance(error, MissingValueError)):
                raise located(error, copy) from error

        if sorted(trace.called) != [*range(len(self.names))]:
            calls = ", ".join([self.names[index] for index in trace.called]) or "none"
            raise ValueError(
                f"blocks must be modules that the forward of {title} calls once; got the calls "
                f"{calls}. Give the ones to split at: blocks=."
            )
        if not is_complete:  # the end may use any weight and any input
            last = len(self.names) - 1
            for x in self._meta.values():
                trace.used.setdefault(id(x), {last})
            for x in trace.inputs():
                trace.used[id(x)].add(last)
        return trace


class Computed(NamedTuple):
    """A tensor that the forward computes: all of its keys, and the tensor, which keeps its id."""

    keys: list[Key]
    tensor: Tensor


class UseTrace(StageRun):
    """A run of a module without values, of which all blocks are present.

    It finds which blocks are `called`, which tensors are `computed`, by id, and after the calls of
    which blocks each tensor is `used`.
    """

    def __init__(self, blocks: BlockRange, device: torch.device) -> None:
        super().__init__(blocks, None, device)
        self.called: list[int] = []
        self.used: dict[int, set[int]] = defaultdict(set)
        self.computed: dict[int, Computed] = {}
        self._is_in_block = False
        self._mode: ValuelessMode | None = ValuelessMode(device, self._observe)

    def _observe(self, name: str, xs: Iterable[Any], result: Any) -> None:
        returns_tensors = any([isinstance(y, Tensor) for y in flatten(result)[0]])
        for x in xs:
            # Without tensors as a result, it reads a shape of a computed tensor, not its values.
            if returns_tensors or id(x) not in self.computed:
                self.used[id(x)].add(self._last_call())
        if returns_tensors and not self._is_in_block:
            block, is_result, count = self._point
            self._point = block, is_result, count + 1
            self._add_keys(result, name)

    def _last_call(self) -> int:
        return max(self.called, default=0)

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
        """Return a block's result as other stages have it: only its arguments have values."""
        argument_ids = {id(x) for x in leaves_by_path(arguments).values()}
        return map_leaves(lambda x: x if id(x) in argument_ids else as_meta(x), result)

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
        for x in leaves_by_path(tree).values():
            self.used[id(x)].add(self._last_call())


# -- modules ---------------------------------------------------------------------------------------


def _tensors_in(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _meta_like(x: Tensor) -> Tensor:
    meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return nn.Parameter(meta, requires_grad=False) if isinstance(x, nn.Parameter) else meta


def _unregister(module: nn.Module, absent: set[int]) -> None:
    """Make absent tensors of a module attributes: the forward finds them, the stage has none."""
    attributes = vars(module)
    for registered in (attributes["_parameters"], attributes["_buffers"]):
        names = [name for name, x in registered.items() if id(x) in absent]
        for name in names:
            attributes[name] = registered.pop(name)


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
        lists: list[str] = []
        for name, child in module.named_modules():
            if name and isinstance(child, nn.ModuleList | nn.Sequential):
                lists.append(name)
        raise ValueError(
            f"blocks must be a list of blocks of {type(module).__name__}; "
            f'got "{path}". It has {", ".join(lists) or "none"}.'
        )
    return blocks
