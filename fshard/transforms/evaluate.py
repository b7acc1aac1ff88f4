"""`evaluate`: the loss of a batch, forward only, on parameters in any layout.

It is `value_and_grad` without the backward: units are unsharded one by one as they are used and
freed, parts of the batch of any size are averaged by their weight, and nothing is recorded or
reduced. Where it is differentiated, a differentiable program takes its place: see
`differentiable_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import PyTree
from fshard.source import call_site
from fshard.transforms.array_checks import validate_run
from fshard.transforms.options import Options, takes_options
from fshard.transforms.reproducible.rerun import RecordedInputs
from fshard.transforms.value_and_grad import gradient_of
from fshard.uncompiled import uncompiled


@uncompiled
@takes_options(Options, until="forward")
def evaluate(loss_fn: Any, options: Options) -> Callable[..., Any]:
    """Return a function of (params, batch) that gives the mean loss over the entire batch.

    With `aux` it returns (loss, aux).

    Args:
        loss_fn: the loss function of training, or any other with the same results: a number or one
            per sample, then new buffers and a tree of metrics if it has them. With a schedule, the
            stages, of which the forwards are run.

    {options}

    New buffers are dropped. Dropout and BatchNorm are those of the module's mode: call
    `module.eval()` before, which `functionalize`'s apply follows.

    Communicates an all_gather per sharded unit and the psum of the means. It works under
    `torch.no_grad` and `torch.inference_mode`. Random draws differ from call to call and between
    samples, as in a step: each call draws one key. In `fs.keyed_random(0)` all calls draw alike,
    and the random state stays. The loss may be differentiated by params and batch: within a
    transform of torch.func, and by autograd where they require grad.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.tensor([1.0, 2.0])}, fs.fsdp("data"), mesh=mesh)
    >>> def loss_fn(params, x):
    ...     return (params["w"] * x).sum(1).mean()
    >>> test = fs.evaluate(loss_fn, mesh=mesh, batch=P("data"))
    >>> x = torch.arange(6.0).view(3, 2)  # two samples on one device, one on the other
    >>> with fs.ledger() as comm:
    ...     loss = test(params, x)
    >>> loss, [name for name, _ in comm.by_collective()]
    (tensor(8.), ['all_gather', 'psum'])
    """
    forward = gradient_of("evaluate", loss_fn, options, backward=False)
    has_buffers = forward.options.has_buffers
    has_aux = forward.options.has_aux

    def program(params: PyTree, *inputs: PyTree) -> Tensor:
        return forward.differentiable(params, *inputs).loss()

    def run(params: PyTree, *inputs: PyTree) -> Any:
        if transformed():  # the engine's forward records nothing
            return program(params, *inputs)
        recorded_inputs = RecordedInputs.of(params, *inputs)
        buffers, batch = inputs if has_buffers else ((), *inputs)
        validate_run(forward.mesh, "evaluate", params=params, buffers=buffers, batch=batch)
        with torch.inference_mode(False), torch.no_grad():
            value, _ = forward.run(params, buffers, batch, call_site())
        loss = value.loss
        if recorded_inputs is not None and forward.mesh.is_member:
            loss = recorded_inputs.attach(program, loss)
        return (loss, value.aux) if has_aux else loss

    return run
