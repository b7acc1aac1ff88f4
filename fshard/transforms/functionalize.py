"""`functionalize`: any module as a function of its parameters and buffers.

    apply(params, buffers, *args) = module(*args), with these tensors in the place of its own   ->  output, new buffers

Nothing is swapped in the module.  A call borrows a replica of its structure (see `replica`) from a pool, puts the
tensors into it, runs it, and puts the replica back as it was.  So calls may overlap: on virtual devices, which are
threads that take turns inside a forward, or one within the other.  A replica that something still refers to after the
call, as a checkpoint does that will run a block again in backward, is left to it; the pool builds another.

Buffers are lent as copies that share memory until one of them is written to, so a mask of many megabytes costs
nothing, and what a forward does in place is seen in its result alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from traceback import clear_frames
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation  # pyright: ignore[reportPrivateUsage]

from fshard.mesh.spec import Axes
from fshard.transforms.batchnorm import synchronise
from fshard.transforms.deferred import defer, pending
from fshard.transforms.given import Given
from fshard.transforms.holders import alone_among
from fshard.transforms.kept import is_nothing, nothing, slot_of
from fshard.transforms.lent import lent, untouched
from fshard.transforms.randomness import key_now
from fshard.transforms.replica import Blueprint, ModuleError, Replica

Tensors = dict[str, Tensor]
Apply = Callable[..., tuple[Any, Tensors]]


def functionalize(
    module: nn.Module, *, sync_batchnorm: Axes | None = None, deferred_batch_norm: bool = False
) -> tuple[Apply, Tensors, Tensors]:
    """Return a module as a pure function, and what is to be passed to it: `(apply, params, buffers)`.

    `apply(params, buffers, *args, **kwargs)` returns `(output, new_buffers)` and changes nothing, not even the module.
    `params` has every parameter by its name, a tied one once, under the first; those that do not require grad are Parameters
    that say so, and `shard_params` and optimizers leave them as they are.
    `buffers` has all buffers, those that are not saved too.  They are detached and share the module's memory.

    Args:
        module: any module, as it is now; of later changes only `module.train()` and `eval()` are followed.
        sync_batchnorm: the axes along which BatchNorm layers in training take mean and variance over all devices,
            inside `shard_map` and loss functions (one psum of 2 * channels + 1 numbers per layer); outside, on one device, they
            are as they were.
        deferred_batch_norm: whether BatchNorm layers in training put off what they learn until `commit_batch_norm`, once for
            all microbatches of a step; meanwhile the sums are among the buffers.

    In a training step, or where else draws are keyed (`keyed_random`), each layer draws by its own name; elsewhere draws are
    those of the module itself.

    Plain attributes that a forward sets and reads again, numbers and tensors, are among the new buffers as "path.name:kept";
    who reads something else that an earlier call has changed, a list that grows, say, is warned.
    apply does not keep the module alive (but the class of one with parametrizations does, in torch).

    >>> import torch, fshard as fs
    >>> layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    >>> apply, params, buffers = functionalize(layer)
    >>> list(params)
    ['0.weight', '0.bias', '1.weight', '1.bias']
    >>> output, after = apply(params, buffers, torch.ones(4, 3))
    >>> buffers["1.num_batches_tracked"], after["1.num_batches_tracked"]
    (tensor(0), tensor(1))
    """
    begun, params, buffers = in_two_parts(
        module, sync_batchnorm=sync_batchnorm, deferred_batch_norm=deferred_batch_norm
    )

    def apply(
        params: Mapping[str, Any], buffers: Mapping[str, Any], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensors]:
        output, end = begun(params, buffers, *args, **kwargs)
        return output, end()

    return apply, params, buffers


def in_two_parts(
    module: nn.Module, *, sync_batchnorm: Axes | None = None, deferred_batch_norm: bool = False
) -> tuple[Callable[..., tuple[Any, Callable[[], Tensors]]], Tensors, Tensors]:
    """Return what `functionalize` does, but a function that returns the output, and what ends the call.

    That is to be called once, as soon as nobody waits for the output, and returns the new buffers.
    """
    _refuse_unready(module)
    alone, views = alone_among(module)
    if views:
        raise ModuleError(
            f"functionalize of {type(module).__name__}: {', '.join(views)} {'is a view' if len(views) == 1 else 'are views'} "
            "of parameters or buffers, in whose place others will be. Take it in forward: self.weight[0]."
        )
    if deferred_batch_norm and sync_batchnorm is not None:
        raise ModuleError("functionalize: BatchNorm is either synchronised or deferred: give one of these options.")
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    names = {id(x): name for name, x in (buffers | params).items()}
    adapt = defer if deferred_batch_norm else partial(synchronise, axis=sync_batchnorm)
    pool = _Pool(Blueprint(module, names, adapt, alone))
    check = _Check(type(module).__name__, params, buffers, [name for name, _ in module.named_modules()])
    aliases = _aliases(module, names)
    frozen = [name for name, x in params.items() if not x.requires_grad]

    def begun(
        params: Mapping[str, Any], buffers: Mapping[str, Any], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Callable[[], Tensors]]:
        check(params, buffers)
        replica = pool.take()
        try:
            made = buffers.keys() - check.buffers
            kept = {name: buffers[name] for name in made if slot_of(name) is not None}
            copies = {name: None if is_nothing(x) else lent(x) for name, x in buffers.items() if name not in kept}
            new = {name: copies[name] for name in made if name not in kept}
            given = Given(params, frozen, kept)  # which takes what is of parameters out of what is kept
            replica.fill({**given.tensors, **copies})
            _place_new(replica, new)
            if (key := key_now()) is not None:
                replica.layers.enter(key)
            replica.attributes.put(kept)
            output = replica.modules[0][1](*args, **kwargs)
        except BaseException as error:
            if isinstance(error, StopRecomputation):  # a checkpoint that runs apply again has what it wants
                clear_frames(error.__traceback__)  # which would still refer to the replica
            replica.attributes.end()
            pool.give_back(replica)
            raise

        def end() -> Tensors:
            try:
                after = _new_state(replica, aliases, buffers, copies)
                check.after(replica.rebound(given.tensors), given.changed(), after)
                after |= replica.attributes.kept(kept, params.values()) | given.kept()
                for_checkpoints = {name: lent(x) for name, x in given.taken.items()}  # which run a part again
                replica.put(for_checkpoints)
                return after
            finally:
                replica.attributes.end()
                pool.give_back(replica)

        if replica.is_at_rest():
            return output, end
        after = end()  # now: a backward may run a part again, in this replica
        return output, lambda: after

    fixed = {name: nn.Parameter(params[name].detach(), requires_grad=False) for name in frozen}
    sums = pending(module) if deferred_batch_norm else {}
    return begun, {**_detached(params), **fixed}, {**_detached(buffers), **sums}


def _detached(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: x.detach().requires_grad_(x.requires_grad) for name, x in tensors.items()}


class _Pool:
    """The replicas that no call is using."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint
        self._idle: list[Replica] = []

    def take(self) -> Replica:
        """Borrow a replica, in the mode that the module is in."""
        try:
            replica = self._idle.pop()  # not asked first whether there is one: threads
        except IndexError:
            replica = self._blueprint.build()
        self._blueprint.follow(replica)
        return replica

    def give_back(self, replica: Replica) -> None:
        """Empty a replica and keep it, unless somebody else still needs it: he may write, but not to what was returned."""
        if replica.is_at_rest():
            replica.restore()
            self._idle.append(replica)
            return
        for _, own in replica.buffers:
            own.update({key: lent(x) for key, x in own.items() if x is not None})
        replica.attributes.stay(replica.modules)


