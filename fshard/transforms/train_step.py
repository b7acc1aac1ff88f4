"""`train_step`: gradient, optimizer and metrics as one pure function.

params, state, batch           ─> value_and_grad ─> opt.step ─> params, state, metrics
params, state, buffers, batch  ─> (with buffers) ─> params, state, buffers, metrics
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from fshard.memory.kinds import claim, mark, purpose
from fshard.memory.state import Update
from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import Mesh, PyTree, flatten_with_paths
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.deterministic import deterministic
from fshard.optim.contract import DonatingStep, Optimizer, copied, step_of
from fshard.optim.norms import exact_norms, norm_later
from fshard.optim.partition import as_sharded
from fshard.optim.sharded.optimizer import ShardedOptimizer
from fshard.pipeline.schedule.schedule import Schedule
from fshard.source import call_site
from fshard.transforms.array_checks import validate_run
from fshard.transforms.gradient import StepValue
from fshard.transforms.options import Options, StepOptions
from fshard.transforms.patterns import titled
from fshard.transforms.value_and_grad import gradient_of
from fshard.uncompiled import uncompiled

Precision = Literal["bf16", "fp16"]
_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}

Metrics = dict[str, Any]
"""The metrics of a step, equal on all devices.

    loss, grad_norm    0-d tensors
    finite             True if both are finite
    samples            number of samples, unless the batch's tensors disagree
    weight             with `weight=`: the weight of the entire batch, such as its number of tokens
    aux                with `has_aux` or `aux`: the loss function's metrics: means, sums, rows of samples
