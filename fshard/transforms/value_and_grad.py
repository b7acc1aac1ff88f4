"""`value_and_grad`: the gradient of a loss function of the full model, or of stages that run by a schedule.

    value_and_grad(loss_fn, ...)               ─> `unstaged` ─┐
    value_and_grad(stages, ..., schedule=)     ─> `staged`   ─┴─> (params, batch) ─> loss, gradients in their layouts

`train_step` and `evaluate` are built on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from torch.nn import Module, ModuleList

from fshard.mesh.layout import Mesh, P, PyTree, flatten, require_mesh
from fshard.pipeline.schedule.schedule import Schedule
from fshard.transforms.gradient import GradientFunction, unstaged
from fshard.transforms.options import OF_LOSSES, OF_STAGES, Options
from fshard.uncompiled import uncompiled


@uncompiled
def value_and_grad(
    loss_fn: Any,
    *,
    mesh: Mesh,
    batch: PyTree,
    schedule: Schedule | None = None,
    **options: Unpack[Options],
) -> GradientFunction:
    """Return a function of (params, batch) that gives the mean loss over the entire batch and its gradient.

    Args:
        loss_fn: `loss_fn(params, batch)` of one device: the mean loss over its samples, or the loss of each; with
            `has_aux` or `aux`, a pair of that and a tree of metrics. With a schedule, the stages: see below.
        mesh: the devices.
        batch: the sharding of the batch: a P, or a prefix tree of Ps. Gradients are summed over its axes. Other inputs of
            the loss, such as a second network, are leaves with P(), which may be `Sharded`: these are unsharded, all
            together.
        schedule: placement and order of the stages' work: see `pipeline_schedule`.
        has_buffers: True if loss_fn has buffers, such as BatchNorm's: it is then `loss_fn(params, buffers, batch)` and
            returns (loss, new buffers), and so does the result: see `buffers`.
        has_aux: True if loss_fn returns metrics, last: numbers, which are averaged as the loss is.
        aux: how metrics are combined, in place of `has_aux`: "mean", "sum" (counts), or "rows": tensors with a row per
            sample, which are returned for the entire batch, as a `Sharded`; or a prefix tree of these, as in
            `{"correct": "sum", "logits": "rows"}`. A tensor with dims and without a word raises.
        weight: the weight of a part of the batch: `weight(part)`, such as its number of tokens. Default: the length of
            the first dim, where the batch is sharded along it. A part of weight 0 adds nothing, even if its loss is not
            finite, unless the loss calls a collective; negative weights and a total of 0 raise. The loss is then one number.
            For a weight on a device the host waits, once a step.
        accumulate: split each device's part into this many slices, run in sequence. They differ by at most one sample.
        reduce_once: with `accumulate`, sum gradients locally and reduce the sum, instead of reducing each. It sends less
            and holds full gradients meanwhile.
        gradients: from a parameter's layout to its gradient's; default: the same.
        frozen: parameters without a gradient here: a path pattern, several, or a function of the path ("blocks[3].w").
            Parameters that are never trained are better frozen by `shard_params`: they have no optimizer state either.
        local: axes along which a parameter is used as it is stored: the loss function gets the device's shard of one with
            P(None, "model"). Its gradient is not reduced along them, that of a replicated one is. Beside them ZeRO shards
            the flattened shards: `fsdp("data", within=...)`. The loss calls collectives along these axes itself; it must be
            equal along them, which is compared (on accelerators in the first step only): a forgotten psum raises. Shards of
            uneven dims are shorter or empty at the end. A local axis may shard the batch too, as that of experts: what
            is sharded along it is used for the samples of all its devices (see `fshard.experts`), and in reproducible
            mode it is the first in the batch's spec.
        reproducible: equal bits on every mesh, for a fixed size of local axes: see `fshard.transforms.gradient`.
        slices: number of slices of the entire batch in reproducible mode, on any mesh; default 8. With several devices,
            each must have 1, 2, 4, ... of them, since other numbers would round differently.
        reshard_after_forward: unshard units again for the backward instead of keeping them.
        live_units: number of sharded units that are unsharded at a time, beside the prefetched ones, and in the backward
            those of a rematerialised block that is run again.
        prefetch: number of units to all-gather ahead of their use, in the order of the previous step.
        in_flight: number of reductions that may run during the backward; each holds a packed copy of its gradients.
        bucket: approximate bytes of gradients of replicated parameters (ZeRO 0 to 2) to reduce together: units wait,
            in the order of the backward. 0: each unit alone. Default 8 MiB: 1 is slower where the backward depends on
            caches, 25 (torch's) where bandwidth is the limit, and takes more memory.
        activations: the memory of those with a name of `fs.nn.checkpoint_name` until the backward, in place of a policy
            `fs.nn.save_names`: "device", "host" or "recomputed", by name.
        compute: the floating dtype of parameters and batch in computation, if not their own.
        reduce: the dtype that gradients are reduced in. Default: that of the computation; in reproducible mode, and where
            slices are summed, that or float32, whichever is wider. NCCL rounds a sum in 16 bits at each addition.

    The function also takes `scale=`: gradients are then those of the loss times that, which `optim.loss_scaled` needs:
    `gradient(params, batch, scale=opt.loss_scale(state))`.

    Loss and gradient may be differentiated by params and batch: within a transform of torch.func (`fs.array.lift`), and
    by autograd where they require grad. Then the loss function must return the loss alone, and there are no stages.

    The loss is a tensor, equal on all devices; a gradient is None where no device has used the parameter. loss_fn may
    call collectives over any axis, and needs no `fs.pvary`: every value in it is varying. If it does so over an axis
    that does not shard the batch, to use different parts of the model on different devices, the loss is the mean over
    that axis too. In reproducible mode it may not call collectives over the batch's axes.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.tensor([1.0, 2.0])}, fs.fsdp("data"), mesh=mesh)
    >>> def loss_fn(params, batch):
    ...     return (params["w"] * batch).sum(1).mean()
    >>> loss, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))(params, torch.ones(4, 2))
    >>> loss, fs.typeof(grads["w"]), fs.unshard(grads["w"])
    (tensor(3.), f32[2]{flat:data}, tensor([1., 1.]))

    Each device along "model" multiplies by its rows of w:

    >>> mesh = fs.make_mesh({"data": 2, "model": 2})
    >>> def loss_fn(w, x):
    ...     at, n = fs.axis_index("model"), fs.axis_size("model")
    ...     return fs.psum(x.chunk(n, 1)[at] @ w.chunk(n)[at], "model").square().mean()
    >>> w = fs.shard_params(torch.tensor([1.0, 2.0]), P("model"), mesh=mesh)
    >>> loss, grad = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))(w, torch.ones(4, 2))
    >>> loss, fs.typeof(grad), fs.unshard(grad)
    (tensor(9.), f32[2@model], tensor([6., 6.]))

    The same, where each device gets its rows only, and so does its gradient:

    >>> def loss_fn(w, x):
    ...     rows = x.chunk(fs.axis_size("model"), 1)[fs.axis_index("model")]
    ...     return fs.psum(rows @ w, "model").square().mean()
    >>> loss, grad = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), local="model")(w, torch.ones(4, 2))
    >>> loss, fs.typeof(grad), fs.unshard(grad)
    (tensor(9.), f32[2@model], tensor([6., 6.]))

    With a schedule, parameters and gradients are lists with one tree per stage, and the options are those of `train_step` with
    a schedule:

    >>> mesh, schedule = fs.make_mesh({"pipe": 2, "data": 2}), fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    >>> params = fs.shard_stages([torch.tensor(2.0), torch.tensor(3.0)], mesh=mesh, schedule=schedule)
    >>> options = {"mesh": mesh, "batch": P("data"), "schedule": schedule, "loss": lambda y, x: y.mean()}
    >>> gradient = fs.value_and_grad([torch.mul] * 2, **options)
    >>> loss, grads = gradient(params, torch.arange(4.0))
    >>> opt = fs.optim.sgd(1.0)
    >>> updates, state = opt.update(grads, opt.init(params), params)
    >>> loss, fs.unshard(grads), fs.unshard(fs.optim.apply_updates(params, updates))
    (tensor(9.), [tensor(4.5000), tensor(3.)], [tensor(-2.5000), tensor(0.)])
    """
    return gradient_of(
        "value_and_grad", loss_fn, mesh=mesh, batch=batch, schedule=schedule, **options
    )


def grad(loss_fn: Any, **options: Any) -> Callable[..., PyTree]:
    """Return a function of (params, batch) that gives the gradient of the mean loss: see `value_and_grad`.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> w = fs.device_put(torch.tensor(3.0), fs.Layout(mesh))
    >>> fs.unshard(fs.grad(lambda w, x: (w * x).mean(), mesh=mesh, batch=P("data"))(w, torch.arange(4.0)))
    tensor(1.5000)
    """
    gradient = value_and_grad(loss_fn, **options)
    return lambda params, *inputs, scale=None: gradient(params, *inputs, scale=scale)[1]


def gradient_of(
    caller: str,
    function: Any,
    *,
    mesh: Mesh,
    batch: PyTree,
    schedule: Schedule | None,
    backward: bool = True,
    in_place: bool = False,
    **options: Any,
) -> GradientFunction:
    """Return the gradient of a loss function, or of stages; raise in the caller's name if options are invalid."""
    validate_scheduled(caller, function, schedule)
    legal = OF_LOSSES if schedule is None else OF_STAGES
    if illegal := [name for name in options if name not in legal]:
        when = "Without a schedule" if schedule is None else "With a schedule"
        raise ValueError(
            f"{caller} has no option {', '.join(illegal)}. {when} it has: {', '.join(legal)}."
        )
    mesh = require_mesh(caller, mesh)
    if batch is None or isinstance(batch, str):
        raise TypeError(
            f'{caller}: batch must be a P, or a prefix tree of Ps; got {batch!r}. Write batch=P("data"), or P() for none.'
        )
    axes = dict.fromkeys(
        axis for spec in flatten(batch)[0] if isinstance(spec, P) for axis in spec.axes
    )
    mesh.check_axes(tuple(axes), f"{caller}(batch=)")
    mesh.check_axes(options.get("local", ()), f"{caller}(local=)")
    if schedule is None:
        return unstaged(function, mesh=mesh, batch=batch, backward=backward, **options)
    from fshard.transforms.stages.staged import staged  # most programs have no stages

    settings: Any = {"mesh": mesh, "batch": batch, "schedule": schedule, "caller": caller}
    return staged(function, backward=backward, in_place=in_place, **settings, **options)


def validate_scheduled(caller: str, function: Any, schedule: Schedule | None) -> None:
    """Raise if there are stages or a module without a schedule."""
    if schedule is None and isinstance(function, Module) and not isinstance(function, ModuleList):
        raise TypeError(
            f"{caller}: loss_fn must be a function of (params, batch); got the module {type(function).__name__}. Write "
            "apply, params, buffers = fs.functionalize(module), and a loss function that calls apply."
        )
    if schedule is None and isinstance(function, list | tuple | ModuleList):
        raise ValueError(
            f"{caller} got a list of stages without a schedule. Give schedule=fs.pipeline_schedule(...)."
        )
