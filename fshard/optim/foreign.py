"""Any class of torch.optim as a pure pair.

The class is a rule like any other: each shard is one torch parameter, whose state is put into a new optimizer before the
step and taken out after it.  What state there is, is found by steps on examples; values are not kept from them, since
they are those after a step.  A leaf at its first step comes without state, so that it begins as the class wants.
torch's own "step" is our count of the leaf's steps.  A class that remembers more than that is refused.

On a CPU an elementwise class computes 16 bits in 32, and is rounded once a step: `torch.add(alpha=)`, of which these classes
are made, rounds 16 bits by the place of an element in its tensor, so the bits would depend on the mesh.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard.errors import FshardError, OptimizerError
from fshard.optim.cells import Cells
from fshard.optim.contract import Optimizer
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
    elementwise = _elementwise(cls, elementwise)
    lr: Rate = options.pop("lr") if "lr" in options else _default_rate(cls, options)
    dry = options if callable(lr) else options | {"lr": lr}
    kept = _names(cls, dry)
    rule = _rule(cls, options | {"fused": False} if options.get("fused") else options, kept)
    fast = _rule(cls, options, kept) if options.get("fused") else None

    def slot(name: str) -> Any:
        def make(shard: Tensor) -> Tensor | None:
            if shard.is_meta and elementwise:
                small = _dry_step(cls, torch.ones([2] * shard.ndim, dtype=shard.dtype), dry).get(name)
                return _of_size(_zeros(small), shard)
            numbers = torch.ones_like(shard, device="cpu") if shard.is_meta else shard
            return _zeros(_dry_step(cls, numbers, dry).get(name))

        return make

    slots = {name: slot(name) for name in kept if name != "step"}
    check = None if elementwise else check_whole(f"from_torch({cls.__name__})")
    rule = _in_32_bits(rule) if elementwise else rule
    return writer(lr, slots, rule, fast=fast, check=check, elementwise=elementwise)


def _rule(cls: Any, options: dict[str, Any], kept: dict[str, Any]) -> Rule:
    """Return the rule that is a step of a new optimizer of a class, with the state that it kept."""
    on_device = bool(options.get("fused") or options.get("capturable"))  # where torch then keeps its counts

    def rule(cells: Cells, lr: float) -> None:
        cells = cells.only([place for place, param in enumerate(cells.params) if param.numel()])
        if not cells.params:
            return
        params = [param.detach() for param in cells.params]
        optimizer = _made(cls, params, options | {"lr": lr})
        for place, (param, grad, t) in enumerate(zip(params, cells.grads, cells.steps, strict=True)):
            param.grad = grad.clone()  # torch may write into it
            if t > 1:
                own = {name: column[place] for name, column in cells.state.items()}
                optimizer.state[param] = _given(own, kept) | _step_before(kept, t, param.device if on_device else None)
        optimizer.step()
        for place, param in enumerate(params):
            for name, column in cells.state.items():
                _keep(column[place], optimizer.state[param].get(name))

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
                _keep(x, computed)

    return written


def _made(cls: Any, params: list[Tensor], options: dict[str, Any]) -> torch.optim.Optimizer:
    try:
        return cls(params, **options)
    except FshardError:
        raise
    except (TypeError, ValueError) as error:
        raise OptimizerError(f"from_torch: torch.optim.{cls.__name__} refused what it was given: {error}") from error


@torch.no_grad()
def _dry_step(cls: Any, shard: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Return the state that one step leaves behind."""
    param = shard.detach().clone()
    param.grad = torch.zeros_like(param)
    optimizer = _made(cls, [param], options)
    optimizer.step()
    return dict(optimizer.state[param])


def _names(cls: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return what state the class keeps of vectors and matrices: by name, an example.  Raise if there is more to keep."""
    found: dict[str, Any] = {}
    lost: dict[str, None] = {}
    refusals: list[OptimizerError] = []
    for shape in ((2,), (2, 2)):
        param = torch.ones(shape)
        try:
            optimizer = _made(cls, [param], options)
        except OptimizerError as error:
            refusals.append(error)
            continue
        elsewhere = _elsewhere(optimizer)
        first, second = _stepped(optimizer, param), _stepped(optimizer, param)
        changed = [name for name, x in _elsewhere(optimizer).items() if elsewhere.get(name) != x]
        strange = {name: x for name, x in first.items() if not isinstance(x, Tensor | int | float)}
        late = [name for name in second if name not in first]
        lost |= {f"{name}, which steps change": None for name in changed}
        lost |= {f'state[param]["{name}"], a {type(x).__name__}': None for name, x in strange.items()}
        lost |= {f'state[param]["{name}"], which comes at the second step': None for name in late}
        found |= first
    if len(refusals) == 2:
        raise refusals[0]
    if lost:
        raise OptimizerError(
            f"from_torch cannot make {cls.__name__} a pure function of gradients: it would lose {'; '.join(lost)}. "
            "What is kept from step to step are tensors and numbers in state[param], from the first step on."
        )
    return found


@torch.no_grad()
def _stepped(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Any]:
    """Let an optimizer make a step; return the state of the parameter."""
    param.grad = torch.ones_like(param)
    optimizer.step()
    return {name: value for name, value in optimizer.state[param].items() if value is not None}


def _elsewhere(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return what an optimizer holds besides parameters and the state of each, as text."""
    groups = {
        f'param_groups[0]["{name}"]': repr(value)
        for name, value in optimizer.param_groups[0].items()
        if name != "params"
    }
    shared = {f"state[{key!r}]": repr(value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    known = (
        "state",
        "param_groups",
        "_need_device_dtype_check_for_fused",
    )  # the last one: whether a first step was checked
    return groups | shared | {name: repr(value) for name, value in vars(optimizer).items() if name not in known}


def _given(own: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter as torch keeps it: tensors, or numbers."""
    return {
        name: value if isinstance(kept[name], Tensor) else type(kept[name])(value.item())
        for name, value in own.items()
        if value is not None
    }


def _step_before(kept: dict[str, Any], t: float, device: torch.device | None) -> dict[str, Any]:
    """Return the count of steps as torch keeps it, before step number t."""
    if "step" not in kept:
        return {}
    example = kept["step"]
    number = torch.full_like(example, t - 1, device=device) if isinstance(example, Tensor) else type(example)(t - 1)
    return {"step": number}


def _keep(slot: Tensor | None, value: Any) -> None:
    """Write what torch keeps into the slot for it, unless it is the slot itself."""
    if slot is not None and value is not None and value is not slot:
        slot.copy_(torch.as_tensor(value))


def _zeros(value: Any) -> Tensor | None:
    return None if value is None else torch.zeros_like(torch.as_tensor(value))


def _of_size(small: Tensor | None, shard: Tensor) -> Tensor | None:
    """Return what a tensor that was found beside two elements in each dim is beside a shard without memory."""
    if small is None or small.shape != (2,) * shard.ndim:
        return small
    return torch.empty_like(shard, dtype=small.dtype)


def _default_rate(cls: Any, options: dict[str, Any]) -> float:
    return float(_made(cls, [torch.ones(2, 2)], options).defaults["lr"])


def _elementwise(cls: Any, elementwise: bool | None) -> bool:
    """Return whether a class is elementwise, or raise if that, or whether it can be used, is not known."""
    name = getattr(cls, "__name__", str(cls))
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise OptimizerError(
            f"from_torch takes a class of torch.optim; found {name}. Write from_torch(torch.optim.RMSprop)."
        )
    own = getattr(_TORCH_CLASSES, name, None) is cls
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