"""


def _validate_precision(precision: Any, opt: ShardedOptimizer) -> None:
    """Raise if a precision is unknown, or has no scaled loss that it needs."""
    if precision not in _COMPUTE:
        raise ValueError(f'train_step: precision is "bf16", "fp16" or None, not {precision!r}.')
    if precision == "fp16" and opt.loss_scale is None:
        raise ValueError(
            'train_step: precision="fp16" needs a scaled loss. Write fs.optim.loss_scaled(opt).'
        )


def _validate_mode(opt: ShardedOptimizer, *, donate: bool, reproducible: bool) -> None:
    """Raise if an optimizer cannot step in this mode."""
    if reproducible and opt.compression is not None:
        raise ValueError(
            "train_step: reproducible must be False with compress=, whose sums depend on the mesh; got True."
        )
    if opt.state_memory == "disk" and (reproducible or not donate):
        raise ValueError(
            "train_step: state on disk is written in place, so donate must be True and reproducible False; got "
            f"donate={donate} and reproducible={reproducible}. Write train_step(..., donate=True), or "
            'state_memory="host".'
        )


@uncompiled
def train_step(
    loss_fn: Any,
    opt: Optimizer | ShardedOptimizer,
    *,
    mesh: Mesh,
    batch: PyTree,
    donate: bool = False,
    precision: Precision | None = None,
    schedule: Schedule | None = None,
    **options: Unpack[Options],
) -> Callable[..., Any]:
    """Return a function of (params, state, batch) that takes one training step; it returns (params, state, metrics).

    Args:
        loss_fn: a loss function of one device: see `value_and_grad`. With a schedule, the stages: see below.
        opt: an optimizer; `partition_optimizer` shards its state over the devices.
        mesh: the devices.
        batch: the spec of the batch.
        donate: True to reuse the memory of the parameters and state that a step gets for its results: each later use of the
            given arrays raises. Frozen ones are the same arrays.
        precision: "bf16" or "fp16" computes in that dtype, while parameters and state stay in their own (float32 masters).
            Parameters are gathered in 16 bits; gradients are reduced in them (bf16) or in float32 (fp16), unless `reduce`
            names another dtype. "fp16" needs `fs.optim.loss_scaled(opt)`.
        schedule: placement and order of the stages' work: see `pipeline_schedule`.
        options: those of `value_and_grad`: accumulate, weight, aux, frozen, reproducible, ... With `has_buffers`, a step
            takes (params, state, buffers, batch) and returns (params, state, buffers, metrics). With a schedule, see below.

    The step itself is not compiled, and `torch.compile(step)` runs it as it is, with a warning: compile the loss function,
    `train_step(torch.compile(loss_fn), ...)`.

    The metrics are "loss", "grad_norm", "finite" and "samples"; with `weight` also "weight", with `aux` also
    "aux". The host waits for no device before it has launched the update, unless the optimizer does: `loss_scaled` and
    `skip_if_not_finite` once, Adafactor as in torch once per leaf. The norm of the metrics is a psum of 8 bytes, in
    the gradients' dtype.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.tensor([1.0, 2.0])}, fs.fsdp("data"), mesh=mesh)
    >>> opt = fs.partition_optimizer(fs.optim.sgd(0.5), mesh=mesh, axis="data", stage=3)
    >>> step = fs.train_step(lambda p, x: (p["w"] * x).sum(1).mean(), opt, mesh=mesh, batch=P("data"))
    >>> params, state, metrics = step(params, opt.init(params), torch.ones(4, 2))
    >>> fs.unshard(params["w"]), metrics["loss"], metrics["grad_norm"], metrics["samples"]
    (tensor([0.5000, 1.5000]), tensor(3.), tensor(1.4142), tensor(4))

    A module with BatchNorm: a step takes and returns its buffers.

    >>> apply, params, buffers = fs.functionalize(torch.nn.BatchNorm1d(2), sync_batchnorm="data")
    >>> def loss_fn(params, buffers, x):
    ...     y, buffers = apply(params, buffers, x)
    ...     return y.square().mean(), buffers
    >>> params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    >>> step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), has_buffers=True)
    >>> params, state, buffers, metrics = step(params, opt.init(params), buffers, torch.full((3, 2), 5.0))
    >>> buffers["running_mean"], buffers["num_batches_tracked"]
    (tensor([0.5000, 0.5000]), tensor(1))

    With a schedule, `loss_fn` is a list of stages: modules, or functions (params, x) -> y. `params` is a list with one tree
    per stage, each stored by the devices of that stage (`shard_stages`). Each device splits its shard of the batch into the
    schedule's microbatches, of equal size where possible. ZeRO works as without stages: the schedule says when a stage is
    unsharded, resharded and reduced; if it does not, `live_units` decides.

        loss             loss(y, microbatch): y is the last stage's output. Returns the mean, or a value for each sample
        inputs           inputs(microbatch): the first stage's input. Default: x of a pair (x, target), else the microbatch
        skips            {name: (source, target)}: stage `source` returns (y, {name: value}); stage `target` gets name=value
        axis             mesh axis of the stages; default "pipe"
        live_units       maximal number of unsharded stages on a device: the current one and the next ones
        reproducible     equal bits to a step without stages that has as many `slices` as there are microbatches on all
                         devices; across numbers of devices if these and the microbatches are powers of two
        has_buffers      the buffers are a list with one tree per stage, sharded by `shard_stages`. A stage that is a function
                         is then (params, buffers, x) -> (y, buffers)
        recompute        activations to recompute in the backward instead of saving: see `stage_functions`
        dynamic          True if shapes of activations depend on more than the shapes of the microbatch
        weight, has_aux, aux, gradients, frozen, compute, reduce      as in `value_and_grad`

    >>> mesh, schedule = fs.make_mesh({"pipe": 2, "data": 2}), fs.pipeline_schedule("1f1b", stages=2, microbatches=4)
    >>> stages = fs.pipeline.split_stages(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)), 2)
    >>> params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    >>> opt = fs.partition_optimizer(fs.optim.sgd(0.5), mesh=mesh, axis="data", stage=3)
    >>> def loss(y, batch):
    ...     return (y - batch[1]).square().mean()
    >>> step = fs.train_step(stages, opt, mesh=mesh, batch=P("data"), schedule=schedule, loss=loss)
    >>> params, state, metrics = step(params, opt.init(params), (torch.ones(16, 2), torch.ones(16, 1)))
    >>> fs.typeof(params[1]["2.weight"]), metrics["samples"]
    (f32[1, 3]{flat:data, at:pipe=1}, tensor(16))
    """
    settings: dict[str, Any] = {
        "mesh": mesh,
        "batch": batch,
        "donate": donate,
        "precision": precision,
        "schedule": schedule,
    }
    changed = partial(_step_with_changes, loss_fn, opt, settings | options)  # for fs.memory.place
    opt = as_sharded(opt, mesh, "train_step")
    _validate_precision(precision, opt)
    options.setdefault("gradients", opt.gradients)
    options.setdefault("compute", _COMPUTE[precision])
    options.setdefault("reduce", torch.float32 if precision == "fp16" else None)
    if schedule is None:
        options.setdefault("reduce_once", opt.stage < 2)
    gradient = gradient_of(
        "train_step", loss_fn, mesh=mesh, batch=batch, schedule=schedule, **options
    )
    step_options, compression = gradient.options, opt.compression
    _validate_mode(opt, donate=donate, reproducible=step_options.slices is not None)
    update = _update_of(opt, donate=donate, exact=step_options.slices is not None)

    def step(params: PyTree, state: PyTree, *inputs: PyTree) -> tuple[Any, ...]:
        if len(inputs) != 1 + step_options.has_buffers:
            takes = (
                "params, state, buffers, batch"
                if step_options.has_buffers
                else "params, state, batch"
            )
            raise ValueError(f"train_step: a step takes ({takes}), {2 + len(inputs)} are given.")
        buffers, batch = inputs if step_options.has_buffers else ((), *inputs)
        validate_run(mesh, "train_step", params=params, state=state, buffers=buffers, batch=batch)
        claim(state, "state")
        scale = float(opt.loss_scale(state)) if opt.loss_scale is not None else 1.0
        early = None if compression is None else compression.start(state, params)
        site = call_site()
        value, grads = gradient.run(params, buffers, batch, site, scale)
        exact = step_options.slices is not None
        with (
            torch.no_grad(),
            deterministic(exact, mesh.device_type),
            exact_norms(exact),
            purpose(None, site),
            _naming_dtypes(grads),
        ):
            if not donate:
                params, state = copied((params, state))
            if compression is not None:
                grads, state = compression.reduce(grads, state, early)
            mark("update")
            norm_of = norm_later(grads, exact=exact)
            params, state = update(grads, state, params)  # (9)
            norm = norm_of() / scale
        claim(params, "parameters")
        claim(state, "state")
        return (
            params,
            state,
            *((value.buffers,) if step_options.has_buffers else ()),
            _metrics(step_options, value, norm),
        )

    warning = "torch.compile(step) has no effect. Compile the loss function: train_step(torch.compile(loss_fn), ...)."
    wrapped: Any = uncompiled(_outside_transforms(step), warning=warning)
    wrapped.init = opt.init  # for steps around this one: fs.comm.diloco
    wrapped.mesh, wrapped.state_memory, wrapped.update_on = mesh, opt.state_memory, opt.update_on
    wrapped.changed, wrapped.stages = (
        changed,
        gradient.program.pipeline,
    )  # for fs.plan.cost
    return wrapped


def _outside_transforms(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that raises within a transform of torch.func, which does not see what it writes."""

    @wraps(step)
    def run(*args: PyTree) -> Any:
        if transformed():
            raise TypeError(
                "train_step: a step must not be called within a transform of torch.func, such as vjp; it writes in place. "
                "Differentiate fs.grad and an update: fs.optim.apply_updates(params, opt.update(grads, state, params)[0])."
            )
        return step(*args)

    return run


