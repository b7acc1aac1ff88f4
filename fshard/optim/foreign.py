"""Any class of torch.optim as a pure pair.

The class is a rule like any other: each shard is one torch parameter, whose state is put into a new optimizer before the
step and taken out after it.  What state there is, is found by steps on examples; values are not kept from them, since
they are those after a step.  A leaf at its first step comes without state, so that it begins as the class wants.
torch's own "step" is our count of the leaf's steps.  A class that remembers more than that is refused.

How a new optimizer is made is told by a function: `from_torch` calls the class, which then looks at its parameters; where
one was made already, it is copied (`fshard.optim.following`).

On a CPU an elementwise class computes 16 bits in 32, and is rounded once a step: `torch.add(alpha=)`, of which these classes
are made, rounds 16 bits by the place of an element in its tensor, so the bits would depend on the mesh.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fshard.errors import FshardError, OptimizerError
from fshard.mesh.tree import PyTree
from fshard.optim.cells import Cells
from fshard.optim.contract import Optimizer, step_of
from fshard.optim.leaves import Leaves
from fshard.optim.lists import rounds_by_place
from fshard.optim.rules import Rule, writer
from fshard.optim.schedules import Rate
from fshard.optim.whole import check_whole

_TORCH_CLASSES: Any = torch.optim
_ELEMENTWISE = {
    **dict.fromkeys(
        ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"], True
    ),
    **dict.fromkeys(["Adafactor", "Muon"], False),
}
_REFUSED = {
    "LBFGS": "it calls the loss function several times in one step",
    "SparseAdam": "it is for sparse gradients",
}
Maker = Callable[[list[Tensor], dict[str, Any], Sequence[int]], torch.optim.Optimizer]
"""Make a new optimizer of parameters, of some places; options, such as the learning rate, come before its own."""


def from_torch(cls: type[torch.optim.Optimizer], *, elementwise: bool | None = None, **options: Any) -> Optimizer:
    """Make a pure optimizer of a torch.optim class.

    Args:
        cls: the class, such as torch.optim.RMSprop.
        elementwise: whether an element's update depends on that element alone.  Known for the classes of torch.optim.
        options: of the class, `foreach` and `fused` among them; `lr` may be a schedule.  A fused kernel rounds differently at
            the end of a tensor, so with `fused=True` the last bits of `step` depend on where tensors are cut: on the mesh and
            the stage.  `update` does without it, and so does reproducible mode.

    >>> import torch
    >>> opt = from_torch(torch.optim.Adagrad, lr=0.5)
    >>> params, state = opt.step([torch.tensor([2.0])], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> params, state["sum"]
    ([tensor([0.5000])], [tensor([4.])])
    """
    elementwise = known_elementwise(cls, elementwise)
    lr: Rate = options.pop("lr") if "lr" in options else _default_rate(cls, options)

    def make(params: list[Tensor], more: dict[str, Any], places: Sequence[int]) -> torch.optim.Optimizer:
        return _made(cls, params, options | more)

    of = Foreign(make, f"from_torch({cls.__name__})", f"from_torch cannot make {cls.__name__}", is_torchs(cls))
    examples = torch.ones(2), torch.ones(2, 2)
    return of.pure(lr, examples, elementwise=elementwise, fused=bool(options.get("fused")))


@dataclass(frozen=True)
class Foreign:
    """A class of which optimizers are made.

    Args:
        make: how one is made.
        name: what errors call it.
        cannot: how errors begin that refuse it.
        counts: whether its "step" counts steps, as those of torch's own classes do.
    """

    make: Maker
    name: str
    cannot: str
    counts: bool

    def pure(
        self,
        lr: Rate,
        examples: Iterable[Tensor],
        *,
        elementwise: bool,
        fused: bool,
        place: Callable[[str], int] | None = None,
    ) -> Optimizer:
        """Return the pure optimizer of which a step is one of a new optimizer, with the state that was kept.

        Args:
            lr: the learning rate, or a schedule of it.
            examples: parameters that show what state there is.
            elementwise: whether an element's update depends on that element alone.
            fused: whether `step` is to have the rounding of torch's fused kernels.
            place: that of a parameter, by its path, where steps depend on it.
        """
        dry = {} if callable(lr) else {"lr": lr}
        kept = _Kept(_names(self, dry, examples), self.counts, self.cannot)
        shown = _Shown(lambda param: _stepped(self.make([param], dry, [0]), param))

        def slot(name: str) -> Callable[[Tensor], Tensor | None]:
            def make(shard: Tensor) -> Tensor | None:
                if not (shard.is_meta and elementwise):
                    return shown.zeros(name, shard)
                small = shown.zeros(name, torch.ones([2] * shard.ndim, dtype=shard.dtype))
                return _of_size(small, shard)

            return make

        def at(places: Sequence[int]) -> Optimizer:
            rule = _rule(self, kept, {"fused": False} if fused else {}, places)
            return writer(
                lr,
                {own: slot(name) for name in kept.found if (own := kept.slot(name))},
                _in_32_bits(rule) if elementwise else rule,
                fast=_rule(self, kept, {}, places) if fused else None,
                check=None if elementwise else check_whole(self.name),
                elementwise=elementwise,
            )

        return at(()) if place is None else _placed(at, place)


def _placed(at: Callable[[Sequence[int]], Optimizer], place: Callable[[str], int]) -> Optimizer:
    """Return an optimizer that is one of the places of the parameters that it is given."""

    def of(params: PyTree) -> Optimizer:
        return at([*map(place, Leaves.of(params).paths)])

    return at(())._replace(
        update=lambda grads, state, params: of(params).update(grads, state, params),
        step=lambda grads, state, params: step_of(of(params))(grads, state, params),
    )


@dataclass(frozen=True)
class _Kept:
    """What is kept of each parameter from step to step.

    Args:
        found: examples of it, by the names that the class has for it.
        counts: whether "step" counts steps.
        cannot: how an error begins.
    """

    found: dict[str, Any]
    counts: bool
    cannot: str

    def slot(self, name: str) -> str | None:
        """Return what we call a piece of state; None where our own count tells it."""
        if name == "step" and self.counts:
            return None
        return (
            f"own {name}" if name in ("step", "count") or name.startswith("own ") else name
        )  # which are names of ours

    def given(self, cells: Cells, place: int, device: torch.device | None) -> dict[str, Any]:
        """Return the state of a parameter before this step as the class keeps it: tensors, or numbers."""
        state: dict[str, Any] = {}
        for name, example in self.found.items():
            slot = self.slot(name)
            value = cells.state[slot][place] if slot else torch.tensor(cells.steps[place] - 1)
            if slot is None and isinstance(example, Tensor):
                state[name] = torch.full_like(example, float(value), device=device)
            elif value is not None:
                state[name] = value if isinstance(example, Tensor) else type(example)(value.item())
        return state

    def take(self, cells: Cells, place: int, state: dict[str, Any]) -> list[str]:
        """Write the state of a parameter into its slots, where it is not there yet; return the names of what has none."""
        lost: list[str] = []
        for name in {**self.found, **state}:
            if (slot := self.slot(name)) is None:
                continue
            own: Tensor | None = cells.state[slot][place] if slot in cells.state else None
            value = None if state.get(name) is None else _as_tensor(state[name])
            if own is None or value is None or (own.shape, own.dtype) != (value.shape, value.dtype):
                lost += [] if own is value is None else [name]
            elif own is not value:
                own.copy_(value)
        return lost

    def refuse(self, lost: Iterable[str]) -> None:
        """Raise naming state that cannot be kept, if there is any."""
        if found := "; ".join(f'state[param]["{name}"]' for name in dict.fromkeys(lost)):
            raise OptimizerError(
                f"{self.cannot} a pure function of gradients: a step has made, dropped or changed the kind of {found}. "
                f"{_WHAT_IS_KEPT}"
            )


_WHAT_IS_KEPT = "What is kept from step to step are tensors and numbers in state[param], from the first step on."


def _rule(of: Foreign, kept: _Kept, more: dict[str, Any], places: Sequence[int]) -> Rule:
    """Return the rule that is a step of a new optimizer of a class, with the state that it kept.

    `places` are those of the leaves; none: they do not matter.
    """

    def rule(cells: Cells, lr: float) -> None:
        cells = cells.filled()
        if not cells.params:
            return
        params: list[Tensor] = [nn.Parameter(param.detach()) for param in cells.params]
        optimizer = of.make(params, more | {"lr": lr}, [places[leaf] for leaf in cells.leaves] if places else [])
        options = optimizer.param_groups[0]
        on_device = bool(options.get("fused") or options.get("capturable"))  # where torch then keeps its counts
        for place, (param, grad, t) in enumerate(zip(params, cells.grads, cells.steps, strict=True)):
            param.grad = grad.clone()  # torch may write into it
            if t > 1:
                optimizer.state[param] = kept.given(cells, place, param.device if on_device else None)
        optimizer.step()
        lost: list[str] = []
        for place, (param, own) in enumerate(zip(params, cells.params, strict=True)):
            if param.data_ptr() != own.data_ptr():
                own.copy_(param)  # the class has written `param.data = ...`
            lost += kept.take(cells, place, optimizer.state[param])
        kept.refuse(lost)

    return rule


def _in_32_bits(rule: Rule) -> Rule:
    """Return a rule that is given float32 copies of what it would round by the place."""

    def widened(column: list[Any]) -> list[Any]:
        return [x.float() if x is not None and rounds_by_place(x) else x for x in column]

    def written(cells: Cells, lr: float) -> None:
        state = {name: widened(column) for name, column in cells.state.items()}
        wide = replace(cells, params=widened(cells.params), grads=widened(cells.grads), state=state)
        rule(wide, lr)
        for own, other in zip([cells.params, *cells.state.values()], [wide.params, *state.values()], strict=True):
            for x, computed in zip(own, other, strict=True):
                if computed is not x:
                    x.copy_(computed)

    return written


def _made(cls: Any, params: list[Tensor], options: dict[str, Any]) -> torch.optim.Optimizer:
    try:
        return cls(params, **options)
    except FshardError:
        raise
    except (TypeError, ValueError) as error:
        raise OptimizerError(f"from_torch: torch.optim.{cls.__name__} refused what it was given: {error}") from error


@dataclass(frozen=True)
class _Shown:
    """What state a step leaves, shown once by a step on a parameter of each shape, dtype and device.

    Args:
        step: returns the state that a step of a parameter leaves.
    """

    step: Callable[[Tensor], dict[str, Any]]
    found: dict[Any, dict[str, tuple[Tensor, torch.device]]] = field(default_factory=dict[Any, Any])

    def zeros(self, name: str, shard: Tensor) -> Tensor | None:
        """Return a piece of the state of a shard, of zeros; None if there is no such piece."""
        key = shard.shape, shard.dtype, shard.device
        if key not in self.found:
            example = torch.ones_like(shard, device="cpu") if shard.is_meta else shard.detach().clone()
            state = {name: _as_tensor(value) for name, value in self.step(nn.Parameter(example)).items()}
            self.found[key] = {name: (x.to("meta"), x.device) for name, x in state.items()}
        like, device = self.found[key].get(name, (None, None))
        return None if like is None else torch.zeros_like(like, device=device)


def _names(of: Foreign, options: dict[str, Any], examples: Iterable[Tensor]) -> dict[str, Any]:
    """Return what state is kept of parameters like these: by name, an example.  Raise if there is more to keep."""
    found: dict[str, Any] = {}
    lost: dict[str, None] = {}
    refusals: list[OptimizerError] = []
    taken = 0
    for example in examples:
        param = nn.Parameter(example.clone())
        try:
            optimizer = of.make([param], options, [0])
        except OptimizerError as error:
            refusals.append(error)
            continue
        taken += 1
        elsewhere = _elsewhere(optimizer)
        first = _stepped(optimizer, param)
        kinds = {name: _kind(x) for name, x in first.items()}
        second = _stepped(optimizer, param)
        changed = [name for name, x in _elsewhere(optimizer).items() if elsewhere.get(name) != x]
        strange = {name: x for name, x in first.items() if not isinstance(x, Tensor | int | float)}
        unnamed = [name for name in {**first, **second} if not isinstance(name, str)]
        lost |= {f"{name}, which steps change": None for name in changed}
        lost |= {f"state[param][{name!r}], as names have to be strings": None for name in unnamed}
        lost |= {f'state[param]["{name}"], a {type(x).__name__}': None for name, x in strange.items()}
        for name in {**first, **second}:
            if name not in first:
                lost[f'state[param]["{name}"], which comes at the second step'] = None
            elif name not in strange and kinds[name] != _kind(second.get(name)):
                lost[f'state[param]["{name}"], which changes its kind at the second step'] = None
        found |= first
    if refusals and not taken:
        raise refusals[0]
    if lost:
        raise OptimizerError(
            f"{of.cannot} a pure function of gradients: it would lose {'; '.join(lost)}. {_WHAT_IS_KEPT}"
        )
    return found


@torch.no_grad()
def _stepped(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Any]:
    """Let an optimizer make a step; return the state of the parameter."""
    param.grad = torch.ones_like(param)
    optimizer.step()
    return {name: value for name, value in optimizer.state[param].items() if value is not None}


def _elsewhere(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return what an optimizer holds besides parameters and the state of each, written out."""
    groups = {f'param_groups[0]["{name}"]': x for name, x in optimizer.param_groups[0].items() if name != "params"}
    shared = {f"state[{key!r}]": x for key, x in optimizer.state.items() if not isinstance(key, Tensor)}
    known = (
        "state",
        "param_groups",
        "_need_device_dtype_check_for_fused",
    )  # the last one: whether a first step was checked
    own = {name: x for name, x in vars(optimizer).items() if name not in known}
    return {name: _written_out(x, optimizer) for name, x in (groups | shared | own).items()}


class _Pickler(pickle.Pickler):
    """Writes out all but an optimizer, which methods and helpers of it may hold."""

    def __init__(self, file: io.BytesIO, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(file)
        self._optimizer = optimizer

    def persistent_id(self, obj: object) -> str | None:
        return "the optimizer" if obj is self._optimizer else None


def _written_out(x: object, optimizer: torch.optim.Optimizer) -> object:
    """Return all that something holds, as far as it can be written out."""
    file = io.BytesIO()
    try:
        _Pickler(file, optimizer).dump(x)
    except Exception:  # of whatever kind: anything may refuse
        return repr(x)
    return file.getvalue()


def _as_tensor(value: Any) -> Tensor:
    """Return a tensor that has all digits of what the class keeps."""
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.as_tensor(value)


def _kind(value: Any) -> object:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)


def _of_size(small: Tensor | None, shard: Tensor) -> Tensor | None:
    """Return what a tensor that was found beside two elements in each dim is beside a shard without memory."""
    if small is None or small.shape != (2,) * shard.ndim:
        return small
    return torch.empty_like(shard, dtype=small.dtype)


def _default_rate(cls: Any, options: dict[str, Any]) -> float:
    return float(_made(cls, [torch.ones(2, 2)], options).defaults["lr"])


def is_torchs(cls: type) -> bool:
    """Return whether a class is one of torch.optim of which it is known what its steps depend on."""
    return cls.__name__ in (*_ELEMENTWISE, *_REFUSED) and getattr(_TORCH_CLASSES, cls.__name__, None) is cls


def known_elementwise(cls: Any, elementwise: bool | None) -> bool:
    """Return whether a class is elementwise, or raise if that, or whether it can be used, is not known."""
    name = getattr(cls, "__name__", str(cls))
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise OptimizerError(
            f"from_torch takes a class of torch.optim; found {name}. Write from_torch(torch.optim.RMSprop)."
        )
    own = is_torchs(cls)
    if own and name in _REFUSED:
        raise OptimizerError(
            f"from_torch cannot make torch.optim.{name} a pure function of gradients: {_REFUSED[name]}."
        )
    known = _ELEMENTWISE.get(name) if own else None
    if elementwise is None and known is None:
        raise OptimizerError(
            f"from_torch does not know whether {name} is elementwise: whether an element's update depends on that element "
            f"alone. Write from_torch({name}, elementwise=True) if so, else elementwise=False."
        )
    return bool(known) if elementwise is None else elementwise
