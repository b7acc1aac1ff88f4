"""An optimizer of torch that has been made, with its groups, as a pure one that follows what is written into them.

Learning-rate schedulers write a group's "lr", and some of them momentum or betas; torch's loops change weight decay by hand.
What is written there before a step counts in that step.

    AdamW([{"params": [w]}, {"params": [b], "weight_decay": 0}])  ->  by_label({0: adamw, 1: adamw}, {"w": 0, "b": 1})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fshard.errors import OptimizerError
from fshard.optim.adam import adam, adamw
from fshard.optim.choose import by_label
from fshard.optim.contract import Optimizer, check_optimizer
from fshard.optim.foreign import is_torchs
from fshard.optim.sgd import sgd
from fshard.optim.trials import foreign, refuse_replaced

_ADAM = ("betas", "eps", "weight_decay", "amsgrad", "maximize")
_OWN: dict[type, tuple[Any, tuple[str, ...]]] = {
    torch.optim.Adam: (adam, _ADAM),
    torch.optim.AdamW: (adamw, _ADAM),
    torch.optim.SGD: (sgd, ("momentum", "dampening", "weight_decay", "nesterov", "maximize")),
}
"""Classes of which we have our own with the same bits, and the options of these."""
_NOT_OURS = ("capturable", "differentiable")


class Followed(Protocol):
    """What an optimizer that was given is at the moment, and which parameters are its."""

    def now(self) -> Optimizer:
        """Return it as it is now."""
        ...

    def trained(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters by their names, of which those that are not its are frozen."""
        ...

    def point_at(self, params: Mapping[str, Tensor]) -> None:
        """Refer to these tensors in the place of the parameters, which may then go."""
        ...


def followed(given: Any, params: Mapping[str, Tensor], who: str) -> Followed:
    """Return what follows an optimizer of torch, or of `fs.optim`, for these parameters; None trains nothing."""
    if given is None:
        return Fixed()
    if isinstance(given, torch.optim.Optimizer):
        return Following(given, params)
    check_optimizer(given, who)
    return Fixed(given)


NOTHING = Optimizer(lambda params: (), lambda grads, state, params: (grads, state), elementwise=True, arrays=True)
"""What trains nothing: it has no state, and passes gradients on."""


@dataclass(frozen=True)
class Fixed:
    """A pure optimizer: it is for all parameters, and stays as it is."""

    opt: Optimizer = NOTHING

    def now(self) -> Optimizer:
        """Return it."""
        return self.opt

    def trained(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all parameters."""
        return dict(params)

    def point_at(self, params: Mapping[str, Tensor]) -> None:
        """Do nothing: it refers to none."""


class Following:
    """A pure optimizer for named parameters, as an optimizer of torch has them in its groups now.

    >>> layer = torch.nn.Linear(1, 1)
    >>> following = Following(torch.optim.SGD(layer.parameters(), lr=0.5), dict(layer.named_parameters()))
    >>> params = {"weight": torch.ones(1, 1), "bias": torch.ones(1)}
    >>> opt = following.now()
    >>> following.given.param_groups[0]["lr"] = 0.25
    >>> opt.step(params, opt.init(params), params)[0]
    {'weight': tensor([[0.7500]]), 'bias': tensor([0.7500])}
    """

    def __init__(self, given: torch.optim.Optimizer, params: Mapping[str, Tensor]) -> None:
        self.given = given
        names = {id(x): name for name, x in params.items()}
        own = [[names.get(id(x)) for x in group["params"]] for group in given.param_groups]
        strange = [f"param_groups[{at}]" for at, group in enumerate(own) if None in group]
        if strange:
            raise OptimizerError(
                f"{type(given).__name__}: in {', '.join(strange)} are tensors that are no parameters of the model. Make the "
                "optimizer of model.parameters(), before both are boosted."
            )
        refuse_replaced(given)
        if is_torchs(type(given)) and any(map(_began, given.state.values())):
            raise OptimizerError(
                f"{type(given).__name__} has taken steps already, and what it remembers of them would be lost. Boost it before "
                "its first step."
            )
        self._names = [[name for name in group if name is not None] for group in own]
        self.labels = {name: at for at, group in enumerate(self._names) for name in group}
        self._tied = {id(x): self.labels.get(name) for name, x in params.items()}
        self._frozen: dict[int, nn.Parameter] = {}
        self._made: tuple[dict[int, dict[str, Any]], Optimizer] | None = None
        others = [at for at, group in enumerate(given.param_groups) if not _is_ours(type(given), group)]
        self._foreign = foreign(given, others) if others else {}

    def now(self) -> Optimizer:
        """Return the optimizer that torch's groups describe; learning rates are read anew in each step."""
        groups = {at: group for at, group in enumerate(self.given.param_groups) if at not in self._foreign}
        options = {at: _options(group) for at, group in groups.items()}
        if self._made is None or self._made[0] != options:
            ours = {at: _made(type(self.given), groups[at], own) for at, own in options.items()}
            opts = dict(sorted((ours | self._foreign).items()))
            self._made = options, opts[0] if len(opts) == 1 else by_label(opts, self._label)
        return self._made[1]

    def trained(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters by their names, of which those that are in no group are frozen."""
        for name, x in params.items():  # a part of the model may know a tied parameter by another name
            if (label := self._tied.get(id(x))) is not None:
                self.labels.setdefault(name, label)
        return {name: x if name in self.labels else self._as_frozen(x) for name, x in params.items()}

    def _as_frozen(self, x: Tensor) -> Tensor:
        """Return the same frozen parameter for the same parameter: what is tied stays tied."""
        if not x.requires_grad:
            return x
        return self._frozen.setdefault(id(x), nn.Parameter(x.detach(), requires_grad=False))

    def point_at(self, params: Mapping[str, Tensor]) -> None:
        """Let the groups have other tensors in the place of the parameters, and forget the state that was made for these."""
        self.given.state.clear()
        self._tied, self._frozen = {}, {}  # whose numbers mean nothing once they have gone
        for group, names in zip(self.given.param_groups, self._names, strict=True):
            group["params"] = [params[name] for name in names]

    def _label(self, path: str, leaf: object) -> int:
        """Return the group of a parameter, by its name; those in none are not trained."""
        return self.labels.get(path.rpartition('["')[2].removesuffix('"]'), 0)


def _began(state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer remembers steps of a parameter; some have a state of zeros from the beginning."""
    remembered = [state["step"]] if "step" in state else state.values()
    return any(isinstance(x, Tensor | int | float) and bool(torch.as_tensor(x).any()) for x in remembered)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group but for its learning rate, and what schedulers keep there."""
    return {name: x for name, x in group.items() if name not in ("params", "lr", "initial_lr", "max_lr", "min_lr")}


def _is_ours(cls: type, group: Mapping[str, Any]) -> bool:
    """Return whether there is an optimizer of ours that is this class with these options."""
    return cls in _OWN and not any(group.get(name) for name in _NOT_OURS)


def _made(cls: type, group: dict[str, Any], options: dict[str, Any]) -> Optimizer:
    def rate(count: int) -> float:
        return float(group["lr"])

    own, names = _OWN[cls]
    if options.get("decoupled_weight_decay") and own is adam:
        own = adamw
    return own(rate, **{name: options[name] for name in names}, fused=bool(options.get("fused")))
