"""An optimizer of torch that has been made, with its groups, as a pure one that follows what is written into them.

Learning-rate schedulers write a group's "lr", and some of them momentum or betas; torch's loops change weight decay by hand.
What is written there before a step counts in that step.

    AdamW([{"params": [w]}, {"params": [b], "weight_decay": 0}])  ->  by_label({0: adamw, 1: adamw}, {"w": 0, "b": 1})
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fshard.errors import OptimizerError
from fshard.optim.adam import adam, adamw
from fshard.optim.choose import by_label
from fshard.optim.contract import Optimizer, check_optimizer
from fshard.optim.dry import NOT_OPTIONS, Groups, modes
from fshard.optim.foreign import is_torchs
from fshard.optim.held import refuse_hooks_of_all, refuse_replaced
from fshard.optim.methods import closure_error
from fshard.optim.sgd import sgd
from fshard.optim.trials import foreign, pure

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

    def refuse_closure(self) -> None:
        """Raise if its steps would do more with a closure than to call it once before."""
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

    def refuse_closure(self) -> None:
        """Do nothing: it knows of none."""


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
        self._places = {name: (at, i) for at, group in enumerate(self._names) for i, name in enumerate(group)}
        self._tied = {id(x): self._places.get(name) for name, x in params.items()}
        self._frozen: dict[int, nn.Parameter] = {}
        self._ids, self._is_pointed = _ids(given), False
        others = [at for at, group in enumerate(given.param_groups) if not _is_ours(type(given), group)]
        self._copied = foreign(given, others) if others else Groups(given, {}, {})
        self._tried: dict[Hashable, dict[int, Optimizer]] = {}
        self._made: _Now | None = None
        self.now()
        self._closure_error = closure_error(self._copied)

    def now(self) -> Optimizer:
        """Return the optimizer that torch's groups describe; learning rates are read anew in each step."""
        refuse_hooks_of_all(self.given)
        self._refuse_moved()
        groups = self.given.param_groups
        options = {at: _options(group) for at, group in enumerate(groups) if at not in self._copied.groups}
        modes_now = {at: modes(groups[at]) for at in self._copied.groups}
        if self._made is None or (self._made.options, self._made.modes) != (options, modes_now):
            ours = {at: _made(self.given, at, own) for at, own in options.items()}
            opts = dict(sorted((ours | self._copies(modes_now)).items()))
            opt = opts[0] if len(opts) == 1 else by_label(opts, self._label)
            made = _Now(options, modes_now, opts, [_options(group) for group in groups], opt)
            if self._made is not None:
                made.refuse_other_state(self._made, type(self.given).__name__)
            self._made = made
        return self._made.opt

    def _copies(self, modes: dict[int, Any]) -> dict[int, Optimizer]:
        """Return the optimizers that step by copies: what dry steps show depends on which options are on."""
        key = tuple(modes.items())
        if key not in self._tried:
            self._tried[key] = pure(self._copied, self._place, idle=bool(self._tried))
        return self._tried[key]

    def _refuse_moved(self) -> None:
        """Raise if groups have other parameters than they had, or there is state that nobody reads."""
        name = type(self.given).__name__
        if _ids(self.given) != self._ids:
            raise OptimizerError(
                f"{name}: groups, or parameters of them, have been added, removed or moved since it was boosted. Make them "
                "before; what is not to move any more has the learning rate 0."
            )
        if self._is_pointed and any(self.given.state.values()):
            raise OptimizerError(
                f"{name}: a state was loaded into it after it was boosted, where nobody reads it: what counts is the state of "
                "the optimizer that boost has returned. Resume from that."
            )

    def refuse_closure(self) -> None:
        """Raise if steps of the given one would do more with a closure than to call it once before."""
        if self._closure_error is not None:
            raise OptimizerError(self._closure_error)

    def trained(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters by their names, of which those that are in no group are frozen."""
        for name, x in params.items():  # a part of the model may know a tied parameter by another name
            if (place := self._tied.get(id(x))) is not None:
                self._places.setdefault(name, place)
        return {name: x if name in self._places else self._as_frozen(x) for name, x in params.items()}

    def _as_frozen(self, x: Tensor) -> Tensor:
        """Return the same frozen parameter for the same parameter: what is tied stays tied."""
        if not x.requires_grad:
            return x
        return self._frozen.setdefault(id(x), nn.Parameter(x.detach(), requires_grad=False))

    def point_at(self, params: Mapping[str, Tensor]) -> None:
        """Let the groups have other tensors in the place of the parameters, and forget the state that was made for these."""
        if not self._is_pointed:
            self.given.state.clear()
        self.given.state = _Gone()
        self._tied, self._frozen = {}, {}  # whose numbers mean nothing once they have gone
        for group, names in zip(self.given.param_groups, self._names, strict=True):
            group["params"] = [params[name] for name in names]
        self._ids, self._is_pointed = _ids(self.given), True

    def _label(self, path: str, leaf: object) -> int:
        """Return the group of a parameter, by its name; those in none are not trained."""
        return self._places.get(_name(path), (0, 0))[0]

    def _place(self, path: str) -> int:
        """Return the place of a parameter in its group."""
        return self._places.get(_name(path), (0, 0))[1]


@dataclass(frozen=True)
class _Now:
    """Pure optimizers, and what they were made for.

    Args:
        options: of the groups that have an optimizer of ours.
        modes: of the others.
        opts: the optimizer of each group.
        said: the options of all groups, as they were said.
        opt: that of all parameters.
    """

    options: dict[int, dict[str, Any]]
    modes: dict[int, object]
    opts: dict[int, Optimizer]
    said: list[dict[str, Any]]
    opt: Optimizer

    def refuse_other_state(self, before: _Now, name: str) -> None:
        """Raise naming what was changed in the groups whose optimizers have other parts of state than before."""
        found = [
            f'param_groups[{at}]["{key}"] was {old.get(key)!r} and is {new.get(key)!r}'
            for at, (old, new) in enumerate(zip(before.said, self.said, strict=True))
            if before.opts[at].init([]).keys() != self.opts[at].init([]).keys()
            for key in {**old, **new}
            if _is_other(old.get(key), new.get(key))
        ]
        if found:
            raise OptimizerError(
                f"{name}: {', '.join(found)}, and with that it remembers something else than it did when it was boosted. Boost "
                "it with the options that decide what it remembers, and leave them on or off."
            )


class _Gone(defaultdict[Any, Any]):
    """The state of an optimizer that was boosted: it has none, and what is written into it counts for nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise OptimizerError(_GONE)

    def __missing__(self, key: Any) -> Any:
        raise OptimizerError(_GONE)

    def clear(self) -> None:
        raise OptimizerError(_GONE)


_GONE = (
    "state: the optimizer that was given to boost has none any more, and none is read from there. That of the one that boost "
    "has returned lies as the plugin says."
)


def _ids(given: torch.optim.Optimizer) -> list[list[int]]:
    """Return which tensors each group has, without holding them."""
    return [[*map(id, group["params"])] for group in given.param_groups]


def _name(path: str) -> str:
    return path.rpartition('["')[2].removesuffix('"]')


def _is_other(one: Any, other: Any) -> bool:
    return one is not other and not (type(one) is type(other) and not isinstance(one, Tensor) and one == other)


def _began(state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer remembers steps of a parameter; some have a state of zeros from the beginning."""
    remembered = [state["step"]] if "step" in state else state.values()
    numbers = (torch.as_tensor(x) for x in remembered if isinstance(x, Tensor | int | float))
    return any(not x.is_meta and bool(x.any()) for x in numbers)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group but for its learning rate, and what schedulers keep there."""
    return {name: x for name, x in group.items() if name not in NOT_OPTIONS}


def _is_ours(cls: type, group: Mapping[str, Any]) -> bool:
    """Return whether there is an optimizer of ours that is this class with these options."""
    if cls not in _OWN or any(group.get(name) for name in _NOT_OURS):
        return False
    return not any(isinstance(x, Tensor) for name in _OWN[cls][1] for x in _items(group[name]))


def _items(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _made(given: torch.optim.Optimizer, at: int, options: dict[str, Any]) -> Optimizer:
    def rate(count: int) -> float:
        return float(given.param_groups[at]["lr"])

    own, names = _OWN[type(given)]
    if options.get("decoupled_weight_decay") and own is adam:
        own = adamw
    return own(rate, **{name: options[name] for name in names}, fused=bool(options.get("fused")))
