"""What a class makes of zero_grad() and of step(closure), which a boosted optimizer has of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fshard.errors import OptimizerError
from fshard.optim.copies import same
from fshard.optim.dry import Example, Groups, agree, everywhere, ran, stepped
from fshard.optim.foreign import is_torchs


def refuse_zeroing(given: torch.optim.Optimizer, everyone: list[Example]) -> None:
    """Raise if a class has a zero_grad of its own that does not drop gradients, or make zeros of them, as torch's does."""
    if type(given).zero_grad is torch.optim.Optimizer.zero_grad:
        return
    optimizer, params = stepped(everyone)

    def left(**how: bool) -> list[Tensor | None]:
        for param, example in zip(params, everyone, strict=True):
            param.grad = example.grads[0] if example.grads[0] is None else example.grads[0].clone()
        optimizer.zero_grad(**how)
        return [param.grad for param in params]

    kept = any(grad is not None for grad in left())
    kept |= _takes(optimizer.zero_grad, set_to_none=False) and any(
        example.trained and (grad is None or bool(grad.any()))
        for grad, example in zip(left(set_to_none=False), everyone, strict=True)
    )
    if kept or not all(
        same(param.detach().as_subclass(Tensor), x.start) for param, x in zip(params, everyone, strict=True)
    ):
        raise OptimizerError(
            f"{type(given).__name__}: its own zero_grad does something else than torch's, and would not be called. Leave it "
            "out; zeros instead of None are made by optimizer.zero_grad(set_to_none=False)."
        )


def _takes(f: Callable[..., object], *args: object, **kwargs: object) -> bool:
    """Return whether a function can be called with such arguments."""
    try:
        inspect.signature(f).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def closure_error(of: Groups) -> str | None:
    """Return why steps of a class that is not torch's own are not to be given a closure; None if they may.

    Ours calls it once, before the step: whoever calls it again, has moved before, or asks for its loss, does something else.
    """
    if is_torchs(type(of.given)) or not _takes(of.given.step, lambda: None):
        return None
    everyone = everywhere(of)
    closures: list[_Closure] = []
    with torch.random.fork_rng([]):
        expected = ran(everyone)
        try:
            got = ran(everyone, partial(_step_by_closure, noted=closures))
        except Exception:  # of whatever kind
            got = None
    if got is not None and agree(expected, got) and all(closure.calls == 1 and closure.is_idle for closure in closures):
        return None
    return (
        f"step: {type(of.given).__name__} does something else with a closure than to call it once before it steps: it calls it "
        "again, or steps by its loss, and a boosted optimizer does not. Take the backward before step(), without a closure."
    )


class _Closure:
    """Gives parameters their gradients, and notes how often, and that nothing has moved before.

    Its loss is odd, and another one in each step.
    """

    def __init__(self, give: Callable[[], None], params: list[nn.Parameter], loss: float) -> None:
        self._give, self._params, self._before = give, params, [param.detach().clone() for param in params]
        self._loss = torch.tensor(loss, requires_grad=True)
        self.calls, self._moved = 0, False

    def __call__(self) -> Tensor:
        self.calls += 1
        self._moved |= not all(map(same, self._params, self._before))
        self._give()
        return self._loss

    @property
    def is_idle(self) -> bool:
        """Whether nothing was moved before it, and nobody has taken the gradient of its loss."""
        return not self._moved and self._loss.grad is None


def _step_by_closure(
    optimizer: Any, give: Callable[[], None], params: list[nn.Parameter], noted: list[_Closure]
) -> None:
    for param in params:
        param.grad = None
    noted.append(_Closure(give, params, -3.7 * 5.0 ** len(noted)))
    optimizer.step(noted[-1])
