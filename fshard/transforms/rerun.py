"""A function that keeps its inputs alone, under the transforms of torch.func: every derivative runs it again.

The Function's backward is `torch.func.vjp` of the function, its forward derivative `torch.func.jvp`, and under vmap it is
the mapped function, itself such a Function.  So all transforms compose.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode

from fshard.errors import LayoutError
from fshard.mesh.tree import flatten, unflatten
from fshard.transforms.randomness import State, drawing_from, random_state

_functorch: Any = torch._C._functorch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Run:
    """A function of tensors, and the state that its random draws begin from, once it has run."""

    f: Callable[..., Tensors]
    name: str
    random: State | None = None

    def __call__(self, *xs: Tensor) -> Tensors:
        """Run it; what is an input is handed on as a view of it."""
        given = {id(x) for x in xs}
        with drawing_from(self.random) if self.random is not None else nullcontext(), _RefuseCaptured(self.name):
            return tuple(y.view_as(y) if id(y) in given else y for y in self.f(*xs))


def run_again(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call fn so that its derivatives are computed from its inputs alone."""
    leaves, structure = flatten((args, kwargs), sharded_is_leaf=True, none_is_leaf=True)
    places = [place for place, x in enumerate(leaves) if type(x) in (Tensor, nn.Parameter)]
    found: list[Any] = []

    def of_tensors(*xs: Tensor) -> Tensors:
        own = list(leaves)
        for place, x in zip(places, xs, strict=True):
            own[place] = x
        own_args, own_kwargs = unflatten(structure, own)
        found[:] = flatten(fn(*own_args, **own_kwargs), sharded_is_leaf=True, none_is_leaf=True)
        return tuple(y for y in found[0] if isinstance(y, Tensor))

    state = random_state()
    ys = iter(
        _Again.apply(
            Run(of_tensors, getattr(fn, "__name__", type(fn).__name__)), state, *(leaves[place] for place in places)
        )
    )
    results, result_structure = found
    return unflatten(result_structure, [next(ys) if isinstance(y, Tensor) else y for y in results])


def _moves(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _vjp(run: Run, width: int) -> Run:
    """Return the run that pulls cotangents back: from all inputs and the moving results' cotangents to moving inputs."""

    def pulled(*given: Tensor) -> Tensors:
        xs, cotangents = given[:width], given[width:]
        of_moving, moving = _restricted(run, xs, [place for place, x in enumerate(xs) if _moves(x)])
        pull: Any = torch.func.vjp(of_moving, *moving)[1]
        return pull(cotangents)

    return replace(run, f=pulled)


def _jvp(run: Run, width: int, places: list[int]) -> Run:
    """Return the run that pushes tangents of the inputs at `places` forward, to the moving results."""

    def pushed(*given: Tensor) -> Tensors:
        of_moving, moving = _restricted(run, given[:width], places)
        return torch.func.jvp(of_moving, moving, given[width:])[1]

    return replace(run, f=pushed)


def _restricted(run: Run, xs: Tensors, places: list[int]) -> tuple[Callable[..., Tensors], Tensors]:
    """Return the moving results as a function of the inputs at some places, and these inputs."""

    def of_some(*some: Tensor) -> Tensors:
        own = list(xs)
        for place, x in zip(places, some, strict=True):
            own[place] = x
        return tuple(y for y in run(*own) if _moves(y))

    return of_some, tuple(xs[place] for place in places)


class _Again(Function):
    @staticmethod
    def forward(run: Run, state: State, *xs: Tensor) -> Tensors:
        return run(*xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        run, state, *xs = inputs
        ctx.run = replace(run, random=state)
        ctx.save_for_backward(*xs)
        ctx.save_for_forward(*xs)
        ctx.moving = [_moves(y) for y in output]
        ctx.mark_non_differentiable(*(y for y in output if not _moves(y)))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        xs: Tensors = ctx.saved_tensors
        given = [g for g, moving in zip(cotangents, ctx.moving, strict=True) if moving]
        found = iter(_Again.apply(_vjp(ctx.run, len(xs)), ctx.run.random, *xs, *given))
        return None, None, *(next(found) if _moves(x) else None for x in xs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        xs: Tensors = ctx.saved_tensors
        places = [place for place, tangent in enumerate(tangents[2:]) if tangent is not None]
        given = [tangents[2 + place] for place in places]
        found = iter(_Again.apply(_jvp(ctx.run, len(xs), places), ctx.run.random, *xs, *given))
        return tuple(next(found) if moving else None for moving in ctx.moving)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensors, tuple[int, ...]]:
        run, state, *xs = args
        # a transform may map a second run alone, jacrev for one: then it repeats the one draw of the first
        randomness = "same" if run.random is not None and info.randomness == "error" else info.randomness

        def mapped(*own: Tensor) -> Tensors:
            return torch.func.vmap(run.f, in_dims=tuple(in_dims[2:]), randomness=randomness)(*own)

        ys: Tensors = _Again.apply(replace(run, f=mapped), state, *xs)
        return ys, (0,) * len(ys)


class _RefuseCaptured(TorchFunctionMode):
    """Raise where a function meets a tensor of a transform that runs around it: its derivative would be lost."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        level = _functorch.maybe_current_level() or 0
        lost = [x for x in flatten((args, kwargs))[0] if type(x) is Tensor and _functorch.maybe_get_level(x) > level]
        if lost:
            raise LayoutError(
                f"fs.remat of {self._name}: it uses a tensor from outside (shape {tuple(lost[0].shape)}, {lost[0].dtype}) that "
                "a transform of torch.func looks at and that is not one of its arguments, so its derivative would be lost. "
                "Pass it as an argument."
            )
        return func(*args, **(kwargs or {}))
