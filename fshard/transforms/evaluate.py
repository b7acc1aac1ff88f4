"""`evaluate`: the loss of a batch, forward only, on parameters in any layout.

It is `value_and_grad` without the backward: units are unsharded one by one as they are used and freed, parts of the
batch of any size are averaged by their weight, and nothing is recorded or reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fshard.errors import LayoutError
from fshard.mesh.layout import Mesh, PyTree
from fshard.pipeline.schedule.schedule import Schedule
from fshard.source import call_site
from fshard.transforms.device_step import Weight
from fshard.transforms.origin import refuse_distant
from fshard.transforms.value_and_grad import gradient_of, refuse_unscheduled
from fshard.uncompiled import uncompiled


@uncompiled
def evaluate(
    loss_fn: Any,
    *,
    mesh: Mesh,
    batch: PyTree,
    has_buffers: bool = False,
    has_aux: bool = False,
    weight: Weight | None = None,
    accumulate: int = 1,
    reproducible: bool = False,
    slices: int | None = None,
    live_units: int = 2,
    prefetch: int = 1,
    compute: torch.dtype | None = None,
    schedule: Schedule | None = None,
    **staging: Any,
) -> Callable[..., Any]:
    """Return a function of (params, batch) that gives the mean loss over the entire batch, or with `has_aux` (loss,
    aux).

    Args:
        loss_fn: the loss function of training, or any other with the same results: a number or one per sample, then
            new buffers and a tree of metrics if it has them.
        mesh: the devices.
        batch: the sharding of the batch.
        has_buffers: True if loss_fn takes and returns buffers; returned ones are dropped. Dropout and BatchNorm are
            those of the module's mode: call `module.eval()` before; `functionalize`'s apply follows it.
        has_aux: True if it returns metrics: means, counts and rows, as in `value_and_grad`.
        weight: the weight of a part of the batch: see `value_and_grad`, as for the others.
        accumulate: split each device's part into this many slices, run in sequence.
        reproducible: equal bits on every mesh.
        slices: number of slices of the entire batch then.
        live_units: number of sharded units that are unsharded at a time.
        prefetch: number of units to all-gather ahead of their use.
        compute: the floating dtype of parameters and batch in computation, if not their own.
        schedule: of a model in stages, of which the forwards are run.
        staging: with a schedule, loss, inputs, skips, axis and dynamic, as in `train_step`.

    Communicates an all_gather per sharded unit and the psum of the means. It works under `torch.no_grad` and
    `torch.inference_mode`, and restores the random state.

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
    refuse_unscheduled("evaluate", loss_fn, schedule)
    unstaged_options: dict[str, Any] = {"accumulate": accumulate, "slices": slices, "prefetch": prefetch}
    both: dict[str, Any] = {"has_buffers": has_buffers, "has_aux": has_aux, "weight": weight, "compute": compute}
    both |= {"mesh": mesh, "batch": batch, "reproducible": reproducible, "live_units": live_units}
    if schedule is None:
        _refuse(staging, "without schedule=")
        own = unstaged_options
    else:
        usual = {"accumulate": 1, "slices": None, "prefetch": 1}
        _refuse([name for name in unstaged_options if unstaged_options[name] != usual[name]], "with schedule=")
        _refuse(staging.keys() - {"loss", "inputs", "skips", "axis", "dynamic"}, "with schedule=")
        own = staging
    forward = gradient_of("evaluate", loss_fn, schedule=schedule, backward=False, **both, **own)

    def run(params: PyTree, *given: PyTree) -> Any:
        buffers, batch = given if has_buffers else ((), *given)
        refuse_distant(mesh, "evaluate", params=params, buffers=buffers, batch=batch)
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=()):
            value, _ = forward.run(params, buffers, batch, call_site())
        return (value.loss, value.aux) if has_aux else value.loss

    return run


def _refuse(options: Iterable[str], when: str) -> None:
    if names := sorted(options):
        raise LayoutError(f"evaluate has no option {', '.join(names)} {when}. Leave out what has no meaning there.")
