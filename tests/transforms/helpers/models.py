"""Models for hypothesis: parameters with all that makes trees awkward, and a loss that uses some of
them.

    {"first": w, "rest": Couple([w, frozen], {"a": Pair(None, odd.T), "b": count})}
                               |                                 |
    tied: the same tensor -----'            whole numbers: used, and never moved

The loss is smooth: each leaf that is used bends what the ones before it have made of a sample.  A
*linear* one adds the leaves up, sample by sample: with dyadic inputs its gradients are exact in any
order, so all layouts have the same bits.

    @given(models())
    def test_gradients_are_those_of_one_device(model):
        certify(model.loss_fn, model.params, model.batch, fs.optim.sgd(0.1), mesh=fs.make_mesh({"data": 2})).check()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree.dataclasses
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from fshard.mesh.layout import NAMESPACE, PyTree, flatten, unflatten


class Pair(NamedTuple):
    """A named tuple, as a node of drawn trees."""

    first: object
    second: object


@optree.dataclasses.dataclass(namespace=NAMESPACE)
class Couple:
    """A dataclass that trees know, as a node of drawn trees."""

    first: object
    second: object


def pytrees(leaves):
    """Draw a tree of dicts, lists, tuples, named tuples, dataclasses and Nones over `leaves`."""

    def nodes(inner):
        several = st.lists(inner, max_size=3)
        named = several.map(lambda children: dict(zip("abc", children, strict=False)))
        return st.one_of(
            several,
            several.map(tuple),
            named,
            st.builds(Pair, inner, inner),
            st.builds(Couple, inner, inner),
        )

    return st.recursive(st.one_of(leaves, st.none()), nodes, max_leaves=8)


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes of parameters, simplest first."""


@dataclass(frozen=True)
class Loss:
    """A loss of parameters and a batch of shape (samples, 2), a number for each sample.

    Args:
        uses: how often each leaf is used, in the order of the tree.
        linear: whether it only adds up.
    """

    uses: Sequence[int]
    linear: bool = False

    def __call__(self, params: PyTree, batch: Tensor) -> Tensor:
        """Return the loss of each sample."""
        total = batch[:, 0]
        for leaf, times in zip(flatten(params)[0], self.uses, strict=True):
            for turn in range(times):
                real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
                row = real.reshape(1, -1)  # (1, elements)
                if self.linear:
                    total = total + (row * batch[:, turn, None]).sum(1)
                else:
                    total = total + torch.sin(row * (1 + batch[:, 1, None] + total[:, None])).sum(
                        1
                    ) / (1 + row.numel())
        return total if self.linear else total.square()


class Model(NamedTuple):
    """Parameters, a batch, and a loss function of both."""

    params: PyTree
    batch: Tensor
    loss_fn: Loss


@st.composite
def models(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype] = FLOATS,
    *,
    samples: int | st.SearchStrategy[int] = 8,
    linear: bool = False,
) -> Model:
    """Draw a model: nested parameters, tied, frozen, unused, 0-d, empty, of odd sizes, mixed dtypes
    and any strides.

    All numbers are multiples of 1/8 from -1 to 1.

    Args:
        draw: given by hypothesis.
        dtypes: of what is trained.
        samples: how many the batch has.
        linear: whether the loss only adds up.

    >>> from hypothesis import Phase, find, settings
    >>> model = find(models(), lambda model: sum(model.loss_fn.uses) > 1, settings=settings(phases=[Phase.generate]))
    >>> model.loss_fn(model.params, model.batch).shape
    torch.Size([8])
    """
    first = draw(_parameters(dtypes))
    rest = draw(pytrees(_leaves(dtypes)))
    leaves, structure = flatten({"first": first, "rest": rest})
    for place in range(1, len(leaves)):
        if draw(st.sampled_from((False, False, True))):
            leaves[place] = leaves[draw(st.integers(0, place - 1))]
    uses = [draw(st.integers(int(not place), 2)) for place in range(len(leaves))]
    count = samples if isinstance(samples, int) else draw(samples)
    batch = _numbers((count, 2), torch.float32, draw(st.integers(0, 99)))
    return Model(unflatten(structure, leaves), batch, Loss(uses, linear))


def _leaves(dtypes: Sequence[torch.dtype]) -> st.SearchStrategy[Tensor]:
    """Draw a parameter, one that is frozen, or whole numbers."""
    frozen = _parameters(dtypes).map(lambda x: Parameter(x.detach(), requires_grad=False))
    return _parameters(dtypes) | frozen | st.builds(torch.arange, st.integers(0, 5))


@st.composite
def _parameters(draw: st.DrawFn, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Draw a tensor that is trained, however it lies in memory."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    x = _numbers(shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 99)))
    return draw(st.sampled_from(_WAYS))(x)


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return multiples of 1/8 from -1 to 1 that a seed chooses."""
    real = dtype.to_real()
    parts = (*shape, 2) if dtype.is_complex else shape
    numbers = (torch.randint(-8, 9, parts, generator=torch.Generator().manual_seed(seed)) / 8).to(
        real
    )
    return torch.view_as_complex(numbers) if dtype.is_complex else numbers


def _transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.ndim > 1 else x


def _every_second(x: Tensor) -> Tensor:
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


def _repeated(x: Tensor) -> Tensor:
    return x.reshape(-1)[0].expand(x.shape) if x.numel() else x


_WAYS: tuple[Any, ...] = (lambda x: x, Parameter, _transposed, _every_second, _repeated)  # pyright: ignore