def _update_of(opt: ShardedOptimizer, *, donate: bool, exact: bool) -> Update:
    """Return the step of an optimizer, which marks its arguments if it is to `donate` them.

    Fused kernels round differently where a shard ends: with equal bits on all meshes, `exact`, updates do without them.
    """
    write = step_of(Optimizer(opt.init, opt.update)) if exact else step_of(opt)
    return DonatingStep(write) if donate else write


def _step_with_changes(
    loss_fn: Any, opt: Any, options: dict[str, Any], **changes: Any
) -> Callable[..., Any]:
    """Return a step with other options; on another mesh, its optimizer is too."""
    if isinstance(opt, ShardedOptimizer) and "mesh" in changes:
        opt = opt.on_mesh(changes["mesh"])
    return train_step(loss_fn, opt, **{**options, **changes})


@contextmanager
def _naming_dtypes(grads: PyTree) -> Generator[None]:
    """Name the trained parameters whose dtype torch does not compute with, if an update fails for it."""
    try:
        yield
    except NotImplementedError as error:
        raise _without_arithmetic(grads) or error from error


def _without_arithmetic(grads: PyTree) -> TypeError | None:
    """Return the error of trained parameters of float8; None if there are none."""
    paths, leaves, _ = flatten_with_paths(grads)
    narrow = [
        f"{titled(path)} is {str(x.dtype).removeprefix('torch.')}"
        for path, x in zip(paths, leaves, strict=True)
        if isinstance(x, Sharded) and x.dtype.is_floating_point and x.dtype.itemsize == 1
    ]
    if not narrow:
        return None
    return TypeError(
        f"train_step: trained parameters must have a dtype that torch computes with; {', '.join(narrow)}. Keep them in "
        "bfloat16 or float32 and cast them in the loss function, or freeze them: frozen=[names]."
    )


def _metrics(options: StepOptions, value: StepValue, norm: Tensor) -> Metrics:
    loss = value.loss
    finite = (norm + loss) * 0 == 0  # 0 times a non-finite number is nan
    metrics: Metrics = {"loss": loss, "grad_norm": norm.to(loss.dtype), "finite": finite}
    if value.samples is not None:
        metrics["samples"] = torch.tensor(value.samples)
    if options.weight is not None:
        metrics["weight"] = torch.full((), value.weight, dtype=torch.float64, device=loss.device)
    return {**metrics, "aux": value.aux} if options.has_aux else metrics
