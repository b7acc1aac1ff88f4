"""The parameters that a call of a module is given, and what it writes to them.

                                     a trained one    a frozen one
in a loss function (a handle)        an error         kept: a copy is written to, and stands for it in later calls
by itself, apply(params, ...)        an error         kept
in stages (guarded)                  an error         an error
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fshard.transforms.handle import Handle, refuse_copy, refuse_hook, tell_set
from fshard.transforms.kept import kept_name, value_of
from fshard.transforms.lent import lent, untouched
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.units import versions_of


class Guarded(Tensor):
    """A parameter whose data nobody can write to unseen."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore
    _is_param = True
    """As torch asks whether it is one."""
    bound = False
    path = ""
    tells = False
    """Whether a warning says what is set at it."""

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        """The same memory, and the same version."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.bound = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what belongs to it; tell of all else, which no later step would find."""
        if name not in _OWN:
            tell_set(name, named(parts_of(self.path)), tells=self.tells and name not in vars(self))
        super().__setattr__(name, value)

    def register_hook(self, hook: Any) -> NoReturn:
        """Raise: the next step would not find it."""
        refuse_hook(named(parts_of(self.path)))

    register_post_accumulate_grad_hook = register_hook

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Raise: what lies as a plugin says has no copies."""
        refuse_copy(named(parts_of(self.path)))


_OWN = frozenset({"bound", "path", "tells", "data", "grad", "requires_grad", "_is_param", "_backward_hooks"})


def guarded(x: Tensor, path: str = "", *, tells: bool = False) -> Tensor:
    """Return a tensor with the same memory whose data nobody can write to unseen.

    >>> x = guarded(torch.zeros(2))
    >>> x.data += 1
    >>> x._version, written_to([x], [0])
    (1, [0])
    """
    made = x.detach().as_subclass(Guarded)
    made.path, made.tells = path, tells
    return made


def written_to(xs: Sequence[Tensor], versions: Sequence[int]) -> list[int]:
    """Return the places of guarded tensors that have other versions now, or were given other data."""
    if versions_of(xs) == versions and not any(x.bound for x in xs if type(x) is Guarded):
        return []
    both = zip(xs, versions_of(xs), versions, strict=True)
    return [place for place, (x, now, before) in enumerate(both) if now != before or getattr(x, "bound", False)]


class Given:
    """The parameters of one call: `tensors` are put into the module, and `taken` is what it has made of handles among them.

    Args:
        params: by their names.
        frozen: the names of those that are not trained.
        kept: what earlier calls have kept; what is of parameters is taken out.
    """

    def __init__(self, params: Mapping[str, Any], frozen: Collection[str], kept: dict[str, Tensor]) -> None:
        self._kept = {name: kept.pop(key) for name in params if (key := kept_name(name)) in kept} if kept else {}
        self._own = {name: params[name].detach() for name in frozen if type(params[name]) in (Tensor, nn.Parameter)}
        self._lent = {name: lent(x) for name, x in self._own.items() if name not in self._kept}
        self._lent |= {name: value_of(lent(x)) for name, x in self._kept.items()}
        for x in self._lent.values():
            vars(x)["_is_param"] = True  # as torch asks: self.w *= 2 sets it
        self.taken = dict[str, Tensor]()
        self.tensors = {**params, **self._lent} if self._lent else params
        alone = type(next(iter(params.values()), None)) in (
            Tensor,
            nn.Parameter,
        )  # else the step looks, once for all calls
        self._watched = {name: x for name, x in params.items() if name not in self._lent} if alone else {}
        self._versions = versions_of([*self._watched.values()])

    def changed(self) -> list[str]:
        """Return what the call has written to, and may not."""
        now = versions_of([*self._watched.values()])
        return [name for name, one, other in zip(self._watched, now, self._versions, strict=True) if one != other]

    def kept(self) -> dict[str, Tensor]:
        """Return what is to be kept of frozen parameters, by the names of buffers."""
        found = {name: x for name, x in self._lent.items() if not untouched(x)}
        found = {name: x for name, x in found.items() if name in self._kept or not x.equal(self._own[name])}
        for name, x in self.tensors.items():
            if type(x) is Handle and x.own is not None and (taken := x.take_written()) is not None:
                found[name] = self.taken[name] = taken.detach()
        found = {name: x.detach().unsqueeze(0) for name, x in found.items()}
        return {kept_name(name): x for name, x in {**self._kept, **found}.items()}
