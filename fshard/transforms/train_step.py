"""`train_step`: gradient, optimizer and metrics as one pure function.

params, state, batch           ─> value_and_grad ─> opt.step ─> params, state, metrics
params, state, buffers, batch  ─> (with buffers) ─> params, state, buffers, metrics
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fshard.memory.kinds import claim, mark, purpose
from fshard.memory.placement import PlaceableStep
from fshard.memory.state import Update, UpdateOn
from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import Memory, Mesh, PyTree, flatten_with_paths
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.deterministic import deterministic
from fshard.optim.contract import DonatingStep, Optimizer, copied, step_of
from fshard.optim.norms import exact_norms, norm_later, sharing_norm
from fshard.optim.partition import as_sharded
from fshard.optim.scaling import lower_scale
from fshard.optim.sharded.optimizer import ShardedOptimizer
from fshard.source import Site, call_site
from fshard.transforms.array_checks import validate_run
from fshard.transforms.gradient import GradientFunction, StepValue
from fshard.transforms.options import (
    Options,
    StepOptions,
    options_until,
    takes_options,
    validate_names,
)
from fshard.transforms.patterns import titled
from fshard.transforms.value_and_grad import gradient_of
from fshard.uncompiled import uncompiled

Metrics = dict[str, Any]
"""The metrics of a step, equal on all devices.

    loss, grad_norm    0-d tensors
    finite             True if both are finite
    samples            number of samples, unless the batch's tensors disagree
    weight             with `weight=`: the weight of the entire batch, such as its number of tokens
    aux                with `has_aux` or `aux`: the loss function's metrics: means, sums, rows of samples

