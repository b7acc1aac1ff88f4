"""A model in the layouts of a plugin: what is common to models in a loop and in stages."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import inf
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys  # pyright: ignore[reportPrivateUsage]

from fshard.booster.full_state import full_leaves, put
from fshard.booster.plugins import Plugin
from fshard.booster.slots import ModuleSlots
from fshard.checkpoint.names import ShardedObject, as_leaf
from fshard.comm.replicas import ReplicaGroup
from fshard.copying import copied
from fshard.errors import ModuleError, ScopeError
from fshard.mesh.layout import Mesh, PyTree
from fshard.mesh.layout.kinds import compute_device
from fshard.mesh.spmd.global_inputs import compare_inputs, samples_of
from fshard.mesh.spmd.run import is_outside, resolve_mesh, run_on_devices
from fshard.optim.torch_optim.instances import OptimizerSource
from fshard.parallelism.build import shard_full, shard_in_stages
from fshard.randomness import drawn_key, keyed_random
from fshard.tensor.plan import Plan
from fshard.transforms.fsdp.lazy_param import LazyParam
from fshard.transforms.module.lazy import draw
from fshard.transforms.module.replica import Placeholder, replace_by_placeholders
from fshard.transforms.stages.plan import has_stages


def shard_model(
    plugin: Plugin,
    model: nn.Module,
    source: OptimizerSource,
    *,
    parts: Sequence[tuple[nn.Module, Plan | None]] | None = None,
    in_place: bool = False,
) -> tuple[Any, PyTree, PyTree]:
    """Return a model as a function, its sharded parameters, and its buffers; each a list for stages.

    Lazy layers are built one at a time.

    Args:
        plugin: with a mesh.
        model: with full parameters, or lazy layers.
        source: decides which parameters are trained.
        parts: of `plugin.split`, where the caller needs them too.
        in_place: True for a model that runs itself: it gives up the memory of its parameters.
    """
    mesh = plugin.default_mesh()
    pairs = plugin.split(model) if parts is None else parts
    options: Any = {
        "mesh": mesh,
        "freeze": source.freeze_untrained,
        "memory": plugin.param_memory(),
        "in_place": in_place,
    }
    if plugin.in_stages():
        where = stages_of(plugin.gradient_options())
        run, params, buffers = shard_in_stages(pairs, plugin.rules, **{**options, **where})
        trees = list[PyTree]()
        for is_here, *pair in zip(has_stages(**where), params, buffers, strict=True):
            if is_here:
                trees += pair
    else:
        synchronised = plugin.replica_axes() if plugin.sync_batchnorm else ()
        run, params, buffers = shard_full(
            model,
            pairs[0][1],
            plugin.rules_of,
            buffers=plugin.buffers,
            sync_batchnorm=synchronised or None,
            **options,
        )
        params = plugin.placed("parameters", params)
        # On an abstract mesh nothing is drawn: its tensors have no values.
        trees = [params, buffers] if mesh.runtime != "abstract" else []

    tensors_of_model = dict([*model.named_parameters(), *model.named_buffers()])
    compare_inputs("boost", mesh, samples_of(tensors_of_model))
    # Again: another device of a virtual mesh may have boosted it while this one waited.
    validate_not_boosted("boost", model)
    arrays: dict[str, Any] = {name: x for tree in trees for name, x in tree.items()}
    draw(model, plugin.seed, arrays, lambda name, x: put(as_leaf(arrays[name]), x))
    if in_place:
        stages = [stage for stage, _ in pairs]
        replace_by_placeholders([model, *stages], compute_device(mesh))
    return run, params, buffers


def stages_of(options: Mapping[str, Any]) -> Any:
    """Return the options of a step that decide which device has which stages."""
    return {name: options[name] for name in ("mesh", "schedule", "axis")}


def _entries(arrays: Mapping[str, Any], tree: PyTree) -> dict[str, Any]:
    """Return the arrays that have the names of a tree."""
    return {name: x for name, x in arrays.items() if name in tree}


def _of_shape(name: str, value: Any, shard: Tensor) -> Tensor:
    """Return the value in the place of a shard; raise if it has another shape."""
    if isinstance(value, Tensor) and value.shape == shard.shape:
        return value
    got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    raise ModuleError(
        f"parameters: the shard of {name} must be a tensor of shape {tuple(shard.shape)}; "
        f"got {got}."
    )


def refusing(kind: type[Exception], text: str) -> Any:
    """Return a method that raises."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise kind(text)

    return refuse


def validate_not_boosted(caller: str, model: nn.Module) -> None:
    """Raise if the parameters of a model are sharded already."""
    is_boosted = isinstance(model, BoostedModel)
    for x in () if is_boosted else model.parameters():
        is_boosted = is_boosted or isinstance(x, Placeholder | LazyParam)
    if is_boosted:
        raise ModuleError(
            f"{caller}: the model has been boosted already, perhaps by another device. Each makes "
            "its own, inside of main."
        )


