"""`value_and_grad`: the gradient of a loss function of the full model, or of stages.

    value_and_grad(loss_fn, ...)               ─> `ModelProgram` ─┐
    value_and_grad(stages, ..., schedule=)     ─> `staged`   ─┴─> (params, batch) ─> loss, gradients

`train_step` and `evaluate` are built on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.nn import Module, ModuleList

from fshard.mesh.layout import P, PyTree, flatten, require_mesh
from fshard.pipeline.schedule.schedule import Schedule
from fshard.transforms.gradient import GradientFunction, ModelProgram
from fshard.transforms.options import Options, StepOptions, takes_options
from fshard.uncompiled import uncompiled


@uncompiled
@takes_options(Options, until="backward")
def value_and_grad(loss_fn: Any, options: Options) -> GradientFunction:
    """Return a function of (params, batch) that gives the mean loss over the entire batch and its gradient.

    Args:
        loss_fn: `loss_fn(params, batch)` of one device: the mean loss over its samples, or the loss
            of each; with `has_aux` or `aux`, a pair of that and a tree of metrics. With a schedule,
            the stages: see `train_step`.

    {options}

    The function also takes `scale=`: gradients are then those of the loss times that, which
    `optim.loss_scaled` needs: `gradient(params, batch, scale=opt.loss_scale(state))`.

    Loss and gradient may be differentiated by params and batch: within a transform of torch.func
    (`fs.array.lift`), and by autograd where they require grad. Then the loss function must return
    the loss alone, and there are no stages.

    The loss is a tensor, equal on all devices; a gradient is None where no device has used the
    parameter. loss_fn may call collectives over any axis, and needs no `fs.pvary`: every value in
    it is varying. If it does so over an axis that does not shard the batch, to use different parts
    of the model on different devices, the loss is the mean over that axis too. In reproducible mode
    it may not call collectives over the batch's axes.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.tensor([1.0, 2.0])}, fs.fsdp("data"), mesh=mesh)
    >>> def loss_fn(params, batch):
    ...     return (params["w"] * batch).sum(1).mean()
    >>> gradient = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))
    >>> loss, grads = gradient(params, torch.ones(4, 2))
    >>> loss, fs.typeof(grads["w"]), fs.unshard(grads["w"])
    (tensor(3.), f32[2]{flat:data}, tensor([1., 1.]))

    Each device along "model" multiplies by its rows of w:

    >>> mesh = fs.make_mesh({"data": 2, "model": 2})
    >>> def loss_fn(w, x):
    ...     index, n = fs.axis_index("model"), fs.axis_size("model")
    ...     return fs.psum(x.chunk(n, 1)[index] @ w.chunk(n)[index], "model").square().mean()
    >>> w = fs.shard_params(torch.tensor([1.0, 2.0]), P("model"), mesh=mesh)
    >>> loss, grad = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))(w, torch.ones(4, 2))
    >>> loss, fs.typeof(grad), fs.unshard(grad)
    (tensor(9.), f32[2@model], tensor([6., 6.]))

    The same, where each device gets its rows only, and so does its gradient:

    >>> def loss_fn(w, x):
    ...     rows = x.chunk(fs.axis_size("model"), 1)[fs.axis_index("model")]
    ...     return fs.psum(rows @ w, "model").square().mean()
    >>> gradient = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), local="model")
    >>> loss, grad = gradient(w, torch.ones(4, 2))
    >>> loss, fs.typeof(grad), fs.unshard(grad)
    (tensor(9.), f32[2@model], tensor([6., 6.]))

    With a schedule, parameters and gradients are lists with one tree per stage:

    >>> mesh = fs.make_mesh({"pipe": 2, "data": 2})
    >>> schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    >>> stages = [torch.mul] * 2
    >>> params = [torch.tensor(2.0), torch.tensor(3.0)]
    >>> params = fs.shard_stages(params, mesh=mesh, schedule=schedule)
    >>> options = {"mesh": mesh, "batch": P("data"), "schedule": schedule}
    >>> gradient = fs.value_and_grad(stages, loss=lambda y, x: y.mean(), **options)
    >>> loss, grads = gradient(params, torch.arange(4.0))
    >>> opt = fs.optim.sgd(1.0)
    >>> updates, state = opt.update(grads, opt.init(params), params)
    >>> loss, fs.unshard(grads), fs.unshard(fs.optim.apply_updates(params, updates))
    (tensor(9.), [tensor(4.5000), tensor(3.)], [tensor(-2.5000), tensor(0.)])
    """
    return gradient_of("value_and_grad", loss_fn, options)


@uncompiled
@takes_options(Options, until="backward")
def grad(loss_fn: Any, options: Options) -> Callable[..., PyTree]:
    """Return a function of (params, batch) that gives the gradient of the mean loss.

    Its options are those of `value_and_grad`.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> w = fs.device_put(torch.tensor(3.0), fs.Layout(mesh))
    >>> gradient = fs.grad(lambda w, x: (w * x).mean(), mesh=mesh, batch=P("data"))
    >>> fs.unshard(gradient(w, torch.arange(4.0)))
    tensor(1.5000)
    """
    gradient = gradient_of("grad", loss_fn, options)
    return lambda params, *inputs, scale=None: gradient(params, *inputs, scale=scale)[1]


def gradient_of(
    caller: str,
    function: Any,
    options: Options,
    *,
    backward: bool = True,
    in_place: bool = False,
) -> GradientFunction:
    """Return the gradient of a loss function, or of stages.

    Args:
        caller: the function that was called, for messages.
        function: the loss function, or the stages.
        options: of the caller.
        backward: False takes no gradient.
        in_place: True if stages may write to their buffers.
    """
    validate_scheduled(caller, function, options.schedule)
    options = replace(options, mesh=require_mesh(caller, options.mesh))
    _validate_axes(caller, options)
    if options.schedule is None:
        step_options = StepOptions.of(options, function, caller=caller, backward=backward)
        return GradientFunction(step_options, options.mesh, options.batch, ModelProgram())

    from fshard.transforms.stages.staged import staged  # most programs have no stages

    return staged(caller, function, options, backward=backward, in_place=in_place)


def _validate_axes(caller: str, options: Options) -> None:
    """Raise unless the axes of the batch and the local ones are those of the mesh."""
    if options.batch is None or isinstance(options.batch, str):
        raise TypeError(
            f"{caller}: batch must be a P, or a prefix tree of Ps; got {options.batch!r}. "
            'Write batch=P("data"), or P() for none.'
        )
    axes = dict[str, None]()  # each once, in order
    for spec in flatten(options.batch)[0]:
        if isinstance(spec, P):
            axes |= dict.fromkeys(spec.axes)
    options.mesh.check_axes(tuple(axes), f"{caller}(batch=)")
    options.mesh.check_axes(options.local, f"{caller}(local=)")


def validate_scheduled(caller: str, function: Any, schedule: Schedule | None) -> None:
    """Raise if there are stages or a module without a schedule."""
    if schedule is not None:
        return
    if isinstance(function, list | tuple | ModuleList):
        raise ValueError(
            f"{caller} got a list of stages without a schedule. "
            "Give schedule=fs.pipeline_schedule(...)."
        )
    if isinstance(function, Module):
        raise TypeError(
            f"{caller}: loss_fn must be a function of (params, batch); got the module "
            f"{type(function).__name__}. Write apply, params, buffers = fs.functionalize(module), "
            "and a loss function that calls apply."
        )
