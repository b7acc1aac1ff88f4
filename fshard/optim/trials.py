"""Optimizers of any class as pure ones, by copies; and whether these do what the given one would.

Classes of torch are known to.  Of others dry steps on random numbers must show it, bit by bit: several parameters together,
each alone, and each by a new copy in each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.errors import FshardError, OptimizerError
from fshard.optim.contract import Optimizer, step_of
from fshard.optim.copies import Group, copied, device_of, is_method, moves, same, shapes_of
from fshard.optim.foreign import is_torchs, known_elementwise

_STEPS = 12
"""Some begin to move, or to remember more, after a few steps."""


def foreign(given: torch.optim.Optimizer, groups: Iterable[int]) -> dict[int, Optimizer]:
    """Return the pure optimizers of some groups of one that was made, which read their options anew in each step.

    A class that is not torch's own counts as elementwise if it says so: `elementwise = True`.

    >>> class Sign(torch.optim.Optimizer):
    ...     def __init__(self, params, **options):
    ...         super().__init__(params, {"lr": 0.5, **options})
    ...     @torch.no_grad()
    ...     def step(self):
    ...         for group in self.param_groups:
    ...             for p in group["params"]:
    ...                 p.sub_(group["lr"] * p.grad.sign())
    >>> given = Sign([torch.nn.Parameter(torch.ones(2))], lr=0.25)
    >>> opt, params = foreign(given, [0])[0], [torch.ones(2)]
    >>> opt.step([torch.tensor([3.0, -3.0])], opt.init(params), params)[0], opt.elementwise
    ([tensor([0.7500, 1.2500])], False)
    """
    cls = type(given)
    own = is_torchs(cls)
    elementwise = known_elementwise(cls, None) if own else getattr(given, "elementwise", None) is True
    if not own:
        _refuse_shared(given)
        _refuse_held(given)
    most = 2 if own or elementwise else 256  # second moments are factored from some size on
    with _dry(given):
        made = {
            at: Group.of(given, at).pure(shapes_of(given.param_groups[at]["params"], most), elementwise)
            for at in groups
        }
        if not own:
            _refuse_dependent(given, made, elementwise)
    return made


@contextmanager
def _dry(given: torch.optim.Optimizer) -> Generator[None]:
    """Within, steps draw nothing from the random numbers of the loop, and what they raise is one error."""
    devices = {device_of(x) for group in given.param_groups for x in group["params"]}
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            yield
    except FshardError:
        raise
    except Exception as error:
        raise OptimizerError(
            f"{type(given).__name__}: an optimizer like it could not step other parameters of the same shapes: "
            f"{type(error).__name__}: {error}. Its step() is to take from param_groups and state all that it needs of a "
            "parameter, and no closure."
        ) from error


# -- what no copy can do ----------------------------------------------------------------------------------------------


def refuse_replaced(given: torch.optim.Optimizer) -> None:
    """Raise if the steps of an optimizer are not those of its class, but for a scheduler that notes them."""
    step = vars(given).get("step")
    noted = getattr(step, "_wrapped_by_lr_sched", False) and getattr(step, "__wrapped__", None) is type(given).step
    if step is not None and not noted:
        raise OptimizerError(
            f"{type(given).__name__}: the step of this one optimizer has been replaced. Write a class with that step."
        )


def _refuse_shared(given: torch.optim.Optimizer) -> None:
    """Raise if what an optimizer steps, or remembers, is another's or no parameter's."""
    if missing := [name for name in ("param_groups", "state") if name not in vars(given)]:
        raise OptimizerError(
            f"{type(given).__name__}: its {' and '.join(missing)} belong to another optimizer. Boost that one."
        )
    if shared := [f"state[{key!r}]" for key in given.state if not isinstance(key, Tensor)]:
        raise OptimizerError(
            f"{type(given).__name__}: {', '.join(shared)} would be lost. What is kept from step to step are tensors and "
            "numbers in state[param]."
        )


def _refuse_held(given: torch.optim.Optimizer) -> None:
    """Raise naming the attributes by which an optimizer knows its parameters: a copy has others."""
    params = {id(x) for group in given.param_groups for x in group["params"]}
    others = ("state", "param_groups", "step")
    own = {name: x for name, x in vars(given).items() if name not in others and not is_method(x, given)}
    groups = {
        f'param_groups[{at}]["{name}"]': x for at, group in enumerate(given.param_groups) for name, x in group.items()
    }
    groups = {name: x for name, x in groups.items() if not name.endswith('["params"]')}
    if held := [name for name, x in (own | groups).items() if _holds(x, params)]:
        raise OptimizerError(
            f"{type(given).__name__} holds parameters of the model in {', '.join(held)}, and these go when it is boosted. Its "
            "step() is to find them in param_groups."
        )


def _holds(x: Any, params: set[int]) -> bool:
    """Return whether any of these tensors is reached from an object, through attributes and containers."""
    left, seen = [x], set[int]()
    while left:
        x = left.pop()
        if isinstance(x, Tensor):
            if id(x) in params:
                return True
        elif id(x) not in seen and not isinstance(x, type | ModuleType):
            seen.add(id(x))
            left += vars(x).values() if hasattr(x, "__dict__") else ()
            left += x.values() if isinstance(x, Mapping) else ()
            left += x if isinstance(x, Mapping | list | tuple | set | frozenset | deque) else ()
            left += (x.__self__,) if isinstance(x, MethodType) else ()
    return False


class _Example(NamedTuple):
    """A parameter of a group to make dry steps with, what attributes it has, and its gradients."""

    group: Group
    start: Tensor
    tags: Mapping[str, Any]
    grads: list[Tensor | None]


def _examples(given: torch.optim.Optimizer, groups: Iterable[int]) -> list[_Example]:
    """Return three parameters for each number of dims that those of a group have, of several sizes and scales."""
    draw = torch.Generator().manual_seed(0)
    sizes, found = (3, 5, 2, 4, 3, 2, 5, 4), list[_Example]()
    for at in groups:
        params = given.param_groups[at]["params"]
        for x in {x.ndim: x for x in filter(moves, params)}.values():
            for turn in range(3):
                shape = [sizes[(dim + turn) % len(sizes)] for dim in range(x.ndim)]
                dtype = torch.float32 if x.dtype.itemsize == 2 else x.dtype

                def drawn(
                    scale: float, like: Tensor = x, shape: list[int] = shape, dtype: torch.dtype = dtype
                ) -> Tensor:
                    return (scale * torch.randn(shape, generator=draw, dtype=dtype)).to(device_of(like))

                grads: list[Tensor | None] = [drawn((1.0, 0.01, 100.0)[(turn + t) % 3]) for t in range(_STEPS)]
                found.append(_Example(Group.of(given, at).moving(), drawn(1.0), {}, grads))
    return found


class _After(NamedTuple):
    """A parameter after steps, and its state."""

    param: Tensor
    state: Mapping[str, Any]


def _ran(examples: list[_Example]) -> list[_After]:
    """Return parameters after steps of a copy that has all of them, each in its group."""
    params = [nn.Parameter(example.start.clone()) for example in examples]
    groups: dict[int, tuple[Group, list[Tensor]]] = {}
    for param, example in zip(params, examples, strict=True):
        vars(param).update(example.tags)
        groups.setdefault(example.group.at, (example.group, []))[1].append(param)
    optimizer = copied(groups.values(), {})
    for t in range(len(examples[0].grads)):
        for param, example in zip(params, examples, strict=True):
            grad = example.grads[t]
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
    return [_After(param.detach(), dict(optimizer.state.get(param, {}))) for param in params]


@torch.no_grad()
def _ran_pure(opt: Optimizer, starts: list[Tensor], grads: Sequence[Sequence[Tensor | None]]) -> list[Tensor]:
    """Return parameters after steps of a pure optimizer."""
    params: Any = [x.clone() for x in starts]
    state = opt.init(params)
    for t in range(_STEPS):
        params, state = step_of(opt)([None if (g := own[t]) is None else g.clone() for own in grads], state, params)
    return params


def _refuse_dependent(given: torch.optim.Optimizer, groups: Iterable[int], elementwise: bool) -> None:
    """Raise if dry steps show that the update of a parameter is made of more than its gradient, its state and options."""
    name, examples = type(given).__name__, _examples(given, groups)
    alone = [_ran([example])[0] for example in examples]
    if not all(map(_same_after, alone, _ran(examples))) or any(map(_are_dependent, _unusual(examples))):
        raise OptimizerError(
            f"{name}: steps of several parameters together have another result than those of each alone. The update of one "
            "depends on others, by a norm of all, a count, random numbers or its place in the group, and others may be on "
            "other devices. For norms there is booster.clip_grad_norm(optimizer, max_norm)."
        )
    if examples and all(same(after.param, example.start) for example, after in zip(examples, alone, strict=True)):
        raise OptimizerError(
            f"{name}: {_STEPS} steps of an optimizer like it have moved none of the parameters that it was given. Its step() "
            "is to find them, and their gradients, in param_groups: those of a list, a function or a model are not trained."
        )
    if _moves_unused(examples):
        raise OptimizerError(
            f"{name} moves parameters that have no gradient, which stay as they are. Let its step() skip them."
        )
    tags = {repr(vars(x)): (x.ndim, vars(x)) for group in given.param_groups for x in group["params"] if vars(x)}
    for ndim, own in tags.values():
        i = next((i for i, example in enumerate(examples) if example.start.ndim == ndim), None)
        if i is not None and not _same_after(_ran([examples[i]._replace(tags=own)])[0], alone[i]):
            raise OptimizerError(
                f"{name} reads attributes of parameters, of {', '.join(own)}, and these are lost. Make groups with options."
            )
    for at in groups:
        if own := [
            (example, after.param) for example, after in zip(examples, alone, strict=True) if example.group.at == at
        ]:
            _refuse_others(name, [example for example, _ in own], [after for _, after in own], elementwise)


def _refuse_others(name: str, examples: list[_Example], expected: list[Tensor], elementwise: bool) -> None:
    """Raise if the pure optimizer of a group does not do what the class does."""
    starts, grads = [example.start for example in examples], [example.grads for example in examples]
    opt = examples[0].group.pure(starts, elementwise)
    if not all(map(same, _ran_pure(opt, starts, grads), expected)):
        raise OptimizerError(
            f"{name}: steps of one optimizer have another result than those of new ones, each given the state that the one "
            "before has left. What is kept from step to step are tensors and numbers in state[param]; none is the parameter."
        )
    if elementwise:
        halves = [half for x in starts for half in _halves(x)]
        parts = iter(_ran_pure(opt, halves, [[*own] for x in grads for own in zip(*map(_halves, x), strict=True)]))
        if not all(same(torch.cat([next(parts), next(parts)]), x.flatten()) for x in expected):
            raise OptimizerError(
                f"{name} says elementwise = True, but pieces of a parameter have another result than the whole. Leave it out."
            )


def _unusual(examples: list[_Example]) -> list[list[_Example]]:
    """Return examples of which some have no gradient at times, large ones, or one that is no number."""

    def with_one(i: int, at: int, grad: Tensor | None) -> _Example:
        return examples[i]._replace(grads=[grad if t == at else g for t, g in enumerate(examples[i].grads)])

    places = range(len(examples))
    starts = [example.start for example in examples]
    return [
        [with_one(i, i % 3, None) if i % 2 else examples[i] for i in places],  # their counts differ from then on
        [with_one(i, 1, 1e6 * starts[i]) for i in places],
        [with_one(i, 1, torch.full_like(starts[i], torch.nan if i == 1 else 1.0)) for i in places],
    ]


def _are_dependent(examples: list[_Example]) -> bool:
    """Return whether steps together have another result than alone; what they raise, they raise in torch's loop as well."""
    try:
        alone = [_ran([example])[0] for example in examples]
        return not all(map(_same_after, alone, _ran(examples)))
    except Exception:  # of whatever kind
        return False


def _halves(x: Tensor | None) -> tuple[Tensor, ...]:
    return () if x is None else x.flatten().tensor_split(2)


def _moves_unused(examples: list[_Example]) -> bool:
    """Return whether a step moves what has no gradient, or has had one; many raise an error, in torch's loop as well."""

    def after(example: _Example, grads: list[Tensor | None]) -> Tensor:
        return _ran([example._replace(grads=grads)])[0].param if grads else example.start

    try:
        return any(
            not same(after(x, [*some, None, None]), after(x, some)) for x in examples for some in ([], x.grads[:1])
        )
    except Exception:  # of whatever kind
        return False


def _same_after(one: _After, other: _After) -> bool:
    states = one.state, other.state
    return same(one.param, other.param) and (
        states[0].keys() == states[1].keys() and all(same(states[0][name], states[1][name]) for name in states[0])
    )
