"""Dry steps: those of copies of an optimizer, on small random parameters in the place of the real ones.

`everywhere`  one example at each place of each group, for a few steps: what goes by place, by name, by class or by
              what is written on a parameter shows in steps of all together
`long`        a few examples of each kind, for many steps: what comes late shows
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.optim.contract import Optimizer, step_of
from fshard.optim.copies import Group, copied, device_of, moves, same

STEPS = 12
"""Some begin to move, or to remember more, after a few steps."""
_FEW = 3
_SIZES = (3, 5, 2, 4, 3, 2, 5, 4)
_SCALES = (1.0, 0.01, 100.0)
_MANY = 24
"""Of more kinds of parameters than these there is one long example each, of fewer there are three."""


class Spot(NamedTuple):
    """What there is to know of a parameter that was given, but for its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    moves: bool
    cls: type
    tags: Mapping[str, Any]

    @staticmethod
    def of(x: Tensor) -> Spot:
        return Spot(tuple(x.shape), x.dtype, device_of(x), moves(x) and x.requires_grad, type(x), dict(vars(x)))


@dataclass(frozen=True)
class Groups:
    """Groups of an optimizer that was given, as they were when it was."""

    given: torch.optim.Optimizer
    groups: dict[int, Group]
    spots: dict[int, list[Spot]]

    @staticmethod
    def of(given: torch.optim.Optimizer, at: Iterable[int]) -> Groups:
        groups = {i: Group.of(given, i) for i in at}
        return Groups(given, groups, {i: [Spot.of(x) for x in group.options["params"]] for i, group in groups.items()})

    def shapes(self, at: int, most: int) -> list[Tensor]:
        """Return an example of each kind of parameter, of no more elements in a dim than tell what state there is."""
        kinds = dict.fromkeys(
            (tuple(min(n, most) for n in spot.shape), spot.dtype, spot.device) for spot in self.spots[at] if spot.moves
        )
        return [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in kinds]

    def modes(self) -> dict[int, object]:
        """Return which options of each group are on, and which words they have: code asks for these by `if`."""
        return {at: modes(group.options) for at, group in self.groups.items()}


NOT_OPTIONS = ("params", "param_names", "lr", "initial_lr", "max_lr", "min_lr")
"""What stands in a group, and what schedulers keep there, but for options."""


def modes(group: Mapping[str, Any]) -> object:
    """Return which options of a group are on, and which words they have.

    >>> modes({"lr": 0.1, "momentum": 0.9, "nesterov": False, "kind": "muon", "betas": (0.0, 0.9)})
    (('betas', (False, True)), ('kind', 'muon'), ('momentum', True), ('nesterov', False))
    """
    return tuple(sorted((name, _mode(x)) for name, x in group.items() if name not in NOT_OPTIONS))


def _mode(x: Any) -> object:
    if isinstance(x, int | float):
        return bool(x)
    if isinstance(x, list | tuple):
        items: Sequence[Any] = x
        return tuple(map(_mode, items))
    return x if isinstance(x, str) else type(x)


class Example(NamedTuple):
    """A parameter at a place of a group to make dry steps with, its gradients, its class, and what is written on it."""

    group: Group
    place: int
    start: Tensor
    grads: list[Tensor | None]
    cls: type = nn.Parameter
    tags: Mapping[str, Any] = {}

    @property
    def plain(self) -> Example:
        """It as a copy has it."""
        return self._replace(cls=nn.Parameter, tags={})

    def cutting(self, names: Iterable[str]) -> Example:
        return self._replace(group=self.group.cutting(names))

    def made(self) -> nn.Parameter:
        """Return the parameter; its class is not asked how to make one."""
        plain = self.cls is nn.Parameter
        x: Any = nn.Parameter(self.start.clone(), False) if plain else self.start.clone().as_subclass(self.cls)
        x.requires_grad_(self.trained)
        vars(x).update(self.tags)
        return x

    @property
    def trained(self) -> bool:
        return any(grad is not None for grad in self.grads)


def everywhere(of: Groups) -> list[Example]:
    """Return an example at each place: small ones, of which those have the same shape that have so in the model."""
    draw = torch.Generator().manual_seed(0)
    small: dict[tuple[int, ...], tuple[int, ...]] = {}
    found: list[Example] = []
    for at, group in _moving(of).items():
        for place, spot in enumerate(of.spots[at]):
            if spot.shape not in small:
                turn = sum(len(shape) == len(spot.shape) for shape in small)
                small[spot.shape] = tuple(min(n, size) if n < 2 else size for n, size in _sizes(spot.shape, turn))
            spot = spot._replace(shape=small[spot.shape])
            found.append(_drawn(draw, group, place, spot, len(found), _FEW))
    return found


