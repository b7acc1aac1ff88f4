"""New optimizers exactly like one that was made, of any class, without its constructor: nobody knows what that takes.

    given    its class and attributes    param_groups of the model's parameters    state: none, or as __init__ made it
    copy     the same                    one group, of other parameters            the same for these

What a copy does in a step must be what the given one would do.  Classes of torch are known to; of others dry steps on
random numbers must show it, bit by bit: several parameters together, each alone, and each by a new copy in each step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType, ModuleType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from fshard.errors import FshardError, OptimizerError
from fshard.optim.contract import Optimizer, step_of
from fshard.optim.foreign import Foreign, is_torchs, known_elementwise

_STEPS = 3
_RATE = 0.125
"""A learning rate that moves parameters, where a schedule may begin with 0."""


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
        _refuse_replaced(given)
        _refuse_held(given)
    most = 2 if own or elementwise else 256  # second moments are factored from some size on
    with _dry(given):
        made = {
            at: _Group.of(given, at).pure(_shapes(given.param_groups[at]["params"], most), elementwise) for at in groups
        }
        if not own:
            _refuse_dependent(given, made, elementwise)
    return made


@dataclass(frozen=True)
class _Group:
    """A group of an optimizer that was made.

    Args:
        given: the optimizer.
        at: the number of the group.
        begun: what its constructor has put into the state of each parameter, made for another.
        more: options that come before those of the group.
    """

    given: torch.optim.Optimizer
    at: int
    begun: dict[str, Callable[[Tensor], Any]]
    more: dict[str, Any] = field(default_factory=dict[str, Any])

    @staticmethod
    def of(given: torch.optim.Optimizer, at: int) -> _Group:
        return _Group(given, at, _begun(given, at))

    def moving(self) -> _Group:
        """Return the group with a learning rate that moves parameters, and without a kernel that rounds by the place."""
        group = self.given.param_groups[self.at]
        more: dict[str, Any] = {"fused": False} if group.get("fused") else {}
        if (lr := group.get("lr")) is not None:
            more["lr"] = torch.full_like(lr, _RATE) if isinstance(lr, Tensor) else _RATE
        return _Group(self.given, self.at, self.begun, more)

    def pure(self, examples: Iterable[Tensor], elementwise: bool) -> Optimizer:
        """Return the pure optimizer whose steps are those of copies."""

        def make(params: list[Tensor], more: dict[str, Any]) -> torch.optim.Optimizer:
            fused = {name: x for name, x in more.items() if name == "fused"}  # the learning rate is read off the group
            return copied([(self, params)], fused)

        name = type(self.given).__name__
        of = Foreign(make, name, f"{name} cannot be made", is_torchs(type(self.given)))
        fused = bool(self.given.param_groups[self.at].get("fused"))
        return of.pure(lambda count: 0.0, examples, elementwise=elementwise, fused=fused)


def copied(groups: Iterable[tuple[_Group, list[Tensor]]], more: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer like the given one that has these groups of these parameters."""
    groups = [*groups]
    given = groups[0][0].given
    new = object.__new__(type(given))
    own: dict[str, Any] = vars(new)
    for name, x in vars(given).items():
        if _is_method(x, given):
            x = MethodType(x.__func__, new)
        is_hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
        own[name] = dict[int, Any]() if is_hooks else x
    own.pop("step", None)  # a scheduler's
    own["state"] = state = defaultdict[Tensor, dict[str, Any]](dict[str, Any])
    own["param_groups"] = [
        {**group.given.param_groups[group.at], **group.more, **more, "params": params} for group, params in groups
    ]
    for group, params in groups:
        for param in params if group.begun else ():
            state[param] = {name: make(param) for name, make in group.begun.items()}
    return new


def _is_method(x: Any, given: torch.optim.Optimizer) -> TypeGuard[MethodType]:
    return isinstance(x, MethodType) and x.__self__ is given


def _begun(given: torch.optim.Optimizer, at: int) -> dict[str, Callable[[Tensor], Any]]:
    """Return what the constructor has put into the state of the parameters of a group, as it would for others.

    That is a number for each, or a tensor of one number; raise if it is anything else.
    """
    params = sorted(given.param_groups[at]["params"], key=lambda param: -param.ndim)
    states = [(param, given.state.get(param, {})) for param in params]
    found: dict[str, Callable[[Tensor], Any]] = {}
    wrong: dict[str, None] = {}
    for name in dict.fromkeys(name for _, state in states for name in state):
        made = [_maker(param, state.get(name)) for param, state in states]
        found[name] = lambda param, make=made[0]: make and make(param)
        for (param, state), make in zip(states, made, strict=True):
            if name not in state or make is None or made[0] is None or not _same(made[0](param), state[name]):
                wrong[f'state[param]["{name}"]'] = None
    if wrong:
        raise OptimizerError(
            f"{type(given).__name__}: {', '.join(wrong)} would be lost, which is not one number for all parameters. "
            "Boost it before its first step, and let step() make its state where state[param] is empty."
        )
    return found


def _maker(param: Tensor, value: Any) -> Callable[[Tensor], Any] | None:
    """Return what makes a state like this one for another parameter."""
    if not isinstance(value, Tensor):
        return (lambda other: value) if value is None or isinstance(value, int | float) else None
    dtype = None if value.dtype == param.dtype else value.dtype
    if value.shape == param.shape and bool((value == (fill := value.flatten()[0] if value.numel() else 0)).all()):
        return lambda other: torch.full_like(other, float(fill), dtype=dtype, requires_grad=False)
    return (lambda other: value.detach().clone()) if value.ndim == 0 else None


