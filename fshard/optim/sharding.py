"""How an optimizer may be sharded: by flat ranges, by owners, or leaf by leaf.

    "flat"       an element's update depends on that element alone, and on numbers: AdamW, SGD
    "owners"     a parameter's update depends on the full parameter: Muon, Shampoo
    ByLeaf(f)    f(params) chooses one of the two for each leaf: `by_label` of Muon and AdamW

Here kinds are compared, combined and checked, and `is_flat` decides for all others;
`fshard/optim/sharded/layouts.py` computes the shards. A further kind is a word here and its layouts
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fshard.errors import OptimizerError
from fshard.mesh.layout import P, PyTree
from fshard.optim.leaves import Leaves, check_unsharded

ShardKind = Literal["flat", "owners"]
"""The shards of one parameter: flat ranges of it, or all of it at one device, its owner."""


@dataclass(frozen=True)
class ByLeaf:
    """A kind for each leaf.

    Args:
        kinds: from the parameters to the kind of each leaf, in the order of the leaves.
    """

    kinds: Callable[[PyTree], list[ShardKind]]


Sharding = ShardKind | ByLeaf
"""The kind of all parameters, or of each."""


def is_flat(sharding: Sharding) -> bool:
    """Return True if every parameter may be updated in flat ranges.

    False if one needs the full parameter, as for an owner, or if that differs by leaf.

    >>> is_flat("flat"), is_flat("owners")
    (True, False)
    """
    return sharding == "flat"


def has_owner(spec: P) -> bool:
    """Return True if one device along some axes has the parameter, and the others nothing.

    It is the owner in an update, or has the stage of a pipeline.

    >>> has_owner(P(at={"data": 1})), has_owner(P.flat("data"))
    (True, False)
    """
    return bool(spec.at)


def validate_sharding(caller: str, sharding: Sharding) -> None:
    """Raise unless `sharding` is a kind, or `ByLeaf`."""
    if not isinstance(sharding, ByLeaf) and sharding not in get_args(ShardKind):
        raise OptimizerError(
            f'{caller}: sharding must be "flat" (an element\'s update depends on that element '
            f'alone) or "owners" (it depends on the full parameter); got {sharding!r}.'
        )


def kinds_of(sharding: Sharding, params: Leaves) -> list[ShardKind]:
    """Return the kind of each leaf of the parameters."""
    if isinstance(sharding, ByLeaf):
        return sharding.kinds(params.rebuild(params.leaves))
    return [sharding] * len(params.leaves)


def common_sharding(optimizers: Sequence[Sharding]) -> Sharding:
    """Return the kind of several optimizers that update the same parameters, one after the other.

    A leaf is sharded flat if all of them allow it.

    >>> common_sharding(["flat", "flat"]), common_sharding(["flat", "owners"])
    ('flat', 'owners')
    """
    if not any(isinstance(sharding, ByLeaf) for sharding in optimizers):
        return _common_kind(optimizers)

    def kinds(params: PyTree) -> list[ShardKind]:
        leaves = Leaves.of(params)
        columns = [kinds_of(sharding, leaves) for sharding in optimizers]
        return [_common_kind(row) for row in zip(*columns, strict=True)]

    return ByLeaf(kinds)


def _common_kind(kinds: Sequence[Sharding]) -> ShardKind:
    return "flat" if all(map(is_flat, kinds)) else "owners"


def labelled_sharding(
    by_label: dict[object, Sharding], labels_of: Callable[[Leaves], Sequence[object]]
) -> Sharding:
    """Return the kind of optimizers that each update the leaves of their label.

    Args:
        by_label: the kind of each label's optimizer.
        labels_of: from the parameters to the label of each leaf. A leaf whose label has no
            optimizer is not updated, and counts as flat.
    """
    distinct: set[Sharding] = {*by_label.values()}
    if not distinct:
        return "flat"
    if len(distinct) == 1:
        (kind,) = distinct
        if not isinstance(kind, ByLeaf):
            return kind

    def kinds(params: PyTree) -> list[ShardKind]:
        leaves = Leaves.of(params)
        columns = {label: kinds_of(sharding, leaves) for label, sharding in by_label.items()}
        leaf_kinds: list[ShardKind] = []
        for i, label in enumerate(labels_of(leaves)):
            leaf_kinds.append(columns[label][i] if label in columns else "flat")
        return leaf_kinds

    return ByLeaf(kinds)


def check_fits(sharding: Sharding, params: Leaves) -> None:
    """Raise unless a pair of plain functions of this kind can run on the devices' shards."""
    if not is_flat(sharding):
        check_unsharded('A pair of plain functions without sharding="flat"', params)