def long(of: Groups) -> list[Example]:
    """Return three examples of each kind of group and number of dims, of several sizes and scales: the last of another group.

    Those of 16 bits have 32, in which copies compute if they are elementwise.
    """
    draw = torch.Generator().manual_seed(1)
    kinds: dict[object, list[tuple[int, int]]] = {}
    modes = of.modes()
    for at, spots in of.spots.items():
        for ndim, place in {len(spot.shape): place for place, spot in enumerate(spots) if spot.moves}.items():
            kinds.setdefault((modes[at], ndim), []).append((at, place))
    found, groups = list[Example](), _moving(of)
    for sites in kinds.values():
        for turn, (at, place) in enumerate([sites[0], sites[0], sites[-1]] if len(kinds) <= _MANY else sites[:1]):
            spot = of.spots[at][place]
            dtype = torch.float32 if spot.dtype.itemsize == 2 else spot.dtype
            shape = tuple(size for _, size in _sizes(spot.shape, turn))
            plain = spot._replace(shape=shape, dtype=dtype, cls=nn.Parameter, tags={})
            found.append(_drawn(draw, groups[at], place, plain, turn, STEPS))
    return sorted(found, key=lambda example: example.group.at)


def _moving(of: Groups) -> dict[int, Group]:
    return {at: group.moving() for at, group in of.groups.items()}


def _sizes(shape: tuple[int, ...], turn: int) -> Iterator[tuple[int, int]]:
    """Yield each size with the one that stands for it."""
    return ((n, _SIZES[(dim + turn) % len(_SIZES)]) for dim, n in enumerate(shape))


def _drawn(draw: torch.Generator, group: Group, place: int, spot: Spot, turn: int, steps: int) -> Example:
    """Return an example like a parameter, with that many gradients; without any if nothing moves it."""

    def drawn(scale: float) -> Tensor:
        wide = torch.float32 if spot.dtype.itemsize < 4 or not spot.moves else spot.dtype
        return (scale * torch.randn(spot.shape, generator=draw, dtype=wide)).to(spot.device, spot.dtype)

    grads = [drawn(_SCALES[(turn + t) % 3]) if spot.moves else None for t in range(steps)]
    cls, tags = (spot.cls, spot.tags) if spot.moves else (nn.Parameter, {})
    return Example(group, place, drawn(1.0), grads, cls, tags)


class After(NamedTuple):
    """A parameter after steps, and its state."""

    param: Tensor
    state: Mapping[str, Any]


def agree(some: Iterable[After], others: Iterable[After]) -> bool:
    """Return whether parameters, and what is remembered of them, have the same bits."""
    return all(map(_same_after, some, others))


def _same_after(one: After, other: After) -> bool:
    states = one.state, other.state
    return same(one.param, other.param) and (
        states[0].keys() == states[1].keys() and all(same(states[0][name], states[1][name]) for name in states[0])
    )


Step = Callable[[torch.optim.Optimizer, Callable[[], None], list[nn.Parameter]], object]
"""Let an optimizer make a step; the function gives the parameters their gradients."""


def _given_before(optimizer: torch.optim.Optimizer, give: Callable[[], None], params: list[nn.Parameter]) -> None:
    give()
    optimizer.step()


def ran(examples: Sequence[Example], step: Step = _given_before) -> list[After]:
    """Return parameters after steps of a copy that has all of them, each in its group."""
    if not examples:
        return []
    optimizer, params = stepped(examples)
    for t in range(len(examples[0].grads)):

        def give(t: int = t) -> None:
            for param, example in zip(params, examples, strict=True):
                grad = example.grads[t]
                param.grad = None if grad is None else grad.clone()

        step(optimizer, give, params)
    return [After(param.detach().as_subclass(Tensor), dict(optimizer.state.get(param, {}))) for param in params]


def stepped(examples: Sequence[Example]) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """Return a copy that has examples, each in its group, and their parameters."""
    params = [example.made() for example in examples]
    groups: dict[int, tuple[Group, list[Tensor], list[int]]] = {}
    for param, example in zip(params, examples, strict=True):
        _, own, places = groups.setdefault(example.group.at, (example.group, [], []))
        own.append(param)
        places.append(example.place)
    return copied(groups.values(), {}), params


@torch.no_grad()
def ran_pure(opt: Optimizer, starts: list[Tensor], grads: Sequence[Sequence[Tensor | None]]) -> list[Tensor]:
    """Return parameters after steps of a pure optimizer."""
    params: Any = [x.clone() for x in starts]
    state = opt.init(params)
    for t in range(len(grads[0])):
        params, state = step_of(opt)([None if (g := own[t]) is None else g.clone() for own in grads], state, params)
    return params
