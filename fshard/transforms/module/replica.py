"""`Replica`: the module that one device runs, with tensors installed in its slots.

    functionalize   each device runs a copy, made by `copy.deepcopy` with registered tensors on the
                    meta device
    Booster         the device runs the module that it was given

A slot is an entry of some module's `_parameters` or `_buffers`; a tied tensor has several. All else
on the module is private to the device and persists from call to call: nothing is reset, averaged or
watched.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fshard.copying import copied, lazy_copy, untouched
from fshard.errors import ModuleError
from fshard.mesh.layout.counting import without_counters
from fshard.mesh.spmd.scope import here
from fshard.transforms.module.compiled import Unsharding
from fshard.transforms.reproducible.layer_keys import Layers

Tensors = dict[str, Tensor]
Names = dict[str, str]
"""The names of tensors by the keys of their slots in one module."""


class ModuleSlot(NamedTuple):
    """An entry of a module's `_parameters` or `_buffers`, and the name of its tensor."""

    entries: dict[str, Any]
    key: str
    name: str


class Replica:
    """A module whose registered tensors are exchanged for those of a call.

    Args:
        module: the module to run.
        names: of each of its modules, the names of the tensors in its `_parameters` and `_buffers`,
            by their keys.
        adapt: returns another forward for a path and its module, None for its own.
        unsharding: `with_unsharded_params`, for compiled modules.

    Between steps the slots of parameters hold the tensors that they had before the first call: see
    `replace_by_placeholders`.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[tuple[Names, Names]],
        adapt: Callable[[str, nn.Module], Callable[..., Any] | None],
        unsharding: Unsharding,
    ) -> None:
        self.module = module
        self.modules = dict(module.named_modules())
        children: list[Any] = [*self.modules.values()]
        self._params: list[ModuleSlot] = []
        self._buffers: list[ModuleSlot] = []
        for child, (param_names, buffer_names) in zip(children, names, strict=True):
            self._params += [ModuleSlot(child._parameters, *item) for item in param_names.items()]
            self._buffers += [ModuleSlot(child._buffers, *item) for item in buffer_names.items()]
        self._recurrent: list[Any] = [layer for layer in children if isinstance(layer, nn.RNNBase)]
        self.layers = Layers(self.modules.items(), adapt, unsharding)
        self._params_between_steps: list[Any] | None = None
        self._last: Mapping[str, Any] = {}  # the tensors that were installed last
        self.installed: Mapping[str, Any] | None = None  # while a call runs

    def install(self, tensors: Mapping[str, Any]) -> None:
        """Put tensors into their slots."""
        if self._params_between_steps is None:
            self._params_between_steps = [entries[key] for entries, key, _ in self._params]
        for entries, key, name in (*self._params, *self._buffers):
            entries[key] = tensors[name]
        self._last = tensors
        for layer in self._recurrent:
            layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]

    def buffers_after(self, before: Mapping[str, Any], installed: Mapping[str, Any]) -> Tensors:
        """Return the buffers after a call; those not written to are the ones before it.

        Copies of them are installed for a recomputation in the backward, so that it does not count
        twice.
        """
        after: Tensors = {}
        declared = [slot for slot in self._params if slot.name in before]
        slots = [*self._buffers, *declared]
        for entries, key, name in slots:
            buffer = entries.get(key)
            if buffer is None:
                continue
            if buffer is not installed[name]:
                after[name] = buffer  # of two slots of one name, this one was rebound
            elif name not in after:
                after[name] = before[name] if untouched(buffer) else buffer
        for entries, key, name in slots:
            entries[key] = lazy_copy(after.get(name))
        return after

    def rebound(self, params: Mapping[str, Any]) -> list[str]:
        """Return the parameters that a call has bound to something else."""
        names: list[str] = []
        for entries, key, name in self._params:
            if name in params and entries.get(key) is not params[name]:
                names.append(name)
        return names

    def rest(self) -> None:
        """Take the parameters of the last call out of the module."""
        last = self._last
        self._last = {}
        if self._params_between_steps is not None:
            for slot, param in zip(self._params, self._params_between_steps, strict=True):
                bound = slot.entries.get(slot.key)
                is_param = bound is None or isinstance(bound, nn.Parameter)
                is_of_caller = is_param and bound is not last.get(slot.name)
                # A parameter that a loop has bound stays, and the next call of a boosted model
                # raises.
                if not is_of_caller:
                    slot.entries[slot.key] = param
        for layer in self._recurrent:
            _refresh_flat_weights(layer)
        self.layers.leave()


def slot_names(module: nn.Module) -> list[tuple[Names, Names]]:
    """Return, for each module inside, the names of its parameters and buffers by key.

    Tied ones have their first name.
    """
    first_names: dict[int, str] = {}
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        first_names.setdefault(id(x), name)
    names: list[tuple[Names, Names]] = []
    children: list[Any] = [*module.modules()]
    for child in children:
        param_names = _names_by_key(child._parameters, first_names)
        buffer_names = _names_by_key(child._buffers, first_names)
        names.append((param_names, buffer_names))
    return names


def _names_by_key(entries: Mapping[str, Any], names: Mapping[int, str]) -> Names:
    return {key: names[id(x)] for key, x in entries.items() if x is not None}


def replace_by_placeholders(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Replace the modules' own parameters by placeholders of the same shapes and dtypes on a device.

    Tied parameters stay tied.
    """
    children: dict[int, Any] = {}  # each once
    for module in modules:
        children.update({id(child): child for child in module.modules()})
    placeholders: dict[int, Placeholder] = {}
    params: list[Tensor] = []  # all stay alive until the end, or two could have one id
    for child in children.values():
        for key, param in child._parameters.items():
            if param is None:
                continue
            params.append(param)
            placeholder = placeholders.get(id(param))
            if placeholder is None:
                placeholder = _placeholder(param, device)
                placeholder.slot = (child._parameters, key)
                placeholders[id(param)] = placeholder
            child._parameters[key] = placeholder
    for child in children.values():
        if isinstance(child, nn.RNNBase):
            _refresh_flat_weights(child)


