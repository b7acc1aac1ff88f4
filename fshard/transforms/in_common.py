"""What a boosted model in stages has in common with them, which are copies of its parts: plain tensors, tables and objects.

    model.module.head.mask[0] = 0            the stage that has `head` finds it in its next call, as without stages
    model.module.head.table["a"] = 1         so
    model.module.head.layers = [...]         its own: what leads to layers or parameters leads to the stage's

A container in which there are tensors or objects is each one's own too: what a call changes within these would be seen on the
device of its stage alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from fshard.copying import CONTAINERS, within
from fshard.transforms.holders import ATOMS, INTERNAL, holds, items_of


def have_in_common(module: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Let parts of stages have in their attributes the objects that those of a module have.

    >>> whole, stage = nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())
    >>> whole[0].table, stage[0].table = [1, 2], [1, 2]
    >>> have_in_common(whole, [stage])
    >>> stage[0].table is whole[0].table
    True
    """
    parts, own = dict(module.named_modules()), own_of(module)
    for path, part in parts_in(stages):
        whole = parts.get(path)
        if path and type(whole) is type(part):
            for key, x in vars(whole).items():
                if key in vars(part).keys() - INTERNAL and type(x) not in ATOMS and is_common(x, own):
                    vars(part)[key] = x


def parts_in(stages: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules of all stages with their paths."""
    return [own for stage in stages for own in stage.named_modules()]


def own_of(module: nn.Module) -> frozenset[int]:
    """Return the ids of what each copy of a module has for itself."""
    return frozenset(id(x) for kind in (module.modules(), module.parameters(), module.buffers()) for x in kind)


def is_common(x: Any, own: Collection[int]) -> bool:
    """Return whether something may be had in common: it leads to nothing that a module has for itself."""
    if isinstance(x, CONTAINERS) and any(holds(each) and not isinstance(each, CONTAINERS) for each in items_of(x)):
        return False
    return not any(id(each) in own for each in within(x))