def _new_state(
    replica: Replica, aliases: Mapping[str, str], given: Mapping[str, Any], copies: Mapping[str, Any]
) -> Tensors:
    """Read the buffers that stand in the modules after a call; those not written to are the given ones."""
    after: dict[str, Any] = {}
    for path, own in replica.buffers:
        for key, x in own.items():
            name = f"{path}.{key}" if path else key
            name = aliases.get(name, name)
            if name not in given:
                if x is not None:
                    after[name] = x
            elif x is not copies[name] or name not in after:  # of two names of one buffer, that which was bound anew
                same = x is copies[name] and (x is None or untouched(x))
                after[name] = given[name] if same else nothing() if x is None else x
    return after


def _place_new(replica: Replica, made: Mapping[str, Any]) -> None:
    """Put buffers that an earlier forward has made into the modules that made them."""
    if made:
        modules = dict(replica.modules)
        for name, x in made.items():
            path, _, key = name.rpartition(".")
            vars(modules[path])["_buffers"][key] = x


def _aliases(module: nn.Module, names: Mapping[int, str]) -> dict[str, str]:
    """Return for every further name of a tied buffer the first one."""
    every = {name: names[id(x)] for name, x in module.named_buffers(remove_duplicate=False)}
    return {name: first for name, first in every.items() if name != first}