def _refresh_flat_weights(layer: Any) -> None:
    """Let a recurrent layer's list of weights have its parameters.

    Those of a parametrization are computed in a call.
    """
    layer._flat_weights = [layer._parameters.get(name) for name in layer._flat_weights_names]


_NO_VALUES = (
    "parameters of a boosted model have no values between steps. Call the first value that boost "
    "returned, not the module that was boosted: model, optimizer, *_ = booster.boost(model, "
    "optimizer). model.unwrap() is a copy with values, also to call methods of: "
    "model.unwrap().generate(...). Write them before boost, by model.load_state_dict, or their "
    "shards, as for clamping or an average: with booster.parameters(model) as shards."
)
_NO_WRITES = (
    "parameters of a boosted model have no values between steps, so a write would be lost. Write "
    "their shards, as for clamping or an average: with booster.parameters(model) as shards: ...; "
    "or full values: model.load_state_dict(state). model is the first value that boost returned."
)
TRAINED_IS_FIXED = (
    "requires_grad of a parameter in a training step is that which it had before functionalize or "
    "boost; a change would have no effect. Freeze and unfreeze before, or boost again from "
    "model.unwrap() with a new optimizer."
)
NO_HOOKS = (
    "Gradient hooks of parameters would not be called, since gradients are sharded. Change "
    "gradients in the optimizer: fs.optim.chain takes any function of them. Hooks of modules are "
    "called."
)

NO_GRADS = (
    "gradients of a boosted model are sharded, so its parameters have no .grad. Clip them by "
    "booster.clip_grad_norm(optimizer, max_norm), drop all by optimizer.zero_grad(); "
    "optimizer.reduce_gradients() returns them, as sharded arrays."
)


@dataclass
class GradientState:
    """The state of a model's gradients: they exist from a backward to the optimizer's step."""

    exist: bool = False


