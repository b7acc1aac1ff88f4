"""`evaluate`: the loss of a batch, forward only, on parameters in any layout.

It is `value_and_grad` without the backward: units are unsharded one by one as they are used and freed, parts of the
batch of any size are averaged by their weight, and nothing is recorded or reduced. Where it is differentiated, a
differentiable program takes its place: see `differentiable_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch

from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import Mesh, PyTree
from fshard.pipeline.schedule.schedule import Schedule
from fshard.source import call_site
from fshard.transforms.array_checks import validate_run
from fshard.transforms.options import Options
from fshard.transforms.reproducible.rerun import RecordedInputs
from fshard.transforms.value_and_grad import gradient_of, validate_scheduled
from fshard.uncompiled import uncompiled

_BOTH = {
    "has_buffers",
    "has_aux",
    "aux",
    "weight",
    "local",
    "reproducible",
    "live_units",
    "compute",
}
_OF_LOSSES = _BOTH | {"accumulate", "slices", "prefetch"}
_OF_STAGES = _BOTH | {"loss", "inputs", "skips", "axis", "dynamic"}


@uncompiled
def evaluate(
    loss_fn: Any,
    *,
    mesh: Mesh,
    batch: PyTree,
    schedule: Schedule | None = None,
    **options: Unpack[Options],
) -> Callable[..., Any]:
    """Return a function of (params, batch) that gives the mean loss over the entire batch, or with `aux` (loss,
    aux).

    Args:
        loss_fn: the loss function of training, or any other with the same results: a number or one per sample, then
            new buffers and a tree of metrics if it has them.
        mesh: the devices.
        batch: the sharding of the batch.
        schedule: of a model in stages, of which the forwards are run.
        options: `has_buffers`, `has_aux`, `aux`, `weight`, `local`, `reproducible`, `live_units` and `compute`, as in
            `value_and_grad`; without a schedule also `accumulate`, `slices` and `prefetch`, with one `loss`, `inputs`,
            `skips`, `axis` and `dynamic`. New buffers are dropped. Dropout and BatchNorm are those of the module's mode:
            call `module.eval()` before, which `functionalize`'s apply follows.

    Communicates an all_gather per sharded unit and the psum of the means. It works under `torch.no_grad` and
    `torch.inference_mode`. Random draws differ from call to call and between samples, as in a step: each call draws one
    key. In `fs.keyed_random(0)` all calls draw alike, and the random state stays. The loss may be differentiated by params
    and batch: within a transform of torch.func, and by autograd where they require grad.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.tensor([1.0, 2.0])}, fs.fsdp("data"), mesh=mesh)
    >>> test = fs.evaluate(lambda p, x: (p["w"] * x).sum(1).mean(), mesh=mesh, batch=P("data"))
    >>> with fs.ledger() as comm:
    ...     loss = test(params, torch.arange(6.0).view(3, 2))  # two samples on one device, one on the other
    >>> loss, [name for name, _ in comm.by_collective()]
    (tensor(8.), ['all_gather', 'psum'])
    """
    validate_scheduled("evaluate", loss_fn, schedule)
    if illegal := sorted(options.keys() - (_OF_LOSSES if schedule is None else _OF_STAGES)):
        when = "without schedule=" if schedule is None else "with schedule="
        raise ValueError(
            f"evaluate has no option {', '.join(illegal)} {when}. Leave out what has no meaning there."
        )
    forward = gradient_of(
        "evaluate", loss_fn, mesh=mesh, batch=batch, schedule=schedule, backward=False, **options
    )
    has_buffers, has_aux = forward.options.has_buffers, forward.options.has_aux

    def run(params: PyTree, *inputs: PyTree) -> Any:
        if transformed():  # the engine's forward records nothing
            return forward.differentiable(params, *inputs).loss()
        recorded_inputs = RecordedInputs.of(params, *inputs)
        buffers, batch = inputs if has_buffers else ((), *inputs)
        validate_run(mesh, "evaluate", params=params, buffers=buffers, batch=batch)
        with torch.inference_mode(False), torch.no_grad():
            value, _ = forward.run(params, buffers, batch, call_site())
        loss = value.loss
        if recorded_inputs is not None:
            loss = recorded_inputs.attach(
                lambda params, *inputs: forward.differentiable(params, *inputs).loss(), loss
            )
        return (loss, value.aux) if has_aux else loss

    return run