On processes outside of the mesh each is None: `fs.broadcast_to` gives them the values.
"""


@uncompiled
@takes_options(Options, until="update")
def train_step(loss_fn: Any, opt: Optimizer | ShardedOptimizer, options: Options) -> TrainStep:
    """Return a function of (params, state, batch) that takes one training step; it returns (params, state, metrics).

    Args:
        loss_fn: `loss_fn(params, batch)` of one device: the mean loss over its samples, or the loss
            of each. With a schedule a list of stages: modules, or functions (params, x) -> y.
        opt: an optimizer; `partition_optimizer` shards its state over the devices.

    {options}

    The metrics are "loss", "grad_norm", "finite", "samples", and "weight" and "aux" with these
    options. For examples with buffers and stages, and what a step waits for, see `TrainStep`.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    >>> opt = fs.partition_optimizer(fs.optim.sgd(0.5), mesh=mesh, axis="data", stage=3)
    >>> def loss_fn(params, x):
    ...     return (params["w"] * x).sum(1).mean()
    >>> step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"))
    >>> params, state, metrics = step(params, opt.init(params), torch.ones(4, 2))
    >>> fs.unshard(params["w"]), metrics["loss"], metrics["grad_norm"], metrics["samples"]
    (tensor([0.5000, 1.5000]), tensor(3.), tensor(1.4142), tensor(4))
    """
    return TrainStep.of(loss_fn, opt, options)


_WARNING = (
    "torch.compile(step) has no effect. Compile the loss function: "
    "train_step(torch.compile(loss_fn), ...)."
)
_IN_TRANSFORM = (
    "train_step: a step must not be called within a transform of torch.func, such as vjp, which "
    "does not see what it writes in place. Differentiate fs.grad and an update: "
    "fs.optim.apply_updates(params, opt.update(grads, state, params)[0])."
)


@dataclass(frozen=True, eq=False)
class TrainStep(PlaceableStep):
    """One training step, (params, state, batch) -> (params, state, metrics): see `train_step`.

    Args:
        loss_fn, opt, options: as they were given.
        optimizer: of arrays.
        gradient: with the layouts that the optimizer takes.
        update: the optimizer's step.
        substitute: from the reduced gradients to those that the update takes, for `fs.audit`;
            None: the same.

    The step itself is not compiled, and `torch.compile(step)` runs it as it is, with a warning:
    compile the loss function, `train_step(torch.compile(loss_fn), ...)`.

    The host waits for no device before it has launched the update, unless the optimizer does:
    `loss_scaled` and `skip_if_not_finite` once, Adafactor as in torch once per leaf. The norm of
    the metrics, of order 2, is a psum of 8 bytes, in the gradients' dtype. With an optimizer that
    begins with `clip_by_global_norm` of that order, the default, it is the norm of the clipping,
    computed once, in float64.

    A module with BatchNorm: a step takes and returns its buffers.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> opt = fs.partition_optimizer(fs.optim.sgd(0.5), mesh=mesh, axis="data", stage=3)
    >>> norm = torch.nn.BatchNorm1d(2)
    >>> apply, params, buffers = fs.functionalize(norm, sync_batchnorm="data")
    >>> def loss_fn(params, buffers, x):
    ...     y, buffers = apply(params, buffers, x)
    ...     return y.square().mean(), buffers
    >>> params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    >>> step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), has_buffers=True)
    >>> x = torch.full((3, 2), 5.0)
    >>> params, state, buffers, metrics = step(params, step.init(params), buffers, x)
    >>> buffers["running_mean"], buffers["num_batches_tracked"]
    (tensor([0.5000, 0.5000]), tensor(1))

    With a schedule, `params` is a list with one tree per stage, each stored by the devices of that
    stage (`shard_stages`). Each device splits its shard of the batch into the schedule's
    microbatches, of equal size where possible. ZeRO works as without stages: a stage is
    unsharded, resharded and reduced when the schedule has it, else by `live_units`.

    >>> mesh = fs.make_mesh({"pipe": 2, "data": 2})
    >>> schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=4)
    >>> layers = [torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)]
    >>> stages = fs.pipeline.split_stages(torch.nn.Sequential(*layers), 2)
    >>> params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    >>> opt = fs.partition_optimizer(fs.optim.sgd(0.5), mesh=mesh, axis="data", stage=3)
    >>> def loss(y, batch):
    ...     return (y - batch[1]).square().mean()
    >>> step = fs.train_step(stages, opt, mesh=mesh, batch=P("data"), schedule=schedule, loss=loss)
    >>> batch = torch.ones(16, 2), torch.ones(16, 1)
    >>> params, state, metrics = step(params, step.init(params), batch)
    >>> fs.typeof(params[1]["2.weight"]), metrics["samples"]
    (f32[1, 3]{flat:data, at:pipe=1}, tensor(16))
    """

    loss_fn: Any
    opt: Optimizer | ShardedOptimizer
    options: Options
    optimizer: ShardedOptimizer = field(repr=False)
    gradient: GradientFunction = field(repr=False)
    update: Update = field(repr=False)
    substitute: Callable[[PyTree], PyTree] | None = field(default=None, repr=False)

    __name__ = "train_step"  # for what wraps a function, such as functools.wraps

    @classmethod
    def of(cls, loss_fn: Any, opt: Optimizer | ShardedOptimizer, options: Options) -> TrainStep:
        """Return the step of a loss function, or of stages, and an optimizer."""
        optimizer = as_sharded(opt, options.mesh, "train_step")
        _validate_mode(optimizer, options)
        reduce_once = options.reduce_once
        if reduce_once is None:
            reduce_once = optimizer.stage < 2  # from 2 on full gradients are not to be held
        completed = replace(
            options,
            gradients=options.gradients or optimizer.gradients,
            reduce_once=reduce_once,
        )
        gradient = gradient_of("train_step", loss_fn, completed)
        update = _update_of(optimizer, donate=options.donate, exact=options.reproducible)
        return cls(loss_fn, opt, options, optimizer, gradient, update)

    def replace(self, **options: Any) -> TrainStep:
        """Return the step with other options; on another mesh, its optimizer is there too."""
        schedule = options.get("schedule", self.options.schedule)
        legal = options_until("update")
        validate_names("TrainStep.replace", options, legal, is_scheduled=schedule is not None)
        opt = self.opt
        if "mesh" in options and isinstance(opt, ShardedOptimizer):
            opt = opt.on_mesh(options["mesh"])
        return TrainStep.of(self.loss_fn, opt, replace(self.options, **options))

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.gradient.options.mesh

    @property
    def state_memory(self) -> Memory:
        """The memory of the optimizer's state."""
        return self.optimizer.state_memory

    @property
    def update_on(self) -> UpdateOn:
        """The memory in which the state is updated."""
        return self.optimizer.update_on

    def init(self, params: PyTree) -> PyTree:
        """Return the state of the optimizer."""
        return self.optimizer.init(params)

    @partial(uncompiled, warning=_WARNING)
    def __call__(self, params: PyTree, state: PyTree, *inputs: PyTree) -> tuple[Any, ...]:
        """Return the next parameters, state, buffers if there are any, and metrics."""
        if transformed():
            raise TypeError(_IN_TRANSFORM)
        buffers, batch = self._buffers_and_batch(inputs)
        arguments = {"params": params, "state": state, "buffers": buffers, "batch": batch}
        validate_run(self.gradient.options.mesh, "train_step", **arguments)
        claim(state, "state")
        optimizer = self.optimizer
        scale = 1.0
        is_member = self.gradient.options.mesh.is_member
        scale_of = optimizer.loss_scale if is_member else None  # outside there is no scale
        if scale_of is not None:
            scale = float(scale_of(state))
        reduction = None
        if optimizer.compression is not None:  # it is under way during forward and backward
            reduction = optimizer.compression.start(state, params)

        site = call_site()
        value, grads = self.gradient.run(params, buffers, batch, site, scale)
        if self.substitute is not None:
            grads = self.substitute(grads)
        params, state, norm = self._updated(params, state, grads, reduction, scale, site)
        if scale_of is not None:
            lower_scale(scale_of(state), scale, value.largest)
        claim(params, "parameters")
        claim(state, "state")
        metrics = _metrics(self.gradient.options, value, norm)
        if self.options.has_buffers:
            return params, state, value.buffers, metrics
        return params, state, metrics

    def _buffers_and_batch(self, inputs: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        """Return the buffers, () if there are none, and the batch."""
        has_buffers = self.options.has_buffers
        if len(inputs) != 1 + has_buffers:
            names = "params, state, buffers, batch" if has_buffers else "params, state, batch"
            raise ValueError(f"train_step: a step takes ({names}), {2 + len(inputs)} are given.")
        return (inputs[0], inputs[1]) if has_buffers else ((), inputs[0])

    def _updated(
        self, params: PyTree, state: PyTree, grads: PyTree, reduction: Any, scale: float, site: Site
    ) -> tuple[PyTree, PyTree, Tensor]:
        """Return the next parameters and state, and the norm of the gradients.

        Args:
            reduction: what the compression has started.
            scale: of the loss, and so of the gradients.
            site: of the step.
        """
        is_exact = self.options.reproducible
        compression = self.optimizer.compression
        with (
            torch.no_grad(),
            deterministic(is_exact, self.gradient.options.mesh.device_type),
            exact_norms(is_exact),
            purpose(None, site),
            _naming_dtypes(grads),
        ):
            if not self.options.donate:
                params, state = copied((params, state))
            if compression is not None:
                grads, state = compression.reduce(grads, state, reduction)
            mark("update")
            if self.optimizer.opt.uses_norm:
                with sharing_norm(grads) as norm_of:
                    params, state = self.update(grads, state, params)
            else:
                norm_of = norm_later(grads, exact=is_exact)
                params, state = self.update(grads, state, params)  # (9)
            return params, state, norm_of() / scale


def _validate_mode(opt: ShardedOptimizer, options: Options) -> None:
    """Raise if an optimizer cannot step in the mode of the options."""
    if options.precision == "fp16" and opt.loss_scale is None:
        raise ValueError(
            'train_step: precision="fp16" needs a scaled loss. Write fs.optim.loss_scaled(opt).'
        )
    if options.reproducible and opt.compression is not None:
        raise ValueError(
            "train_step: reproducible must be False with compress=, whose sums depend on the mesh; "
            "got True."
        )
    is_in_place = options.donate and not options.reproducible
    if opt.state_memory == "disk" and not is_in_place:
        raise ValueError(
            "train_step: state on disk is written in place, so donate must be True and reproducible "
            f"False; got donate={options.donate} and reproducible={options.reproducible}. "
            'Write train_step(..., donate=True), or state_memory="host".'
        )


def _update_of(opt: ShardedOptimizer, *, donate: bool, exact: bool) -> Update:
    """Return the step of an optimizer, which marks its arguments if it is to `donate` them.

    Fused kernels round differently where a shard ends: with equal bits on all meshes, `exact`,
    updates do without them.
    """
    write = step_of(Optimizer(opt.init, opt.update)) if exact else step_of(opt)
    return DonatingStep(write) if donate else write


@contextmanager
def _naming_dtypes(grads: PyTree) -> Generator[None]:
    """Name the trained parameters of dtypes that torch does not compute with, if an update fails."""
    try:
        yield
    except NotImplementedError as error:
        raise _without_arithmetic(grads) or error from error


def _without_arithmetic(grads: PyTree) -> TypeError | None:
    """Return the error of trained parameters of float8; None if there are none."""
    narrow = list[str]()
    for path, x in zip(*flatten_with_paths(grads)[:2], strict=True):
        if isinstance(x, Sharded) and x.dtype.is_floating_point and x.dtype.itemsize == 1:
            narrow.append(f"{titled(path)} is {str(x.dtype).removeprefix('torch.')}")
    if not narrow:
        return None
    return TypeError(
        "train_step: trained parameters must have a dtype that torch computes with; "
        f"{', '.join(narrow)}. Keep them in bfloat16 or float32 and cast them in the loss "
        "function, or freeze them: frozen=[names]."
    )


def _metrics(options: StepOptions, value: StepValue, norm: Tensor) -> Metrics:
    loss = value.loss
    if loss is None:  # outside of the mesh
        return no_metrics(options)
    is_finite = (norm + loss) * 0 == 0  # 0 times a non-finite number is nan
    metrics: Metrics = {"loss": loss, "grad_norm": norm.to(loss.dtype), "finite": is_finite}
    if value.samples is not None:
        metrics["samples"] = torch.tensor(value.samples)
    if options.weight is not None:
        metrics["weight"] = torch.full((), value.weight, dtype=torch.float64, device=loss.device)
    if options.has_aux:
        metrics["aux"] = value.aux
    return metrics


def no_metrics(options: StepOptions) -> Metrics:
    """Return the metrics outside of the mesh: their names, without values."""
    names = ["loss", "grad_norm", "finite", "samples"]
    if options.weight is not None:
        names.append("weight")
    if options.has_aux:
        names.append("aux")
    return dict.fromkeys(names)