_requires_grad: Any = cast("Any", Tensor).requires_grad
_data: Any = cast("Any", Tensor).data


class Placeholder(nn.Parameter):
    """A parameter without values between the steps of a boosted model.

    Shape and dtype are those before, the device is that of the parameters in a step, wherever their
    shards are stored. The optimizer's groups hold it in a step too, while the module has the
    parameters of the step in its slots.
    """

    slot: tuple[dict[str, Any], str] | None = None  # None of a detached one
    gradients = GradientState()  # of its model

    @property
    def grad(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """None; raises while there are gradients, which are sharded."""
        if self.gradients.exist and self.requires_grad:
            raise ModuleError(NO_GRADS)
        return None

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if grad is not None or self.gradients.exist:
            raise ModuleError(NO_GRADS)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.gradients.exist:
            raise ModuleError(NO_GRADS)

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """One without a gradient; to set it raises."""
        return _data.__get__(self)

    @data.setter
    def data(self, data: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise ModuleError(_NO_WRITES)

    @property
    def requires_grad(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if it is trained."""
        return _requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        if self.slot is not None and requires_grad != self.requires_grad:
            raise ModuleError(TRAINED_IS_FIXED)
        _requires_grad.__set__(self, requires_grad)

    def requires_grad_(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, requires_grad: bool = True
    ) -> Placeholder:
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ModuleError(NO_HOOKS)

    register_post_accumulate_grad_hook = register_hook

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # by `state_dict`
            with torch.inference_mode(mode=False):  # the first call of stages may be in it
                return _placeholder(args[0], args[0].device)
        if func._schema.is_mutable:
            raise ModuleError(_NO_WRITES)
        raise ModuleError(_NO_VALUES)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModuleError(_NO_VALUES)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Placeholder({str(self.dtype).removeprefix('torch.')}{list(self.shape)})"


def _placeholder(x: Tensor, device: torch.device) -> Placeholder:
    element = torch.zeros((), dtype=x.dtype, device=device)
    return Placeholder(element.expand(x.shape), requires_grad=x.requires_grad)


class Replicas:
    """One replica of a module per device, made when the device first needs it.

    Args:
        module: the module, in its present state; later only `train()` and `eval()` are followed.
        adapt, unsharding: see `Replica`.
        in_place: the module itself is run, by a single device.
    """

    def __init__(
        self,
        module: nn.Module,
        adapt: Callable[[str, nn.Module], Callable[..., Any] | None],
        unsharding: Unsharding,
        *,
        in_place: bool,
    ) -> None:
        self._names = slot_names(module)
        self._adapt = adapt
        self._unsharding = unsharding
        self._original = weakref.ref(module)
        self._replicas: dict[int | None, Replica] = {}
        self._template = None if in_place else copy_on_meta(module)
        if in_place:
            self._replicas[None] = Replica(module, self._names, adapt, unsharding)

    def of_this_device(self) -> Replica:
        """Return the calling device's replica, in the mode that the module is in."""
        if self._template is None:
            return self._replicas[None]
        scope = here()
        device = None if scope is None else scope.device
        replica = self._replicas.get(device)
        if replica is None:
            with without_counters():  # its tensors are on the meta device
                module = copy.deepcopy(self._template)
            replica = Replica(module, self._names, self._adapt, self._unsharding)
            self._replicas[device] = replica
        original = self._original()
        if original is not None:
            for source, child in zip(original.modules(), replica.modules.values(), strict=False):
                child.training = source.training
        return replica


def copy_on_meta(module: nn.Module) -> nn.Module:
    """Copy a module with its registered tensors on the meta device."""
    meta: dict[int, Any] = {id(x): torch.empty_like(x, device="meta") for x in module.buffers()}
    for param in module.parameters():
        described = torch.empty_like(param, device="meta")
        meta[id(param)] = nn.Parameter(described, requires_grad=param.requires_grad)
    return copied(module, meta)