def validate_inside(mesh: Mesh) -> None:
    """Raise unless the caller is one device of the mesh."""
    if is_outside(mesh):
        raise ScopeError(
            f"a loop must run as one device of {mesh}. Call it inside of fs.run(main, mesh=mesh), "
            "or under torchrun."
        )


COMPILE_INSIDE = (
    "torch.compile(model) of a boosted model has no effect. Compile it in place, model.compile(), "
    "or its blocks."
)
"""The error of a boosted model that is called inside of a compiled one."""


class BoostedModel(nn.Module, ShardedObject):
    """A model whose parameters are sharded by its plugin.

    It is called as before, on this device's part of the batch. `module` is the module that was
    boosted, and it is the one that runs: hooks, attributes and modes set there take effect. Between
    steps its parameters have no memory; `unwrap()` returns a copy with full parameters.

    Args:
        module: runs in place, and the memory of its parameters is freed.
        plugin: with its mesh.
        source: which parameters are trained.
    """

    params: PyTree  # in their layouts

    def __init__(self, module: nn.Module, plugin: Plugin, source: OptimizerSource) -> None:
        super().__init__()
        self.module = module
        self.mesh = plugin.default_mesh()
        self.is_reproducible = plugin.reproducible
        self.largest_loss = inf  # number of the dtype of the last losses, which limits their scale
        self.replicas = plugin.replicas()
        # What decides the random draws: see `draws`. A checkpoint has them.
        self._seed = plugin.seed
        self._steps = 0
        self._forwards = 0  # of the present step, with gradients
        self._others = 0  # forwards without gradients, and other draws
        validate_inside(self.mesh)
        self.plugin_parts = plugin.split(module)
        self.function, self.params, self.module_buffers = shard_model(
            plugin, module, source, parts=self.plugin_parts, in_place=True
        )
        is_staged = isinstance(self.module_buffers, list)
        trees = self.module_buffers if is_staged else [self.module_buffers]
        buffer_names = {name for tree in trees for name in tree}
        self.slots = ModuleSlots(module, buffer_names, has_copies=is_staged)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = vars(self).get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            raise AttributeError(
                f"{error}. That of the module is model.module.{name}; a method that runs the model "
                f"is called on a copy with full parameters: model.unwrap().{name}."
            ) from None

    def trees(self) -> list[PyTree]:
        """Return the trees of parameters and buffers by name, one of each or one of each stage.

        Buffers have what the loop has written to them.
        """
        return [*self._param_trees(), *self.buffer_trees()]

    def _param_trees(self) -> list[PyTree]:
        return self.params if isinstance(self.params, list) else [self.params]

    def buffer_trees(self) -> list[PyTree]:
        """Return the trees of buffers by name, with what the loop has written to them."""
        raise NotImplementedError

    def draws(self, *, grad: bool) -> AbstractContextManager[None]:
        """Return the context of the next forward's random draws.

        The first forward of a step draws as a functional step does; those without gradients do not change this.
        """
        if not grad:
            self._others += 1
            return keyed_random(self._seed, self._steps, "no_grad", self._others)
        self._forwards += 1
        return keyed_random(self._seed, self._steps, self._forwards - 1)

    @contextmanager
    def draws_of_update(self) -> Generator[None]:
        """Seed the draws of the optimizer's step as `Booster.step` does.

        That is after the key of the gradient, which has ended the step: its number is one less.
        """
        with keyed_random(self._seed, self._steps - 1, 0):
            drawn_key()
            yield

    def combine(self, step: Callable[[PyTree], tuple[PyTree, PyTree]]) -> tuple[PyTree, PyTree]:
        """Return the parameters after an optimizer's step, and its state.

        The parameters are combined with those of other replicas.
        """
        replicas = cast(ReplicaGroup, self.replicas)
        params = self.params
        step_here = partial(step, params)

        def run(_: object) -> tuple[PyTree, PyTree, PyTree]:
            return replicas.run(params, None, self._steps, step_here)

        ((params_after, _, state),) = run_on_devices(resolve_mesh(self.mesh), run)
        return params_after, state

    def compile(self, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compile the module that was boosted, as `torch.nn.Module.compile` does."""
        self.module.compile(*args, **kwargs)

    @contextmanager
    def local_shards(self) -> Generator[dict[str, Tensor]]:
        """Return this device's shards of the parameters by name, to read and write.

        Those that the caller replaces are written at the end.
        """
        validate_inside(self.mesh)
        self.slots.validate_params()
        self.validate_between_steps()
        shards = self._named_shards()
        entries = dict(shards)
        self._others += 1
        draws = keyed_random(self._seed, self._steps, "parameters", self._others)
        with torch.no_grad(), draws:
            yield entries
            if entries.keys() != shards.keys():
                names = ", ".join(sorted(entries.keys() ^ shards.keys()))
                raise ModuleError(
                    "parameters: the names must stay those of the model; added or removed are "
                    f"{names}."
                )
            for name, shard in shards.items():
                if entries[name] is not shard:
                    shard.copy_(_of_shape(name, entries[name], shard))

    def _named_shards(self) -> dict[str, Tensor]:
        """Return this device's shards of the parameters by name, a tied one once."""
        shards = dict[str, Tensor]()
        seen = set[int]()
        for tree, is_here in zip(self._param_trees(), self.stages_here(), strict=True):
            if not is_here:
                continue
            for name, x in tree.items():
                if id(x) not in seen:
                    seen.add(id(x))
                    (shards[name],) = x.shards
        return shards

    def stages_here(self) -> Sequence[bool]:
        """Return, for each tree of parameters, True if this device has them."""
        return [True]

    def validate_between_steps(self) -> None:
        """Raise if the model has gradients, or has been called since the last step."""
        if self.slots.gradients.exist:
            raise ModuleError(
                "parameters: the model must have no gradients, which are of the values before. "
                "Enter it after optimizer.step() or optimizer.zero_grad()."
            )

    def end_step(self) -> None:
        """Count a step of the optimizer."""
        self._steps += 1
        self._forwards = 0

    def unwrap(self) -> nn.Module | None:
        """Return a copy of the module with full parameters; all devices must call it.

        It is None on processes outside of the mesh.
        """
        self.slots.validate_params()
        if not self.mesh.is_member:
            return None
        tree = self._arrays()
        if self.replicas is not None:
            tree = self.replicas.mean(tree)
        values = {leaf.name: leaf.value for leaf in full_leaves(tree)}
        full = dict[int, Any]()
        for name, x in self.module.named_buffers():
            full[id(x)] = values.get(name, x).clone()
        for name, x in self.module.named_parameters():
            full[id(x)] = nn.Parameter(values[name], requires_grad=x.requires_grad)
        return copied(self.module, full)

    def set_buffers(self, trees: list[PyTree]) -> None:
        """Replace the trees of buffers; they are equal on all devices."""
        raise NotImplementedError

    def first_names(self) -> dict[str, str]:
        """Return the first name of each parameter and buffer, by all of its names."""
        module = self.module
        tensors = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        first_by_tensor = dict[int, str]()
        return {name: first_by_tensor.setdefault(id(x), name) for name, x in tensors}

    def sharded_state(self) -> dict[str, Any]:
        """Return what `fs.save` stores: shards by the names of `state_dict`.

        Those of replicas have a first dim, of the replicas.
        """
        state = self._local_state()
        return state if self.replicas is None else self.replicas.joined([state])

    def _local_state(self) -> dict[str, Any]:
        self.slots.validate_params()
        names = self.first_names()
        arrays = self._arrays()
        state = dict(self.module.state_dict(keep_vars=True))
        for key in state.keys() & names.keys():
            state[key] = arrays[names[key]]
        return state

    def _arrays(self) -> dict[str, Any]:
        """Return all parameters and buffers by name."""
        return {name: x for tree in self.trees() for name, x in tree.items()}

    def load_sharded_state(self, state: Mapping[str, Any]) -> None:
        """Use arrays of `sharded_state` that others have written to, and extra state of modules."""
        first = self.first_names()
        arrays = {first[key]: x for key, x in state.items() if key in first}
        if self.replicas is not None:
            arrays = self.replicas.local(arrays, self.mesh)
        self.set_buffers([{**tree, **_entries(arrays, tree)} for tree in self.buffer_trees()])
        for key in state.keys() - first.keys():
            owner, _, _ = key.rpartition(".")
            self.module.get_submodule(owner).set_extra_state(state[key])

    def state_dict(self, **options: Any) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return full parameters and buffers, as the module's method does.

        All devices must call it. On processes outside of the mesh values are None.
        """
        module = self.unwrap()
        if module is None:
            return dict.fromkeys(self._local_state())
        return module.state_dict(**options)

    def load_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> Any:
        """Load full parameters and buffers, as the module's method does.

        All devices must call it, with equal ones. A copy of the module loads them first: so names,
        shapes, hooks and extra state mean what they mean to the module.
        """
        module = self.unwrap()
        if module is None:  # outside of the mesh
            return _IncompatibleKeys([], [])
        arrays = self._local_state()
        differences = module.load_state_dict(state_dict, strict=strict)
        values = module.state_dict()
        names = self.first_names()
        loaded = dict(values)
        for key in values.keys() & names.keys():
            put(as_leaf(arrays[key]), values[key])
            if self.replicas is None:
                loaded[key] = arrays[key]
        self.load_sharded_state(loaded)
        return differences

    _apply = refusing(
        ModuleError, "a boosted model is sharded. Move or convert it before it is boosted."
    )
    __deepcopy__ = refusing(
        ModuleError, "a boosted model is sharded: model.unwrap() is a copy with full parameters."
    )
