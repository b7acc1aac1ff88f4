"""Exercises of the notebook "ZeRO from nothing": five stops, the last is a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard.testing.grading import (
    Answer,
    Cases,
    Exercise,
    PerDevice,
    WrongAnswer,
    call,
    is_same,
    mistake,
    on_devices,
)

__all__ = ["EXERCISES"]

LAYERS = 3
STEPS = 3


def loss_of(params: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of the model of all pages in 40 lines, as on one device."""
    for w in params:
        x = torch.tanh(x @ w)
    return (x - y).square().mean()


def model_and_batch(devices: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return weights and a batch, in float64."""
    draw = torch.Generator().manual_seed(devices)
    width = 2 * devices
    weights = [torch.randn(width, width, generator=draw).double() for _ in range(LAYERS)]
    x, y = torch.randn(2, 3 * devices, width, generator=draw).double()
    return [w / width**0.5 for w in weights], x, y


def momentum_of(devices: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 + devices)
    width = 2 * devices
    return [torch.randn(width, width, generator=draw).double() for _ in range(LAYERS)]


def loss_and_grads(devices: int) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of the batch and its gradient, as on one device."""
    params, x, y = model_and_batch(devices)
    grads, loss = torch.func.grad_and_value(loss_of)(params, x, y)
    return loss, grads


def batch_rows(devices: int) -> tuple[PerDevice, PerDevice]:
    """Return the inputs and the targets of each device."""
    _, x, y = model_and_batch(devices)
    return PerDevice(x.chunk(devices)), PerDevice(y.chunk(devices))


def rows_of_devices(tensors: Sequence[Tensor], devices: int) -> PerDevice:
    """Return the rows of all tensors that each device has."""
    return PerDevice([x.chunk(devices)[i] for x in tensors] for i in range(devices))


# -- 1. reduce the gradients ----------------------------------------------------------------------


def run_reduce(answer: Answer, devices: int) -> PerDevice:
    mesh = fs.make_mesh({"data": devices})
    params, _, _ = model_and_batch(devices)
    with fs.ledger() as comm:
        results = on_devices(answer, mesh, params, *batch_rows(devices), loss_of)
    if comm.calls() >= LAYERS and is_same(results, reduced(devices)):
        raise WrongAnswer(
            f"The values are right, by {comm.calls()} collectives. `fs.pmean` takes a tree: all"
            " gradients, and the loss, are one call."
        )
    return results


def reduced(devices: int) -> list[tuple[Tensor, list[Tensor]]]:
    return [loss_and_grads(devices)] * devices


def of_own_rows(params: Any, x: Tensor, y: Tensor, loss_of: Any) -> tuple[Tensor, list[Tensor]]:
    grads, loss = torch.func.grad_and_value(loss_of)(params, x, y)
    return loss, grads


@mistake("Each device has the gradient of its own rows: the replicas drift apart.")
def not_reduced(params: Any, x: Tensor, y: Tensor, loss_of: Any) -> Any:
    return of_own_rows(params, x, y, loss_of)


@mistake(
    "The sum over devices is n times the gradient of the mean. It acts as a learning rate that"
    " grows with the cluster."
)
def summed(params: Any, x: Tensor, y: Tensor, loss_of: Any) -> Any:
    return fs.psum(of_own_rows(params, x, y, loss_of), "data")


@mistake("The gradients are right. The loss is that of the device's own rows.")
def loss_not_reduced(params: Any, x: Tensor, y: Tensor, loss_of: Any) -> Any:
    loss, grads = of_own_rows(params, x, y, loss_of)
    return loss, fs.pmean(grads, "data")


@mistake("The order is (loss, grads), as in `fs.value_and_grad`.")
def gradients_first(params: Any, x: Tensor, y: Tensor, loss_of: Any) -> Any:
    loss, grads = fs.pmean(of_own_rows(params, x, y, loss_of), "data")
    return grads, loss


REDUCE = Exercise(
    name="from_nothing.reduce",
    question=(
        "Data parallelism. Each device has all `params`, a list of matrices, and its rows `x`, `y`"
        " of the batch. Return the loss of the entire batch and its gradient, a list: `(loss,"
        " grads)`, equal on all devices, by one collective. `loss_of(params, x, y)` is the loss on"
        " one device."
    ),
    form="answer(params, x, y, loss_of)",
    hints=(
        "`torch.func.grad_and_value(loss_of)(params, x, y)` returns (grads, loss) of the own rows.",
        "Devices have equally many rows, so the mean over the batch is the mean of their means.",
        '`fs.pmean((loss, grads), "data")` takes the tree.',
    ),
    why="It is DistributedDataParallel; its buckets and hooks only start this call earlier.",
    grade=Cases(
        cases=[(2,), (3,)],
        truth=reduced,
        mistakes=(not_reduced, summed, loss_not_reduced, gradients_first),
        run=run_reduce,
    ),
)


# -- 2. shard the state ---------------------------------------------------------------------------


def run_state(answer: Answer, devices: int) -> PerDevice:
    mesh = fs.make_mesh({"data": devices})
    params, _, _ = model_and_batch(devices)
    moments = rows_of_devices(momentum_of(devices), devices)
    grads = PerDevice()
    for x, y in zip(*batch_rows(devices), strict=True):
        grads.append(torch.func.grad(loss_of)(params, x, y))

    with fs.ledger() as comm:
        results = on_devices(answer, mesh, params, moments, grads)
    bytes_of_psum = 2 * Fraction(devices - 1, devices) * sum(w.nbytes for w in params)
    if comm.bytes() > bytes_of_psum and is_same(results, updated(devices)):
        raise WrongAnswer(
            f"The values are right, but a device sends {float(comm.bytes()):g} bytes, and"
            f" {float(bytes_of_psum):g} are enough: reduce-scatter the gradients, update your rows,"
            " gather the parameters."
        )
    return results


def updated(devices: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return the full parameters and the device's rows of the momentum after a step."""
    params, _, _ = model_and_batch(devices)
    _, grads = loss_and_grads(devices)
    params, moments = momentum_step(params, momentum_of(devices), grads)
    return [(params, rows) for rows in rows_of_devices(moments, devices)]


def momentum_step(
    params: Sequence[Tensor], moments: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters and momentum after a step, of full tensors or of rows."""
    moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
    params = [w - 0.1 * m for w, m in zip(params, moments, strict=True)]
    return params, moments


def own_rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    n = fs.axis_size("data")
    index = fs.axis_index("data")
    return [x.chunk(n)[index] for x in tensors]


def own_rows_of_mean(grads: list[Tensor]) -> list[Tensor]:
    n = fs.axis_size("data")
    return [g / n for g in fs.psum_scatter(grads, "data")]


@mistake(
    "Each device returns its own rows of the parameters. The next forward needs all: gather them."
)
def params_not_gathered(params: Any, moments: Any, grads: Any) -> Any:
    return momentum_step(own_rows(params), moments, own_rows_of_mean(grads))


@mistake("The gradient is summed, not averaged: the loss is a mean over the batch.")
def gradient_of_sum(params: Any, moments: Any, grads: Any) -> Any:
    grad_rows = fs.psum_scatter(grads, "data")
    rows, moments = momentum_step(own_rows(params), moments, grad_rows)
    return fs.all_gather(rows, "data"), moments


@mistake("The rows are updated by the device's own gradient. Those of the others must be added.")
def gradient_of_own_rows(params: Any, moments: Any, grads: Any) -> Any:
    rows, moments = momentum_step(own_rows(params), moments, own_rows(grads))
    return fs.all_gather(rows, "data"), moments


@mistake("The parameters move by the gradient. They should move by the momentum.")
def moved_by_gradient(params: Any, moments: Any, grads: Any) -> Any:
    grad_rows = own_rows_of_mean(grads)
    _, moments = momentum_step(own_rows(params), moments, grad_rows)
    rows = [w - 0.1 * g for w, g in zip(own_rows(params), grad_rows, strict=True)]
    return fs.all_gather(rows, "data"), moments


STATE = Exercise(
    name="from_nothing.state",
    question=(
        "ZeRO-2. `params` are full; of the momentum each device has its rows alone, `moments`;"
        " `grads` are the full gradients of the device's own rows of the batch. Make the step m ="
        " 0.9 m + g, w = w - 0.1 m, with g the mean over devices. Return the full new parameters"
        " and the device's rows of the momentum, `(params, moments)`, lists. Send no more than a"
        " `psum` would."
    ),
    form="answer(params, moments, grads)",
    hints=(
        "Of g a device needs its own rows: which collective sums, and leaves it these?",
        'Update the rows: of a weight they are `w.chunk(n)[fs.axis_index("data")]`.',
        'Then `fs.all_gather(rows, "data")`, which takes the list.',
    ),
    why="The state costs 1/n, and not one byte more is sent: there is no reason for stage 0.",
    grade=Cases(
        cases=[(2,), (3,)],
        truth=updated,
        mistakes=(params_not_gathered, gradient_of_sum, gradient_of_own_rows, moved_by_gradient),
        run=run_state,
    ),
)


# -- 3. shard the parameters ----------------------------------------------------------------------


def run_params(answer: Answer, devices: int) -> PerDevice:
    """Return the loss and the rows of the gradient on each device."""

    def on_device(shards: list[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        leaves = [w.clone().requires_grad_() for w in shards]
        loss = answer(leaves, x, y)
        if not isinstance(loss, Tensor) or loss.shape != () or not loss.requires_grad:
            raise WrongAnswer("The answer must return a loss of the shards, with its gradient.")
        return loss.detach(), list(torch.autograd.grad(loss, leaves))

    mesh = fs.make_mesh({"data": devices})
    params, _, _ = model_and_batch(devices)
    shards = rows_of_devices(params, devices)
    with fs.ledger() as comm:
        results = on_devices(on_device, mesh, shards, *batch_rows(devices))
    if comm.calls(collective="all_gather") < LAYERS and is_same(results, differentiated(devices)):
        raise WrongAnswer(
            "Right, but all parameters are gathered at once, so each device has the full model for"
            " the entire step. Gather each weight where it is used."
        )
    return results


def differentiated(devices: int) -> list[tuple[Tensor, list[Tensor]]]:
    loss, grads = loss_and_grads(devices)
    return [(loss, rows) for rows in rows_of_devices(grads, devices)]


def loss_of_own_rows(shards: Any, x: Tensor, y: Tensor, to: Any = "varying") -> Tensor:
    """Return the loss of the device's rows, with each weight gathered at its use."""
    for shard in shards:
        x = torch.tanh(x @ fs.all_gather(shard, "data", to=to))
    return (x - y).square().mean()


def mean_loss(shards: Any, x: Tensor, y: Tensor) -> Tensor:
    return fs.pmean(loss_of_own_rows(shards, x, y), "data")


def loss_of_replicated(shards: Any, x: Tensor, y: Tensor) -> Tensor:
    return fs.pmean(loss_of_own_rows(shards, x, y, to="replicated"), "data")


def sum_of_losses(shards: Any, x: Tensor, y: Tensor) -> Tensor:
    return fs.psum(loss_of_own_rows(shards, x, y), "data")


@mistake(
    'The gradients have the device\'s own rows of the batch alone: `to="replicated"` promises that'
    " all devices compute the same, which they do not."
)
def gathered_as_replicated(shards: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss_of_replicated(shards, x, y)


@mistake("Loss and gradients are n times too large: take `fs.pmean`, not `fs.psum`.")
def loss_summed(shards: Any, x: Tensor, y: Tensor) -> Tensor:
    return sum_of_losses(shards, x, y)


@mistake(
    "The loss is not averaged, so it is that of the own rows, and gradients are n times too large."
)
def loss_not_averaged(shards: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss_of_own_rows(shards, x, y)


PARAMS = Exercise(
    name="from_nothing.params",
    question=(
        "ZeRO-3. A device has its rows of each weight, the list `shards`, and its rows `x`, `y` of"
        " the batch. Return the loss of the entire batch, as a function that autograd"
        " differentiates to the device's rows of the gradient: for each weight x = tanh(x @ w),"
        " then the mean square of x - y. No device should have two full weights for longer than it"
        " must: gather each at its use."
    ),
    form="answer(shards, x, y)",
    hints=(
        "In the loop over `shards`: gather, multiply, tanh.",
        'The backward of `fs.all_gather(shard, "data")` is a reduce-scatter: the sum over devices.',
        "The loss is `fs.pmean` of the device's loss.",
    ),
    why="Compare it with a wrapper of 5,000 lines: hooks do nothing else, at the same two moments.",
    grade=Cases(
        cases=[(2,), (3,)],
        truth=differentiated,
        mistakes=(gathered_as_replicated, loss_summed, loss_not_averaged),
        run=run_params,
    ),
)


# -- 4. prefetch ----------------------------------------------------------------------------------


class _GatherRecorder:
    """Gathers of layers that take until they are waited for, and the order of all calls."""

    def __init__(self, layers: int) -> None:
        self.events: list[tuple[str, int]] = []
        self.shards = [torch.tensor(float(number)) for number in range(layers)]

    def start(self, shard: Any) -> _GatherHandle:
        """Start to gather a shard."""
        number = self._number_of(shard)
        self.events.append(("start", number))
        return _GatherHandle(self, number)

    def layer(self, weight: Any, x: Tensor) -> Tensor:
        """Compute a layer."""
        if not isinstance(weight, Tensor):
            raise WrongAnswer("`layer` needs a weight: wait for the handle, `handle.wait()`.")
        if weight.dtype != torch.float64:
            raise WrongAnswer("`layer` is called with a shard. Gather it: `start(shard).wait()`.")
        self.events.append(("layer", int(weight)))
        return x * 2 + weight

    def _number_of(self, shard: Any) -> int:
        for number, known_shard in enumerate(self.shards):
            if shard is known_shard:
                return number
        raise WrongAnswer("`start` takes one of the shards.")


class _GatherHandle:
    """A gather that was started."""

    def __init__(self, recorder: _GatherRecorder, number: int) -> None:
        self._recorder = recorder
        self._number = number

    def wait(self) -> Tensor:
        """Return the full weight."""
        self._recorder.events.append(("wait", self._number))
        return torch.tensor(float(self._number), dtype=torch.float64)


def grade_prefetch(answer: Answer) -> None:
    for layers in (1, 4):
        recorder = _GatherRecorder(layers)
        result = answer(recorder.shards, torch.zeros(()), recorder.start, recorder.layer)
        grade_events(recorder.events, layers)

        expected = torch.zeros(())
        for number in range(layers):
            expected = expected * 2 + number
        if not is_same(result, expected):
            raise WrongAnswer("The answer must return the result of the last layer.")


def grade_events(events: list[tuple[str, int]], layers: int) -> None:
    starts = [number for kind, number in events if kind == "start"]
    if sorted(starts) != list(range(layers)):
        raise WrongAnswer(f"Of {layers} shards it gathers {starts}; each must be gathered once.")
    used = [number for kind, number in events if kind == "layer"]
    if used != list(range(layers)):
        raise WrongAnswer(f"The layers run in the order {used}.")

    for number in range(layers):
        events_before = events[: events.index(("layer", number))]
        started = [n for kind, n in events_before if kind == "start"]
        ahead = number + 1
        if ahead < layers and ahead not in started:
            raise WrongAnswer(
                f"Layer {number} computes while nothing is on its way: start the gather of layer"
                f" {ahead} before it."
            )
        too_early = [n for n in started if n > ahead]
        if too_early:
            raise WrongAnswer(
                f"While layer {number} computes, layer {too_early[0]} is gathered already: the full"
                " model is in memory again. One ahead is enough."
            )


PREFETCH = Exercise(
    name="from_nothing.prefetch",
    question=(
        "Prefetch. `start(shard)` starts to gather and returns a handle, whose `wait()` returns the"
        " full weight; `layer(w, x)` computes. Apply all layers to `x`, such that while one"
        " computes the next weight, and no other, is on its way. Return the last result."
    ),
    form="answer(shards, x, start, layer)",
    hints=(
        "Start the first before the loop.",
        "In the loop: wait for this one, start the next one, compute.",
        "The last layer has no next one.",
    ),
    why="The gather now costs nothing as long as it is shorter than a layer: ZeRO-3 at full speed.",
    grade=grade_prefetch,
)


# -- 5. a step that is certified ------------------------------------------------------------------


def run_steps(answer: Answer, devices: int) -> PerDevice:
    """Return the device's rows after some steps, and the losses of the steps."""

    def on_device(shards: Any, x: Tensor, y: Tensor) -> tuple[Any, Any, list[Any]]:
        moments = [torch.zeros_like(w) for w in shards]
        losses: list[Any] = []
        for _ in range(STEPS):
            result = call(answer, shards, moments, x, y)
            if not isinstance(result, tuple) or len(result) != 3:
                raise WrongAnswer("The answer must return (shards, moments, loss).")
            shards, moments, loss = result
            losses.append(loss)
        return shards, moments, losses

    mesh = fs.make_mesh({"data": devices})
    params, _, _ = model_and_batch(devices)
    shards = rows_of_devices(params, devices)
    with fs.ledger() as comm:
        results = on_devices(on_device, mesh, shards, *batch_rows(devices))
    if not comm.calls(collective="psum_scatter") and is_same(results, trained(devices)):
        raise WrongAnswer(
            "Right, but gradients are reduced in full. Differentiate the gathers: their backward"
            " is a reduce-scatter."
        )
    return results


def trained(devices: int) -> list[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """Train on one device; return each device's rows, and the losses."""
    params, x, y = model_and_batch(devices)
    moments = [torch.zeros_like(w) for w in params]
    losses: list[Tensor] = []
    for _ in range(STEPS):
        grads, loss = torch.func.grad_and_value(loss_of)(params, x, y)
        params, moments = momentum_step(params, moments, grads)
        losses.append(loss)

    param_rows = rows_of_devices(params, devices)
    moment_rows = rows_of_devices(moments, devices)
    return [(w, m, losses) for w, m in zip(param_rows, moment_rows, strict=True)]


def step_of_loss(
    loss_fn: Callable[..., Tensor], shards: Any, moments: Any, x: Tensor, y: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    grads, loss = torch.func.grad_and_value(loss_fn)(shards, x, y)
    shards, moments = momentum_step(shards, moments, grads)
    return shards, moments, loss


@mistake(
    "The first loss is right and the next is not: gradients are of the own rows alone. A gather"
    ' that varies, without `to="replicated"`, adds them.'
)
def step_of_replicated(shards: Any, moments: Any, x: Tensor, y: Tensor) -> Any:
    return step_of_loss(loss_of_replicated, shards, moments, x, y)


@mistake("The loss is n times too large, and so is each step: average it.")
def step_of_sum(shards: Any, moments: Any, x: Tensor, y: Tensor) -> Any:
    return step_of_loss(sum_of_losses, shards, moments, x, y)


@mistake("Each device returns the loss of its own rows, and gradients are summed, not averaged.")
def step_of_own_rows(shards: Any, moments: Any, x: Tensor, y: Tensor) -> Any:
    return step_of_loss(loss_of_own_rows, shards, moments, x, y)


@mistake("The momentum is updated and not used: the weights move by the gradient.")
def step_without_momentum(shards: Any, moments: Any, x: Tensor, y: Tensor) -> Any:
    grads, loss = torch.func.grad_and_value(mean_loss)(shards, x, y)
    _, moments = momentum_step(shards, moments, grads)
    shards = [w - 0.1 * g for w, g in zip(shards, grads, strict=True)]
    return shards, moments, loss


STEP = Exercise(
    name="from_nothing.step",
    question=(
        "A training step of ZeRO-3, all of it: from the device's rows of weights and momentum,"
        " `shards` and `moments`, and its rows of the batch, to `(shards, moments, loss)`, with m ="
        " 0.9 m + g and w = w - 0.1 m. The check trains three steps in float64 on two and three"
        " devices, and on one."
    ),
    form="answer(shards, moments, x, y)",
    hints=(
        "Your loss of stop 3 is a function of shards. What differentiates it?",
        "`torch.func.grad_and_value(loss)(shards, x, y)` returns the shards of the gradient.",
        "The update is elementwise, so it runs on shards as it is.",
    ),
    why=(
        "Put it into a file, and `fshard certify` compares it in processes: the last block of the"
        " page."
    ),
    grade=Cases(
        cases=[(2,), (3,)],
        truth=trained,
        mistakes=(step_of_replicated, step_of_sum, step_of_own_rows, step_without_momentum),
        run=run_steps,
    ),
)

EXERCISES = (REDUCE, STATE, PARAMS, PREFETCH, STEP)
