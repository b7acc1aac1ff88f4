"""`functionalize`: a module as a pure function of its parameters and buffers.

    apply(params, buffers, *args)    module(*args), with these tensors installed
                                     -> output, new buffers

Each device runs its own copy of the module (see `replica`), as each rank does under torch's DDP.
Parameters stay installed until the step ends, so that a checkpoint inside the forward recomputes
with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from fshard.copying import lazy_copy
from fshard.errors import ModuleError
from fshard.mesh.layout import Axes
from fshard.randomness import key_now
from fshard.transforms.fsdp.lazy_param import WRITES
from fshard.transforms.fsdp.param_runtime import with_unsharded_params
from fshard.transforms.fsdp.units import versions_of
from fshard.transforms.module.batchnorm import synchronise
from fshard.transforms.module.replica import NO_HOOKS, Replicas, Tensors
from fshard.transforms.patterns import Choice, chosen

Apply = Callable[..., tuple[Any, Tensors]]


class ModulePlan(Protocol):
    """A plan by which a module runs in a step."""

    def functionalize(
        self, module: nn.Module, **options: Any
    ) -> tuple[Apply, Tensors, Tensors]: ...


def functionalize(
    module: nn.Module,
    *,
    buffers: Choice = None,
    sync_batchnorm: Axes | None = None,
    plan: ModulePlan | None = None,
) -> tuple[Apply, Tensors, Tensors]:
    """Turn a module into a pure function; return `(apply, params, buffers)`.

    `apply(params, buffers, *args, **kwargs)` returns `(output, new_buffers)` and does not change
    the module. `params` has every parameter by its name, a tied one once; those that do not require
    grad are Parameters that do not either. A penalty in a loss function uses `params`: there the
    module's own parameters are constants. `buffers` has all buffers, not only the persistent ones.
    All are detached and share the module's memory.

    Parameters, buffers and random draws are the state of the function. Everything else on the
    module is private to the device that runs it, as are buffers that a forward registers or that
    are None at first: each device has its own copy of the module, kept from call to call.

    Args:
        module: any module that `copy.deepcopy` copies, in its present state; later only `train()`
            and `eval()` are followed. Of `torch.compile(module)` it is the module itself: compile
            the loss function instead.
        buffers: frozen parameters that the forward updates (a momentum encoder, a codebook): a path
            pattern, several, or a function of the path. They are returned and passed among the
            buffers.
        sync_batchnorm: mesh axes over which BatchNorm in training takes mean and variance; one psum
            of 2 * channels + 1 numbers a layer.
        plan: how layers are sharded in a step, which gets `local=plan.axes`: see
            `fs.tensor_parallel`.

    Two sets of parameters may be used in one loss, but not with a checkpoint in the forward.
    Outside of a training step the copy keeps the parameters of its last recorded call until the
    next one.

    >>> import torch, fshard as fs
    >>> layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    >>> apply, params, buffers = functionalize(layer)
    >>> list(params)
    ['0.weight', '0.bias', '1.weight', '1.bias']
    >>> output, after = apply(params, buffers, torch.ones(4, 3))
    >>> buffers["1.num_batches_tracked"], after["1.num_batches_tracked"]
    (tensor(0), tensor(1))
    """
    options: Any = {"buffers": buffers, "sync_batchnorm": sync_batchnorm}
    if plan is not None:
        return plan.functionalize(module, **options)
    return module_function(module, **options, in_place=False)


def module_function(
    module: nn.Module,
    *,
    buffers: Choice = None,
    sync_batchnorm: Axes | None = None,
    adapt: Callable[[str, nn.Module], Callable[..., Any] | None] = lambda path, module: None,
    in_place: bool,
) -> tuple[Apply, Tensors, Tensors]:
    """Turn a module into a function as `functionalize` does.

    Args:
        module: see `functionalize`.
        buffers: see there.
        sync_batchnorm: see there.
        adapt: returns another forward for the module at a path, None for its own. A backward that
            runs a module again calls that too.
        in_place: run the module itself, by one device. Between steps it has the parameters of the
            first call: see `replace_by_placeholders`.
    """
    module = vars(module).get("_modules", {}).get("_orig_mod", module)  # of torch.compile(module)
    _validate_module(module)
    params = dict(module.named_parameters())
    module_buffers = dict(module.named_buffers())
    for name in _params_declared_as_buffers(params, buffers):
        module_buffers[name] = params.pop(name)
    param_names = frozenset(params)
    buffer_names = frozenset(module_buffers)

    def adapted(path: str, child: nn.Module) -> Callable[..., Any] | None:
        return synchronise(child, sync_batchnorm) or adapt(path, child)

    replicas = Replicas(module, adapted, with_unsharded_params, in_place=in_place)
    title = f"apply of {type(module).__name__}"

    def apply(
        params: Mapping[str, Any], buffers: Mapping[str, Any], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensors]:
        mismatch = (params.keys() ^ param_names) | (buffers.keys() ^ buffer_names)
        if mismatch:
            raise ModuleError(
                f"{title}: params and buffers must have the names that functionalize returned, in "
                f"this order; missing or unknown are {', '.join(sorted(mismatch))}."
            )
        replica = replicas.of_this_device()
        copies = {name: lazy_copy(x) for name, x in buffers.items()}

        # A checkpoint in the forward calls `apply` again inside of a call: that restores `outer`.
        outer = replica.installed
        replica.installed = {**params, **copies}
        replica.install(replica.installed)
        step = _step_of(params)
        if step is not None:
            step.use(replica)
        replica.layers.enter(key_now())

        # In a step the runtime of parameters detects writes at the end.
        versions = versions_of([*params.values()]) if step is None else None
        try:
            output = replica.module(*args, **kwargs)
            after = replica.buffers_after(buffers, copies)
            errors = [f"binds the parameter {name} to another" for name in replica.rebound(params)]
            if versions is not None:
                errors += [f"writes to the parameter {name}" for name in _written(params, versions)]
            for name in sorted(buffer_names):
                if after.get(name) is None:
                    errors.append(f"removes the buffer {name}")
            if errors:
                raise ModuleError(f"{title}: its forward {errors[0]}. {WRITES}")
        finally:
            replica.installed = outer
            # A recorded call keeps its parameters: its backward may run a part again.
            may_run_again = step is not None or torch.is_grad_enabled()
            if outer is not None:
                replica.install(outer)
            elif not may_run_again:
                replica.rest()
        return output, after

    detached_params = {name: _detached(x) for name, x in params.items()}
    detached_buffers = {name: x.detach() for name, x in module_buffers.items()}
    return apply, detached_params, detached_buffers


def _step_of(params: Mapping[str, Any]) -> Any | None:
    """Return the step that parameters belong to; None outside of a training step."""
    for param in params.values():
        step = getattr(param, "step", None)
        if step is not None:
            return step
    return None


def _written(params: Mapping[str, Any], versions: Sequence[int]) -> list[str]:
    """Return the names of the parameters that have another version now."""
    rows = zip(params, versions, versions_of([*params.values()]), strict=True)
    return [name for name, before, after in rows if before != after]


def _detached(param: Tensor) -> Tensor:
    """Return a parameter of the same memory without a graph; a frozen one as a frozen Parameter."""
    if param.requires_grad:
        return param.detach().requires_grad_()
    return nn.Parameter(param.detach(), requires_grad=False)


def _params_declared_as_buffers(params: Mapping[str, Tensor], declared: Choice) -> list[str]:
    """Return the names of the parameters that are declared as buffers.

    Raises if one of them is trained.
    """
    flags = chosen(declared, [*params], "buffers")
    names = [name for name, is_declared in zip(params, flags, strict=True) if is_declared]
    trained = [name for name in names if params[name].requires_grad]
    if trained:
        raise ModuleError(
            f"buffers: {', '.join(trained)} must be frozen, since the forward updates what is "
            "declared as a buffer; got trained parameters. Call requires_grad_(False) on them."
        )
    return names


def _validate_module(module: nn.Module) -> None:
    """Raise if a module cannot be functionalized."""
    title = f"functionalize of {type(module).__name__}"
    tensors = (*module.named_parameters(), *module.named_buffers())
    lazy = [name for name, x in tensors if is_lazy(x)]
    if lazy:
        raise ModuleError(
            f"{title}: {', '.join(lazy)} must have a shape; the module is lazy. Run it once on an "
            "example first: module(example)."
        )
    validate_no_hooks(module)
    scripted: list[str] = []
    for name, child in module.named_modules():
        if isinstance(child, ScriptModule):
            scripted.append(name or "the module")
    if scripted:
        raise ModuleError(
            f"{title}: {', '.join(scripted)} must not be compiled by torch.jit, whose parameters "
            "cannot be exchanged. Give the module before torch.jit.script."
        )


def validate_no_hooks(module: nn.Module) -> None:
    """Raise naming parameters that have gradient hooks, which would not be called."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooked: list[str] = []
    for name, param in module.named_parameters():
        if any(getattr(param, kind, None) for kind in kinds):
            hooked.append(name)
    if hooked:
        raise ModuleError(
            f"{type(module).__name__}: {', '.join(hooked)} must have no gradient hooks. {NO_HOOKS}"
        )
