"""The optimizer given to a Booster, as the pure optimizers of its next step.

    None, fs.optim.adamw(...)           OptimizerSource   the same in every step
    torch.optim.AdamW(groups)           GroupsSource      a pure optimizer per group, by the options
                                                          that the group has now
    class Lion(torch.optim.Optimizer)   InstanceSource    the instance itself steps, on the local
                                                          shards of this device

Learning-rate schedulers write a group's "lr", and some of them momentum or betas; loops may write
weight decay. Values written before a step are used in that step. Groups may be added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fshard.errors import OptimizerError
from fshard.memory.state import current_offload, fetched, is_away, stored, written_back
from fshard.mesh.layout import P, PyTree
from fshard.mesh.layout.kinds import copy_in, mark_memory, memory_of
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import put_equal
from fshard.mesh.spmd.run import as_one_device, local_devices
from fshard.optim.by_label import NOTHING, by_label
from fshard.optim.contract import Optimizer, check_optimizer, copied, differences
from fshard.optim.leaves import Leaf, Leaves, shards_of, trainable, undifferentiable
from fshard.optim.per_device.draws import UpdateDraws
from fshard.optim.per_device.replicas import EqualResult, ReplicaCheck, sums_over_shards
from fshard.optim.rules.adam import adam, adamw
from fshard.optim.rules.sgd import sgd
from fshard.optim.sharding import ShardKind
from fshard.optim.torch_optim.classes import CLASSES, check_divisible, from_torch
from fshard.optim.torch_optim.instance_state import InstanceState
from fshard.randomness import drawn_key


class OptimizerSource:
    """An optimizer that may change from step to step, and the parameters that it trains.

    A pure one is for all parameters, and stays.
    """

    def __init__(self, opt: Optimizer = NOTHING) -> None:
        self.opt = opt

    def current_optimizer(self) -> Optimizer:
        """Return the optimizer as it is now.

        The same object as long as nothing but learning rates changes.
        """
        return self.opt

    def freeze_untrained(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Freeze the parameters that it does not train."""
        return dict(params)

    def rebind(self, params: Mapping[str, Tensor]) -> None:
        """Refer to these tensors instead of the parameters of their names, which may be freed."""


def optimizer_source(optimizer: Any, params: Mapping[str, Tensor], caller: str) -> OptimizerSource:
    """Make the source for an optimizer of torch or of `fs.optim`, which trains some of `params`.

    None trains nothing.
    """
    if optimizer is None:
        return OptimizerSource()
    if not isinstance(optimizer, torch.optim.Optimizer):
        check_optimizer(optimizer, caller)
        return OptimizerSource(optimizer)
    check_divisible(type(optimizer))
    return (
        GroupsSource(optimizer, params)
        if type(optimizer) in CLASSES
        else InstanceSource(optimizer, params)
    )