def _shapes(params: Iterable[Tensor], most: int) -> list[Tensor]:
    """Return an example of each kind of parameter, of no more elements in a dim than tell what state there is."""
    kinds = dict.fromkeys((tuple(min(n, most) for n in x.shape), x.dtype, _device(x)) for x in filter(_moves, params))
    return [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in kinds]


def _moves(x: Tensor) -> bool:
    return x.numel() > 0 and (x.is_floating_point() or x.is_complex())


def _device(x: Tensor) -> torch.device:
    return torch.device("cpu") if x.is_meta else x.device


@contextmanager
def _dry(given: torch.optim.Optimizer) -> Generator[None]:
    """Within, steps draw nothing from the random numbers of the loop, and what they raise is one error."""
    devices = {_device(x) for group in given.param_groups for x in group["params"]}
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


def _refuse_replaced(given: torch.optim.Optimizer) -> None:
    """Raise if the steps of an optimizer are not those of its class, but for a scheduler that notes them."""
    step = vars(given).get("step")
    if step is not None and getattr(step, "__wrapped__", step) is not type(given).step:
        raise OptimizerError(
            f"{type(given).__name__}: the step of this one optimizer has been replaced. Write a class with that step."
        )
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
    own = {name: x for name, x in vars(given).items() if name not in others and not _is_method(x, given)}
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

    group: _Group
    start: Tensor
    tags: Mapping[str, Any]
    grads: list[Tensor | None]


def _examples(given: torch.optim.Optimizer, groups: Iterable[int]) -> list[_Example]:
    """Return three parameters for each number of dims that those of a group have, of several sizes and scales."""
    draw = torch.Generator().manual_seed(0)
    sizes, found = (3, 5, 2, 4, 3, 2, 5, 4), list[_Example]()
    for at in groups:
        params = given.param_groups[at]["params"]
        for x in {x.ndim: x for x in filter(_moves, params)}.values():
            for turn in range(3):
                shape = [sizes[(dim + turn) % len(sizes)] for dim in range(x.ndim)]
                dtype = torch.float32 if x.dtype.itemsize == 2 else x.dtype

                def drawn(
                    scale: float, like: Tensor = x, shape: list[int] = shape, dtype: torch.dtype = dtype
                ) -> Tensor:
                    return (scale * torch.randn(shape, generator=draw, dtype=dtype)).to(_device(like))

                grads: list[Tensor | None] = [drawn((1.0, 0.01, 100.0)[(turn + t) % 3]) for t in range(_STEPS)]
                found.append(_Example(_Group.of(given, at).moving(), drawn(1.0), {}, grads))
    return found


class _After(NamedTuple):
    """A parameter after steps, and its state."""

    param: Tensor
    state: Mapping[str, Any]


def _ran(examples: list[_Example]) -> list[_After]:
    """Return parameters after steps of a copy that has all of them, each in its group."""
    params = [nn.Parameter(example.start.clone()) for example in examples]
    groups: dict[int, tuple[_Group, list[Tensor]]] = {}
    for param, example in zip(params, examples, strict=True):
        vars(param).update(example.tags)
        groups.setdefault(example.group.at, (example.group, []))[1].append(param)
    optimizer = copied(groups.values(), {})
    for t in range(_STEPS):
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
    if not all(map(_same_after, alone, _ran(examples))):
        raise OptimizerError(
            f"{name}: steps of several parameters together have another result than those of each alone. The update of one "
            "depends on others, by a norm of all, a count, random numbers or its place in the group, and others may be on "
            "other devices. For norms there is booster.clip_grad_norm(optimizer, max_norm)."
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
    if not all(map(_same, _ran_pure(opt, starts, grads), expected)):
        raise OptimizerError(
            f"{name}: steps of one optimizer have another result than those of new ones, each given the state that the one "
            "before has left. What is kept from step to step are tensors and numbers in state[param]; none is the parameter."
        )
    if elementwise:
        halves = [half for x in starts for half in _halves(x)]
        parts = iter(_ran_pure(opt, halves, [[*own] for x in grads for own in zip(*map(_halves, x), strict=True)]))
        if not all(_same(torch.cat([next(parts), next(parts)]), x.flatten()) for x in expected):
            raise OptimizerError(
                f"{name} says elementwise = True, but pieces of a parameter have another result than the whole. Leave it out."
            )


def _halves(x: Tensor | None) -> tuple[Tensor, ...]:
    return () if x is None else x.flatten().tensor_split(2)


def _moves_unused(examples: list[_Example]) -> bool:
    """Return whether a step moves what has no gradient; many raise an error, in torch's loop as well."""
    unused: list[Tensor | None] = [None] * _STEPS
    try:
        return any(not _same(_ran([x._replace(grads=unused)])[0].param, x.start) for x in examples)
    except Exception:  # of whatever kind
        return False


def _same_after(one: _After, other: _After) -> bool:
    states = one.state, other.state
    return _same(one.param, other.param) and (
        states[0].keys() == states[1].keys() and all(_same(states[0][name], states[1][name]) for name in states[0])
    )


def _same(one: Any, other: Any) -> bool:
    """Return whether tensors have the same dtype, shape and numbers, or other things are equal."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and bool(one == other)
    same = (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
    return same and bool(((one == other) | (one.isnan() & other.isnan())).all())