# -- refusals -----------------------------------------------------------------------------------------------------


class _Check:
    """Compares what apply is given with what the module has."""

    def __init__(self, title: str, params: Collection[str], buffers: Collection[str], modules: Collection[str]) -> None:
        self.params, self.buffers = frozenset(params), frozenset(buffers)
        self._title, self._modules = title, frozenset(modules)

    def __call__(self, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
        """Raise if a name is missing, or is none of the module's; a forward may have made further buffers."""
        if params.keys() == self.params and buffers.keys() >= self.buffers:
            made = buffers.keys() - self.buffers
            if not made or all(name.rpartition(".")[0] in self._modules and name not in self.params for name in made):
                return
        wrong = [f'params["{name}"] is missing' for name in sorted(self.params - params.keys())]
        wrong += [f'buffers["{name}"] is missing' for name in sorted(self.buffers - buffers.keys())]
        wrong += [f'params["{name}"] is no parameter of it' for name in sorted(params.keys() - self.params)]
        unknown = (name for name in buffers.keys() - self.buffers if name.rpartition(".")[0] not in self._modules)
        wrong += [f'buffers["{name}"] is no buffer of it' for name in sorted(unknown)]
        raise ModuleError(
            f"apply of {self._title}: {'; '.join(wrong)}. Pass trees with the names that functionalize returned, "
            "(params, buffers) in this order."
        )

    def after(self, rebound: Sequence[str], changed: Sequence[str], buffers: Mapping[str, Any]) -> None:
        """Raise if a forward has bound parameters to others, has written to them, or has deleted buffers."""
        if not rebound and not changed and buffers.keys() >= self.buffers:
            return
        wrong = [f"binds the parameter {name} to another" for name in rebound]
        wrong += [f"writes to the parameter {name} in place" for name in changed]
        wrong += [f"deletes the buffer {name}" for name in sorted(self.buffers - buffers.keys())]
        raise ModuleError(
            f"apply of {self._title}: its forward {'; '.join(wrong)}. Trained parameters are the optimizer's; what is written "
            "to a frozen one, requires_grad_(False) before, is kept, but not in stages. A buffer may be set to None."
        )


def _refuse_unready(module: nn.Module) -> None:
    """Raise naming everything that cannot be swapped."""
    lazy = [name for name, x in (*module.named_parameters(), *module.named_buffers()) if is_lazy(x)]
    if lazy:
        raise ModuleError(
            f"functionalize of {type(module).__name__}: {', '.join(lazy)} {'has' if len(lazy) == 1 else 'have'} no shape yet, "
            "since the module is lazy. Run it once on an example first: module(example)."
        )
    refuse_hooks(module)
    scripted = [name or "the module itself" for name, part in module.named_modules() if isinstance(part, ScriptModule)]
    if scripted:
        raise ModuleError(
            f"functionalize of {type(module).__name__}: {', '.join(scripted)} is compiled by torch.jit, which keeps parameters "
            "where nobody can swap them. Give it the module before torch.jit.script."
        )


def refuse_hooks(module: nn.Module) -> None:
    """Raise naming parameters that have hooks: a gradient is not made at them, so nobody would call these."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooked = [name for name, x in module.named_parameters() if any(getattr(x, kind, None) for kind in kinds)]
    if hooked:
        raise ModuleError(
            f"{type(module).__name__}: {', '.join(hooked)} has hooks for its gradient, which nobody would call: trained "
            "are pieces of it. Change gradients in the optimizer: fs.optim.chain takes any function of them."
        )
