"""The classes of torch.optim as pure optimizers, by one table of their properties.

A step makes an instance of the class whose parameters are the local shards, with their state, and
calls its step. The class makes the state of a shard at its first step.

                 update of an element depends on     state of a parameter
    Adam         that element                        exp_avg, exp_avg_sq: like it
    ASGD         that element                        ax: like it; eta, mu: numbers
    Muon         the matrix                          momentum_buffer: like it

On a CPU an elementwise class computes 16-bit parameters in 32 bits, and is rounded once a step:
`torch.add(alpha=)`, which these classes use, rounds 16 bits by the index of an element in its
tensor, so the bits would depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.errors import OptimizerError
from fshard.optim.contract import Optimizer
from fshard.optim.leaves import Leaf, Leaves, check_unsharded, complex_is_unsupported
from fshard.optim.rules.foreach import rounds_by_index
from fshard.optim.rules.rule import Slots, optimizer_of_rule
from fshard.optim.rules.shard_lists import Rule, ShardLists, each_kind
from fshard.optim.schedules import Rate
from fshard.optim.sharding import ShardKind, is_flat


class TorchClass(NamedTuple):
    """The table entry of a torch.optim class.

    Args:
        state: of each parameter, without the count of steps.
        options: for some of that, the option that enables it.
        sharding: the kind of shards that it can step on.
        counts: True if it counts the steps of each parameter.
        unsupported: returns the reason why a parameter is not supported, if any.
    """

    state: Slots
    options: Mapping[str, str] = {}
    sharding: ShardKind = "flat"
    counts: bool = True
    unsupported: Callable[[Leaf], str | None] = lambda leaf: None


def _like(*names: str) -> dict[str, Callable[[Tensor], Tensor]]:
    return dict.fromkeys(names, torch.zeros_like)


def _numbers(*names: str) -> dict[str, Callable[[Tensor], Tensor]]:
    def zero(param: Tensor) -> Tensor:
        return torch.zeros((), device="cpu" if param.is_meta else param.device)

    return dict.fromkeys(names, zero)


def _unless_real_matrix(leaf: Leaf) -> str | None:
    reason = complex_is_unsupported(leaf)
    if reason is None and leaf.ndim != 2:
        return f"it has {leaf.ndim} dims, not 2"
    return reason


# Adafactor factors the mean squares of a matrix into a column of its rows and a row of its columns.


def _row_variances(p: Tensor) -> Tensor | None:
    return p.new_zeros((*p.shape[:-1], 1)) if p.ndim > 1 else None


def _column_variances(p: Tensor) -> Tensor | None:
    if p.ndim < 2:
        return None
    return p.new_zeros((*p.shape[:-2], 1, p.shape[-1]))


def _variances(p: Tensor) -> Tensor | None:
    return torch.zeros_like(p) if p.ndim < 2 else None


_FACTORS: Slots = {
    "row_var": _row_variances,
    "col_var": _column_variances,
    "variance": _variances,
}
_MEANS = _like("exp_avg", "exp_avg_sq")
_ADAM = TorchClass(_MEANS | _like("max_exp_avg_sq"), {"max_exp_avg_sq": "amsgrad"})
CLASSES: dict[type[torch.optim.Optimizer], TorchClass] = {
    torch.optim.Adadelta: TorchClass(_like("square_avg", "acc_delta")),
    torch.optim.Adagrad: TorchClass(_like("sum")),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.Adamax: TorchClass(_like("exp_avg", "exp_inf")),
    torch.optim.ASGD: TorchClass(_like("ax") | _numbers("eta", "mu")),
    torch.optim.NAdam: TorchClass(_MEANS | _numbers("mu_product")),
    torch.optim.RAdam: TorchClass(_MEANS),
    torch.optim.RMSprop: TorchClass(
        _like("square_avg", "momentum_buffer", "grad_avg"),
        {"momentum_buffer": "momentum", "grad_avg": "centered"},
    ),
    torch.optim.Rprop: TorchClass(_like("prev", "step_size")),
    torch.optim.SGD: TorchClass(
        _like("momentum_buffer"), {"momentum_buffer": "momentum"}, counts=False
    ),
    torch.optim.Adafactor: TorchClass(
        _FACTORS, sharding="owners", unsupported=complex_is_unsupported
    ),
    torch.optim.Muon: TorchClass(
        _like("momentum_buffer"), sharding="owners", counts=False, unsupported=_unless_real_matrix
    ),
}
"""Every class of torch.optim that steps by gradients alone."""
_REFUSED = {
    torch.optim.LBFGS: "it calls the loss function several times in one step",
    torch.optim.SparseAdam: "it is for sparse gradients",
}


def from_torch(cls: type[torch.optim.Optimizer], **options: Any) -> Optimizer:
    """Make a pure optimizer of a class of torch.optim: its step on each shard.

    Args:
        cls: the class, such as torch.optim.RMSprop. A custom class is given to a Booster as an
            instance.
        options: of the class, `foreach` and `fused` included; `lr` may be a schedule. A fused
            kernel rounds differently at the end of a tensor, so with `fused=True` the last bits of
            `step` depend on the sharding: on the mesh and the stage. `update` does without it, and
            so does reproducible mode.

    >>> import torch
    >>> opt = from_torch(torch.optim.Adagrad, lr=0.5)
    >>> params, state = opt.step([torch.tensor([2.0])], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> params, state["sum"]
    ([tensor([0.5000])], [tensor([4.])])
    """
    return _pure(cls, f"from_torch({getattr(cls, '__name__', cls)})", options)


def adafactor(lr: Rate = 1e-2, **options: Any) -> Optimizer:
    """Make Adafactor (Shazeer and Stern 2018): p = p - lr g / sqrt(v).

    Of matrices, v = row_var col_var / mean(row_var).

    Options are those of torch.optim.Adafactor. Parameters must be unsharded on their devices.

    >>> opt = adafactor(0.5)
    >>> state = opt.init([torch.ones(4, 3)])
    >>> state["row_var"][0].shape, state["col_var"][0].shape, state["variance"]
    (torch.Size([4, 1]), torch.Size([1, 3]), [None])
    """
    return _pure(torch.optim.Adafactor, "adafactor", {"lr": lr, **options})


class MuonParts(NamedTuple):
    """The matrices of a fused weight, concatenated along a dim.

    Args:
        parts: a number of equal ones, or the length of each.
        dim: along which they are concatenated.
    """

    parts: int | tuple[int, ...]
    dim: int

    def __call__(self, weight: Tensor) -> Sequence[Tensor]:
        """Return views of the matrices."""
        if isinstance(self.parts, int):
            return weight.tensor_split(self.parts, self.dim)
        return weight.split(self.parts, self.dim)

    def unsupported(self, leaf: Leaf) -> str | None:
        """Return the reason why a parameter is not made of these, if any."""
        reason = _unless_real_matrix(leaf)
        if reason is not None:
            return reason
        length = leaf.shape[self.dim]
        parts = self.parts
        if isinstance(parts, int):
            is_divisible = length % parts == 0
        else:
            is_divisible = length == sum(parts)
        if not is_divisible:
            return f"its dim {self.dim} has {length} elements, which parts={parts} do not divide"
        return None


def muon(
    lr: Rate = 1e-3, *, parts: int | Sequence[int] = 1, parts_dim: int = 0, **options: Any
) -> Optimizer:
    """Make Muon (Jordan 2024) for matrices: p = p - lr orthogonalized(momentum).

    Parameters must be unsharded on their devices.

    Args:
        lr: learning rate, or a schedule.
        parts: of a fused weight, such as query, key and value, or heads, each of which is
            orthogonalized by itself: a number of equal ones, or their lengths. `by_label` gives
            fused weights a Muon of their own.
        parts_dim: the dim along which they are concatenated: 0 for a fused weight of nn.Linear.
        options: those of torch.optim.Muon.

    >>> opt = muon(1.0, weight_decay=0.0)
    >>> updates, state = opt.update([torch.eye(2)], opt.init([torch.eye(2)]), [torch.eye(2)])
    >>> updates[0].diagonal()
    tensor([-1.1250, -1.1250])
    >>> qkv, opt = torch.ones(6, 2), muon(parts=3)
    >>> updates, state = opt.update([qkv], opt.init([qkv]), [qkv])
    >>> updates[0][:2].equal(muon().update([qkv[:2]], muon().init([qkv[:2]]), [qkv[:2]])[0][0])
    True
    """
    lengths = parts if isinstance(parts, int) else tuple(parts)
    smallest = lengths if isinstance(lengths, int) else min(lengths, default=0)
    if parts_dim not in (0, 1) or smallest < 1:
        raise OptimizerError(
            f"muon: parts must be positive, and parts_dim 0 or 1; got parts={parts}, "
            f"parts_dim={parts_dim}."
        )
    return _pure(torch.optim.Muon, "muon", {"lr": lr, **options}, MuonParts(lengths, parts_dim))


def _pure(
    cls: type[torch.optim.Optimizer],
    who: str,
    options: dict[str, Any],
    parts: MuonParts | None = None,
) -> Optimizer:
    check_divisible(cls)
    if cls not in CLASSES:
        raise OptimizerError(
            f"{who} must be given a class of torch.optim. Boost an instance of a class of your "
            "own, or write a pair: fs.optim.Optimizer(init, update)."
        )
    entry = CLASSES[cls]
    if parts is not None:
        entry = entry._replace(unsupported=parts.unsupported)
    defaults: dict[str, Any] = {}
    for name, parameter in signature(cls).parameters.items():
        if parameter.default is not parameter.empty:
            defaults[name] = parameter.default
    lr: Rate = options.pop("lr", defaults["lr"])
    number = {} if callable(lr) else {"lr": lr}
    cls([torch.zeros(2, 2)], **number, **options)  # raises where options are wrong

    is_fused = bool(options.get("fused"))
    exact_options = options | {"fused": False} if is_fused else options
    rule = _rule(cls, entry, exact_options, parts)
    if is_flat(entry.sharding):
        rule = _in_32_bits(rule)
    else:
        rule = each_kind(rule, complex_as_real=False)
    slots: dict[str, Callable[[Tensor], Tensor | None]] = {}
    for name, make in entry.state.items():
        option = entry.options.get(name)
        if option is None or (defaults | options)[option]:
            slots[name] = make

    def check(params: Leaves) -> None:
        if not is_flat(entry.sharding):
            check_unsharded(who, params, entry.unsupported)

    fast = _rule(cls, entry, options) if is_fused else None
    return optimizer_of_rule(
        lr,
        slots,
        rule,
        fast=fast,
        check=check,
        sharding=entry.sharding,
    )


def check_divisible(cls: Any) -> None:
    """Raise if a class of torch.optim does not step by dense gradients alone."""
    if cls in _REFUSED:
        raise OptimizerError(
            f"torch.optim.{cls.__name__} cannot step on shards: {_REFUSED[cls]}. Take another "
            "class."
        )


def _rule(
    cls: Any, entry: TorchClass, options: Mapping[str, Any], parts: MuonParts | None = None
) -> Rule:
    """Return the rule that is a step of an instance of a class, on the parts of fused weights."""
    is_count_on_device = options.get("fused") or options.get("capturable")  # as torch has it

    def rule(shards: ShardLists, lr: float) -> None:
        shards = shards.nonempty()
        if not shards.params:
            return
        if parts is not None:
            shards = shards.split(parts)
        params: list[Tensor] = [nn.Parameter(param.detach()) for param in shards.params]
        optimizer = cls(params, lr=lr, **options)
        for i, param in enumerate(params):
            param.grad = shards.grads[i].clone()  # torch may write into it
            steps_before = shards.steps[i] - 1.0
            if steps_before > 0:  # in its first step the class makes the state
                state = {name: column[i] for name, column in shards.state.items()}
                state = {name: x for name, x in state.items() if x is not None}
                if entry.counts:
                    device = param.device if is_count_on_device else None
                    state["step"] = torch.tensor(steps_before, device=device)
                optimizer.state[param] = state
        optimizer.step()

        # The class may replace a state in place of writing it, and makes that of a first step.
        for i, param in enumerate(params):
            for name, column in shards.state.items():
                if column[i] is None:
                    continue
                after = optimizer.state[param][name]
                if after is not column[i]:
                    column[i].copy_(after)

    return rule


def _in_32_bits(rule: Rule) -> Rule:
    """Return a rule that gets float32 copies of 16-bit tensors, which it would round by index."""

    def widened(column: list[Any]) -> list[Any]:
        wide: list[Any] = []
        for x in column:
            if x is not None and rounds_by_index(x):
                wide.append(x.float())
            else:
                wide.append(x)
        return wide

    def write_back(column: list[Any], wide: list[Any]) -> None:
        for x, computed in zip(column, wide, strict=True):
            if computed is not x:
                x.copy_(computed)

    def written(shards: ShardLists, lr: float) -> None:
        wide = replace(
            shards,
            params=widened(shards.params),
            grads=widened(shards.grads),
            state={name: widened(column) for name, column in shards.state.items()},
        )
        rule(wide, lr)
        write_back(shards.params, wide.params)
        for name, column in shards.state.items():
            write_back(column, wide.state[name])

    return written