class TorchSource(OptimizerSource):
    """An optimizer of torch: the names of the parameters in its groups."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.optimizer = optimizer
        self._names: Any = WeakIdKeyDictionary({x: name for name, x in params.items()})
        self._aliases: dict[str, str] = {}  # a stage may know a tied parameter by another name
        self._frozen: Any = WeakIdKeyDictionary()
        self._idle = set[str]()  # the names of the parameters that were frozen
        self.groups()

    def __str__(self) -> str:
        return type(self.optimizer).__name__

    def groups(self) -> list[list[str]]:
        """Return the names of the parameters in each group."""
        groups: list[list[Any]] = []
        for group in self.optimizer.param_groups:
            groups.append([self._names.get(x) for x in group["params"]])
        foreign = [f"param_groups[{i}]" for i, names in enumerate(groups) if None in names]
        if foreign:
            raise OptimizerError(
                f"{self}: in {', '.join(foreign)} are tensors that are no parameters of the model. "
                "Make the optimizer of model.parameters(), before both are boosted."
            )
        return groups

    def name_at(self, path: str) -> str:
        """Return the model's name of the parameter at a path."""
        name = path.rpartition('["')[2].partition('"]')[
            0
        ]  # a part of a fused weight has an index behind
        return self._aliases.get(name, name)

    def freeze_untrained(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Freeze the parameters that are in no group; ties stay ties."""
        trained = {*chain.from_iterable(self.groups())}
        results: dict[str, Tensor] = {}
        for name, x in params.items():
            alias = self._names.get(x, name)
            self._aliases[name] = alias
            results[name] = x
            if x.requires_grad and alias not in trained:
                self._idle.add(alias)
                if x not in self._frozen:
                    self._frozen[x] = nn.Parameter(x.detach(), requires_grad=False)
                results[name] = self._frozen[x]  # one for ties
        return results

    def rebind(self, params: Mapping[str, Tensor]) -> None:
        """Replace the parameters in the groups by these tensors."""
        for group, names in zip(self.optimizer.param_groups, self.groups(), strict=True):
            group["params"] = [params[name] for name in names]
        self._names = WeakIdKeyDictionary({x: name for name, x in params.items()})
        self._frozen = WeakIdKeyDictionary()

    def state_dict(self) -> dict[str, Any]:
        """Return the groups, and all else that the class saves, but for the state of parameters."""
        return {**self.optimizer.state_dict(), "state": {}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returns; the state of parameters stays."""
        state = dict(self.optimizer.state)
        self.optimizer.load_state_dict({**state_dict, "state": {}})
        self.optimizer.state.update(state)

    def add_group_state(
        self, params: PyTree, state: PyTree, init: Callable[[PyTree], PyTree]
    ) -> tuple[PyTree, PyTree]:
        """Return parameters and state with those of the groups that were added.

        `init` makes a state of all groups, of which the parts that are new are taken.
        """
        leaves = Leaves.of(params)
        added = {*chain.from_iterable(self.groups())} & self._idle
        self._idle -= added

        results: list[Leaf] = []
        for path, leaf in zip(leaves.paths, leaves.leaves, strict=True):
            if self.name_at(path) in added:
                layout = replace(leaf.layout, frozen=False)
                leaf = Sharded(leaf.shape, layout, leaf.shards)
            results.append(leaf)
        params = leaves.rebuild(results)
        return params, _filled(init(params), state)


def _filled(initial: PyTree, before: PyTree) -> PyTree:
    """Return a state with the previous one included.

    A state of one group is the first of several.
    """
    if not isinstance(initial, dict) or not isinstance(before, dict):
        return before
    if 0 in initial and 0 not in before:
        before = {0: before}
    filled: dict[Any, PyTree] = {}
    for name, entry in initial.items():
        filled[name] = _filled(entry, before[name]) if name in before else entry
    return filled


# -- classes of torch ------------------------------------------------------------------------------

_ADAM = ("betas", "eps", "weight_decay", "amsgrad", "maximize")
_RULES: dict[type, tuple[Any, tuple[str, ...]]] = {
    torch.optim.Adam: (adam, (*_ADAM, "decoupled_weight_decay")),
    torch.optim.AdamW: (adamw, _ADAM),
    torch.optim.SGD: (sgd, ("momentum", "dampening", "weight_decay", "nesterov", "maximize")),
}
"""Classes of which there are our own with the same bits, and the options of these."""


class GroupsSource(TorchSource):
    """An optimizer of torch's own class, as a pure one with the options that its groups have now.

    >>> layer = torch.nn.Linear(1, 1)
    >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.5)
    >>> source = GroupsSource(sgd, dict(layer.named_parameters()))
    >>> params = {"weight": torch.ones(1, 1), "bias": torch.ones(1)}
    >>> opt = source.current_optimizer()
    >>> source.optimizer.param_groups[0]["lr"] = 0.25
    >>> opt.step(params, opt.init(params), params)[0]
    {'weight': tensor([[0.7500]]), 'bias': tensor([0.7500])}
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]) -> None:
        super().__init__(optimizer, params)
        for state in optimizer.state.values():
            # Some classes start with a state of zeros.
            values = [state["step"]] if "step" in state else state.values()
            numbers = [x for x in values if isinstance(x, Tensor | int | float)]
            if any(bool(torch.as_tensor(x).any()) for x in numbers):
                raise OptimizerError(
                    f"{self} has taken steps already, and its state would be lost. Boost it before "
                    "its first step."
                )
        self._described: Any = None  # the names and options of the groups that `opt` was made for
        self.current_optimizer()

    def current_optimizer(self) -> Optimizer:
        """Return the optimizer that the groups describe; learning rates are read in each step."""
        names_of_hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        if any(vars(self.optimizer).get(name) for name in names_of_hooks):
            raise OptimizerError(
                f"{self}: hooks of its steps are not called, since it does not step itself. Call "
                "them beside step()."
            )
        names = self.groups()
        options = [_options(type(self.optimizer), group) for group in self.optimizer.param_groups]
        if (names, options) == self._described:
            return self.opt
        group_of: dict[str, int] = {}
        for i, group in enumerate(names):
            group_of |= dict.fromkeys(group, i)
        opts = {i: self._pure(i, group) for i, group in enumerate(options)}

        def label(path: str, leaf: Leaf) -> int:
            return group_of.get(self.name_at(path), 0)  # those of no group are frozen

        self._described = (names, options)
        self.opt = opts[0] if len(opts) == 1 else by_label(opts, label, every=False)
        return self.opt

    def rebind(self, params: Mapping[str, Tensor]) -> None:
        """Replace the groups' parameters by these tensors; the state is elsewhere."""
        super().rebind(params)
        self.optimizer.state.clear()

    def _pure(self, group: int, options: dict[str, Any]) -> Optimizer:
        cls: Any = type(self.optimizer)

        def rate(count: int) -> float:
            return float(self.optimizer.param_groups[group]["lr"])

        if cls not in _RULES or options.get("capturable") or options.get("differentiable"):
            return from_torch(cls, lr=rate, **options)
        rule, names = _RULES[cls]
        arguments = {name: options[name] for name in names}
        return rule(rate, **arguments, fused=bool(options.get("fused")))


def _options(cls: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that the class takes, but for the learning rate.

    Numbers as such.
    """

    def plain(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(plain, x))
        return x.item() if isinstance(x, Tensor) else x

    taken = signature(cls).parameters.keys() - {"params", "lr"}
    return {name: plain(x) for name, x in group.items() if name in taken}


# -- classes of one's own --------------------------------------------------------------------------


def _own_gradient(gradient: Leaf) -> Tensor:
    """Return a device's gradient in memory that a class may keep.

    In host memory gradients are in buffers that the next step's overwrite. A class may keep `p.grad`
    anywhere: in its state, in a list, in an attribute. So it gets a copy.
    """
    (x,) = shards_of(gradient)
    is_buffer = isinstance(gradient, Sharded) and gradient.layout.memory != "device"
    return copy_in("host", x, gradient.mesh.device_type) if is_buffer else x


def _sharding_of(kind: type[torch.optim.Optimizer]) -> ShardKind:
    """Return how a class of one's own lets its parameters be sharded: its attribute `sharding`."""
    if hasattr(kind, "elementwise"):
        raise OptimizerError(
            f'{kind.__name__}: the class must have sharding = "flat" in place of elementwise = '
            "True, and nothing in place of False. Rename the attribute."
        )
    sharding: Any = getattr(kind, "sharding", "owners")
    kinds = get_args(ShardKind)
    if sharding not in kinds:
        raise OptimizerError(
            f"{kind.__name__}: sharding of the class must be one of {', '.join(map(repr, kinds))}; "
            f"got {sharding!r}. Leave it out for full parameters at owners."
        )
    return sharding


class InstanceSource(TorchSource):
    """A custom optimizer class: the instance steps on the local shards of one device.

    Each parameter is stored in full by its owner, and elsewhere has no elements and no gradient; if
    the class has `sharding = "flat"`, each device has a flat shard of it. Its state is
    `state[param]` and its groups.

    Checkpoints store tensors, numbers and strings of `state[param]`, and what else the class's
    `state_dict` returns. Of a class with flat shards tensors have the shape of the shard, or are one
    number.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]) -> None:
        super().__init__(optimizer, params)
        # The shards are `nn.Parameter`s, whose data is replaced in each step.
        self._local: dict[str, Sharded] = {}
        self.state = InstanceState(optimizer, self._local)
        self._step_instance = optimizer.step  # `boost` replaces it by one that raises
        self._check = ReplicaCheck()
        sharding = _sharding_of(type(optimizer))
        self.opt = Optimizer(self._init, self._update, self._step, sharding, takes="arrays")

    def rebind(self, params: Mapping[str, Tensor]) -> None:
        """Replace the parameters in the groups, and in existing state, by these tensors."""
        before = self._all_params()
        super().rebind(params)
        for old, new in zip(before, self._all_params(), strict=True):
            self._rename(old, new)

    def _all_params(self) -> list[Tensor]:
        """Return the parameters of all groups."""
        params: list[Tensor] = []
        for group in self.optimizer.param_groups:
            params += group["params"]
        return params

    def _rename(self, old: Tensor, new: Tensor) -> None:
        if old in self.optimizer.state:
            self.optimizer.state[new] = self.optimizer.state.pop(old)

    def _localize(self, params: Leaves) -> dict[str, int]:
        """Replace the parameters in the groups by local shards.

        Return the index of the leaf of each.
        """
        firsts: list[int] = []
        for i, first in enumerate(params.firsts):
            if i == first and params.leaves[i] is not None:
                firsts.append(i)
        names = [self.name_at(params.paths[i]) for i in firsts]
        fused = [name for name, count in Counter(names).items() if count > 1]
        if fused:
            raise OptimizerError(
                f"{self}, an optimizer of your own class, must get each parameter as one tensor; "
                f"{', '.join(fused)} are stored in parts. Use an optimizer of torch or of fs.optim."
            )
        index = dict(zip(names, firsts, strict=True))
        for group, names in zip(self.optimizer.param_groups, self.groups(), strict=True):
            for i, (x, name) in enumerate(zip(group["params"], names, strict=True)):
                if name in self._local and x is self._local[name].shards[0]:
                    continue
                if name in self._local:
                    raise OptimizerError(f"{self}: {name} is in a group already. Leave it out.")
                leaf = params.leaves[index[name]]
                local = nn.Parameter(torch.empty_like(leaf.shards[0]))
                group["params"][i] = local
                self._local[name] = Sharded(leaf.shape, leaf.layout, (local,))
                self._names[local] = name
                self._rename(x, local)
        return {name: index[name] for name in self._local}

    def _init(self, params: PyTree) -> PyTree:
        """Shard the state that the instance has already, made by its constructor or loaded."""
        leaves = Leaves.of(params)
        if any(len(shards_of(leaf)) > 1 for leaf in leaves.leaves):
            raise OptimizerError(
                f"{self}, an optimizer of your own class, must step on one device; got the shards "
                "of several. Train inside of fs.run(main, mesh=mesh), or under torchrun."
            )
        before = {*self._local}
        offload = current_offload()
        self.state.memory = "device" if offload is None else offload.memory
        for param, i in self._localize(leaves).items():
            if param in before:
                continue
            leaf = leaves.leaves[i]
            state = self.optimizer.state.get(self._local[param].shards[0], {})
            for name, x in state.items():
                if not isinstance(x, Tensor) or x.shape != leaf.shape or not x.numel():
                    continue
                if x.is_meta and not leaf.shards[0].is_meta:
                    raise OptimizerError(
                        f"{self}: state of a lazy parameter must be made in step(), not by the "
                        f"constructor; got {name!r} without memory."
                    )
                state[name] = stored(put_equal(x, leaf.layout)).shards[0]
        return self.state

    @undifferentiable
    def _step(self, grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        leaves = Leaves.of(params)
        gradients = leaves.gradients(grads)
        indices = self._localize(leaves)
        pairs: list[tuple[Tensor, Leaf]] = []
        updated: list[int] = []
        for name, i in indices.items():
            local = self._local[name].shards[0]
            leaf = leaves.leaves[i]
            (shard,) = shards_of(leaf)
            local.grad = None
            local.data = shard.detach()
            if gradients[i] is not None and trainable(leaf):
                updated.append(i)
                if shard.numel():
                    local.grad = _own_gradient(gradients[i]).to(shard.dtype)
            pairs.append((local, leaf))

        mesh = next((leaf.mesh for _, leaf in pairs if isinstance(leaf, Sharded)), None)
        device = 0 if mesh is None else local_devices(mesh)[0]
        draws = UpdateDraws(leaves, updated, device, drawn_key())
        with as_one_device(mesh) if mesh is not None else nullcontext():
            with sums_over_shards(leaves, updated):
                self._step_with_state(draws, indices)
            if mesh is not None:
                results = partial(self._equal_results, leaves, indices)
                self._check.compare(mesh, device, results, draws)

        for local, leaf in pairs:
            local.grad = None
            (shard,) = shards_of(leaf)
            is_replaced = local.data_ptr() != shard.data_ptr()  # by `param.data = ...` of the class
            if is_replaced:
                shard.copy_(local.data)
        return params, state

    def _equal_results(self, params: Leaves, indices: Mapping[str, int]) -> list[EqualResult]:
        """Return the parameters, which replicas have equal, and the numbers of their state."""
        results: list[EqualResult] = []
        for name, i in indices.items():
            layout = params.leaves[i].layout
            local = self._local[name].shards[0]
            results.append(EqualResult(name, local.detach(), layout))
            has_elements = local.numel() > 0  # without, a class may not step
            numbers = _numbers_of(self.optimizer.state.get(local, {})) if has_elements else {}
            at_owner = layout.with_spec(P(at=dict(layout.spec.at)))
            keys = ", ".join(map(repr, numbers)) or "the state"
            results.append(EqualResult(f"{keys} of {name}", numbers or None, at_owner))
        return results

    def _run_instance(self, draws: UpdateDraws, indices: Mapping[str, int]) -> None:
        """Call the step of the instance; draws like parameters and state are of their leaves."""
        for name, i in indices.items():
            local = self._local[name].shards[0]
            for x in (local, local.grad, *self.optimizer.state.get(local, {}).values()):
                draws.follow(x, i)
        with draws.seeded():
            self._step_instance()

    def _step_with_state(self, draws: UpdateDraws, indices: Mapping[str, int]) -> None:
        """Call the step of the instance, with its state in the memory of the update."""
        offload = current_offload()
        state = self.optimizer.state
        if offload is None:
            self._run_instance(draws, indices)
            if self.state.memory == "host":
                self._mark_host_state()
            return

        keys: list[tuple[Any, Any]] = []
        for param, entry in state.items():
            keys += [(param, name) for name, x in entry.items() if is_away(x)]
        homes = [state[param][name] for param, name in keys]
        for (param, name), x in zip(keys, fetched(homes, offload), strict=True):
            state[param][name] = x
        self._run_instance(draws, indices)
        results = [state[param][name] for param, name in keys]
        results = written_back(results, homes, offload, in_place=True)
        for (param, name), x in zip(keys, results, strict=True):
            state[param][name] = x
        for entry in state.values():  # what the step has made
            for name, x in entry.items():
                if isinstance(x, Tensor) and x.ndim:
                    entry[name] = stored(x)

    def _mark_host_state(self) -> None:
        """Mark the state that a step on the host has made there as host memory."""
        for entry in self.optimizer.state.values():
            for x in entry.values():
                if isinstance(x, Tensor) and x.ndim and memory_of(x, "cpu") != "host":
                    mark_memory(x, "host")

    def _update(self, grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        after, state = self._step(grads, state, copied(params))
        return differences(params, after, grads), state


def _numbers_of(state: Mapping[Any, Any]) -> dict[Any, float]:
    """Return the numbers in the state of a parameter."""
    numbers = dict[Any, float]()
    for key, x in state.items():
        if isinstance(x, Tensor) and not x.ndim:
            numbers[key] = x.item()
        elif isinstance(x, int | float):
            numbers[key] = x
    return numbers
