"""Stages of a module with blocks: each is the module itself, without the blocks of the others.

    forward     tokens ── before ──> blocks[0] ── between ──> blocks[1] ── between ──> blocks[2] ── after ──> logits
    stage 0     tokens ── before ──> blocks[0] ── between ──> the arguments of blocks[1], where it stops
    stage 1     the same forward from the beginning, without values, up to blocks[1], called with the received arguments

The weights used before, between and after the blocks are found by one forward without values. An object that several
blocks receive, such as a mask, is sent once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from fshard.copying import copied
from fshard.errors import LayoutError
from fshard.mesh.layout import PyTree
from fshard.pipeline.split.midway import (
    Absent,
    Arguments,
    Block,
    ForwardPart,
    Shapes,
    Stage,
    Tracing,
    become,
    describe,
    device_of,
)
from fshard.pipeline.split.replay import Like, without_memory


class Blocks:
    """A module, its blocks, and which weights it uses between them.

    Args:
        module: any whose forward calls each block once, in order.
        paths: of lists of blocks.
        sample: a microbatch.
    """

    def __init__(self, module: nn.Module, paths: Iterable[str], sample: PyTree) -> None:
        self._module = module
        self.names = [f"{path}.{name}" for path in paths for name, _ in _listed(module, path).named_children()]
        self.blocks = [module.get_submodule(name) for name in self.names]
        self._tensors = {id(x): x for x in (*module.parameters(), *module.buffers())}
        self._nowhere = {key: _nowhere(x) for key, x in self._tensors.items()}
        self._shapes = [Shapes(copied(block, {**self._nowhere})) for block in self.blocks]
        self._used = self._traced(sample)

    def stages(self, sizes: Sequence[int]) -> list[nn.Module]:
        """Return stages with these numbers of blocks."""
        cuts = [*pairwise(accumulate(sizes, initial=0))]
        own: list[set[int]] = [{key for block in self.blocks[slice(*cut)] for key in _ids(block)} for cut in cuts]
        for keys, (begin, end) in zip(own, cuts, strict=True):
            keys |= {key for key, blocks in self._used.items() if any(begin <= block < end for block in blocks)}
        own[0] |= self._tensors.keys() - {key for keys in own for key in keys}  # used by no stage
        return [self._stage(*cut, keys) for cut, keys in zip(cuts, own, strict=True)]

    def _stage(self, begin: int, end: int, own: set[int]) -> nn.Module:
        tensors = {key: x if key in own else self._nowhere[key] for key, x in self._tensors.items()}
        absent = {
            id(block): Absent(place, shapes)
            for place, (block, shapes) in enumerate(zip(self.blocks, self._shapes, strict=True))
            if not begin <= place < end
        }
        stage = copied(self._module, {**tensors, **absent})
        for place in range(begin, end):
            become(Block, stage.get_submodule(self.names[place]), place)
        others = {id(self._nowhere[key]) for key in self._nowhere.keys() - own}
        for part in stage.modules():
            for registered in (vars(part)["_parameters"], vars(part)["_buffers"]):
                for name in [name for name, x in registered.items() if id(x) in others]:
                    vars(part)[name] = registered.pop(name)  # it is there, but none of the stage's
        return become(Stage, stage, ForwardPart(type(self._module).__name__, self.names, begin, end))

    def _traced(self, sample: PyTree) -> Mapping[int, set[int]]:
        """Return by which blocks, or after which, each tensor is used; by the first, if before it."""
        copy = copied(self._module, {**self._nowhere})
        for place, name in enumerate(self.names):
            become(Block, copy.get_submodule(name), place)
        run = Tracing(ForwardPart(type(copy).__name__, self.names, 0, len(self.names)), device_of(sample))
        is_complete = True
        try:
            with torch.no_grad(), torch.random.fork_rng():
                run.of(copy, without_memory(describe(Arguments.of(sample))))
        except LayoutError:
            is_complete = False
            if len(run.begun) < len(self.names):
                raise
        if run.begun != [*range(len(self.names))]:
            calls = ", ".join(self.names[place] for place in run.begun)
            raise LayoutError(
                f"split_stages: each block must be called once, in order, but the forward of {type(copy).__name__} calls "
                f"{calls or 'none'}. Give the ones to split at: blocks=."
            )
        unseen = set[int]() if is_complete else {len(self.names) - 1}  # the end looks at values: it may use anything
        return {key: run.used.get(id(x), unseen) for key, x in self._nowhere.items()}


def _listed(module: nn.Module, path: str) -> nn.Module:
    try:
        found = module.get_submodule(path)
    except AttributeError:
        found = None
    if found is None or not [*found.children()]:
        lists = [
            name for name, part in module.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential) and name
        ]
        raise LayoutError(
            f'split_stages: blocks="{path}" is no list of blocks of {type(module).__name__}; it has '
            f"{', '.join(lists) or 'none'}."
        )
    return found


def _ids(module: nn.Module) -> Iterator[int]:
    return (id(x) for x in (*module.parameters(), *module.buffers()))


def _nowhere(x: Tensor) -> Tensor:
    made = Like(x).tensor()
    return nn.Parameter(made, requires_grad=False) if isinstance(x, nn.Parameter) else made
