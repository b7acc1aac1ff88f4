"""Exercises of the notebook "ZeRO from nothing": five stops, the last is a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard.testing.grading import (
    Exercise,
    PerDevice,
    WrongAnswer,
    as_function,
    call,
    grade_cases,
    is_same,
    on_devices,
)

_LAYERS = 3


def loss_of(params: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of the model of all pages in 40 lines, as on one device."""
    for w in params:
        x = torch.tanh(x @ w)
    return (x - y).square().mean()


def _model(n: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return weights and a batch for n devices, in float64."""
    draw = torch.Generator().manual_seed(n)
    width = 2 * n
    weights = [torch.randn(width, width, generator=draw).double() for _ in range(_LAYERS)]
    x, y = torch.randn(2, 3 * n, width, generator=draw).double()
    return [w / width**0.5 for w in weights], x, y


def _gradient(n: int) -> tuple[Tensor, list[Tensor]]:
    grads, loss = torch.func.grad_and_value(loss_of)(*_model(n))
    return loss, grads


def _shards(tensors: Sequence[Tensor], n: int) -> PerDevice:
    """Return the rows of all tensors that each device has."""
    return PerDevice([x.chunk(n)[i] for x in tensors] for i in range(n))


def _rows(n: int) -> tuple[PerDevice, PerDevice]:
    _, x, y = _model(n)
    return PerDevice(x.chunk(n)), PerDevice(y.chunk(n))


# -- 1. reduce the gradients ----------------------------------------------------------------------


def _run_reduce(function: Any, n: int) -> Any:
    params = _model(n)[0]
    with fs.ledger() as comm:
        results = on_devices(function, fs.make_mesh({"data": n}), params, *_rows(n), loss_of)
    is_right = is_same(results, _reduced(n))
    if is_right and comm.calls() >= _LAYERS:
        raise WrongAnswer(
            f"The values are right, by {comm.calls()} collectives. `fs.pmean` takes a tree: all"
            " gradients, and the loss, are one call."
        )
    return results


def _reduced(n: int) -> list[Any]:
    return [_gradient(n)] * n


def _local(params: Any, x: Tensor, y: Tensor, loss_of: Any) -> Any:
    grads, loss = torch.func.grad_and_value(loss_of)(params, x, y)
    return loss, grads


def _added(params: Any, x: Tensor, y: Tensor, loss_of: Any) -> Any:
    return fs.psum(_local(params, x, y, loss_of), "data")


def _loss_of_device(params: Any, x: Tensor, y: Tensor, loss_of: Any) -> Any:
    loss, grads = _local(params, x, y, loss_of)
    return loss, fs.pmean(grads, "data")


REDUCE = Exercise(
    "from_nothing.reduce",
    "Data parallelism. Each device has all `params`, a list of matrices, and its rows `x`, `y`"
    " of the"
    " batch. Return the loss of the entire batch and its gradient, a list: `(loss, grads)`,"
    " equal on"
    " all devices, by one collective. `loss_of(params, x, y)` is the loss on one device.",
    "answer(params, x, y, loss_of)",
    (
        "`torch.func.grad_and_value(loss_of)(params, x, y)` returns (grads, loss) of the own rows.",
        "Devices have equally many rows, so the mean over the batch is the mean of their means.",
        '`fs.pmean((loss, grads), "data")` takes the tree.',
    ),
    "It is DistributedDataParallel; its buckets and hooks only start this call earlier.",
    lambda answer: grade_cases(
        answer,
        "answer(params, x, y, loss_of)",
        [(2,), (3,)],
        _reduced,
        {
            "Each device has the gradient of its own rows: the replicas drift apart.": (
                lambda n: _run_reduce(_local, n)
            ),
            "The sum over devices is n times the gradient of the mean. It acts as a learning rate"
            " that grows with the cluster.": lambda n: _run_reduce(_added, n),
            "The gradients are right. The loss is that of the device's own rows.": (
                lambda n: _run_reduce(_loss_of_device, n)
            ),
            "The order is (loss, grads), as in `fs.value_and_grad`.": (
                lambda n: [_gradient(n)[::-1]] * n
            ),
        },
        run=_run_reduce,
        names="devices",
    ),
)

# -- 2. shard the state ---------------------------------------------------------------------------


def _momentum(n: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 + n)
    return [torch.randn(2 * n, 2 * n, generator=draw).double() for _ in range(_LAYERS)]


def _local_grads(n: int) -> PerDevice:
    params, x, y = _model(n)
    pairs = zip(x.chunk(n), y.chunk(n), strict=True)
    return PerDevice(torch.func.grad(loss_of)(params, rows, targets) for rows, targets in pairs)


def _updated(n: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters and momentum after a step on one device."""
    grads = _gradient(n)[1]
    moments = [0.9 * m + g for m, g in zip(_momentum(n), grads, strict=True)]
    return [w - 0.1 * m for w, m in zip(_model(n)[0], moments, strict=True)], moments


def _states(n: int) -> list[Any]:
    params, moments = _updated(n)
    return [(params, own) for own in _shards(moments, n)]


def _run_state(function: Any, n: int) -> Any:
    params = _model(n)[0]
    moments = _shards(_momentum(n), n)
    with fs.ledger() as comm:
        results = on_devices(function, fs.make_mesh({"data": n}), params, moments, _local_grads(n))
    textbook = 2 * Fraction(n - 1, n) * sum(w.nbytes for w in params)
    if is_same(results, _states(n)) and comm.bytes() > textbook:
        raise WrongAnswer(
            f"The values are right, but a device sends {float(comm.bytes()):g} bytes, and"
            f" {float(textbook):g} are enough: reduce-scatter the gradients, update your rows,"
            " gather"
            " the parameters."
        )
    return results


def _own_rows(x: Tensor) -> Tensor:
    return x.chunk(fs.axis_size("data"))[fs.axis_index("data")]


def _update(params: Any, moments: Any, grads: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Update own rows by own rows of gradients."""
    moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
    rows = [_own_rows(w) - 0.1 * m for w, m in zip(params, moments, strict=True)]
    return rows, moments


def _without_gather(params: Any, moments: Any, grads: Any) -> Any:
    grads = [g / fs.axis_size("data") for g in fs.psum_scatter(grads, "data")]
    return _update(params, moments, grads)


def _without_mean(params: Any, moments: Any, grads: Any) -> Any:
    rows, moments = _update(params, moments, fs.psum_scatter(grads, "data"))
    return fs.all_gather(rows, "data"), moments


def _without_sum(params: Any, moments: Any, grads: Any) -> Any:
    rows, moments = _update(params, moments, [_own_rows(g) for g in grads])
    return fs.all_gather(rows, "data"), moments


def _without_momentum(params: Any, moments: Any, grads: Any) -> Any:
    grads = [g / fs.axis_size("data") for g in fs.psum_scatter(grads, "data")]
    moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
    rows = [_own_rows(w) - 0.1 * g for w, g in zip(params, grads, strict=True)]
    return fs.all_gather(rows, "data"), moments


STATE = Exercise(
    "from_nothing.state",
    "ZeRO-2. `params` are full; of the momentum each device has its rows alone, `moments`;"
    " `grads` are"
    " the full gradients of the device's own rows of the batch. Make the step m = 0.9 m + g,"
    " w = w - 0.1 m, with g the mean over devices. Return the full new parameters and the device's"
    " rows of the momentum, `(params, moments)`, lists. Send no more than a `psum` would.",
    "answer(params, moments, grads)",
    (
        "Of g a device needs its own rows: which collective sums, and leaves it these?",
        'Update the rows: of a weight they are `w.chunk(n)[fs.axis_index("data")]`.',
        'Then `fs.all_gather(rows, "data")`, which takes the list.',
    ),
    "The state costs 1/n, and not one byte more is sent: there is no reason for stage 0.",
    lambda answer: grade_cases(
        answer,
        "answer(params, moments, grads)",
        [(2,), (3,)],
        _states,
        {
            "Each device returns its own rows of the parameters. The next forward needs all: gather"
            " them.": lambda n: _run_state(_without_gather, n),
            "The gradient is summed, not averaged: the loss is a mean over the batch.": (
                lambda n: _run_state(_without_mean, n)
            ),
            "The rows are updated by the device's own gradient. Those of the others must be"
            " added.": (lambda n: _run_state(_without_sum, n)),
            "The parameters move by the gradient. They should move by the momentum.": (
                lambda n: _run_state(_without_momentum, n)
            ),
        },
        run=_run_state,
        names="devices",
    ),
)

# -- 3. shard the parameters ----------------------------------------------------------------------


def _run_params(function: Any, n: int) -> Any:
    def on_device(shards: list[Tensor], x: Tensor, y: Tensor) -> Any:
        leaves = [w.clone().requires_grad_() for w in shards]
        loss = function(leaves, x, y)
        if not isinstance(loss, Tensor) or loss.shape != () or not loss.requires_grad:
            raise WrongAnswer("The answer must return a loss of the shards, with its gradient.")
        return loss.detach(), list(torch.autograd.grad(loss, leaves))

    shards = _shards(_model(n)[0], n)
    with fs.ledger() as comm:
        results = on_devices(on_device, fs.make_mesh({"data": n}), shards, *_rows(n))
    if is_same(results, _sharded(n)) and comm.calls(collective="all_gather") < _LAYERS:
        raise WrongAnswer(
            "Right, but all parameters are gathered at once, so each device has the full model for"
            " the entire step. Gather each weight where it is used."
        )
    return results


def _sharded(n: int) -> list[Any]:
    loss, grads = _gradient(n)
    return [(loss, own) for own in _shards(grads, n)]


def _with_gather(**options: Any) -> Callable[..., Any]:
    def loss(shards: Any, x: Tensor, y: Tensor) -> Tensor:
        for shard in shards:
            x = torch.tanh(x @ fs.all_gather(shard, "data", **options))
        return fs.pmean((x - y).square().mean(), "data")

    return loss


def _summed_loss(shards: Any, x: Tensor, y: Tensor) -> Tensor:
    return fs.axis_size("data") * _with_gather()(shards, x, y)


def _local_loss(shards: Any, x: Tensor, y: Tensor) -> Tensor:
    for shard in shards:
        x = torch.tanh(x @ fs.all_gather(shard, "data"))
    return (x - y).square().mean()


PARAMS = Exercise(
    "from_nothing.params",
    "ZeRO-3. A device has its rows of each weight, the list `shards`, and its rows `x`, `y` of the"
    " batch. Return the loss of the entire batch, as a function that autograd differentiates to the"
    " device's rows of the gradient: for each weight x = tanh(x @ w), then the mean square of x"
    " - y."
    " No device should have two full weights for longer than it must: gather each at its use.",
    "answer(shards, x, y)",
    (
        "In the loop over `shards`: gather, multiply, tanh.",
        'The backward of `fs.all_gather(shard, "data")` is a reduce-scatter: the sum over devices.',
        "The loss is `fs.pmean` of the device's loss.",
    ),
    "Compare it with a wrapper of 5,000 lines: hooks do nothing else, at the same two moments.",
    lambda answer: grade_cases(
        answer,
        "answer(shards, x, y)",
        [(2,), (3,)],
        _sharded,
        {
            "The gradients have the device's own rows of the batch alone:"
            ' `to="replicated"` promises that all devices compute the same, which they do not.': (
                lambda n: _run_params(_with_gather(to="replicated"), n)
            ),
            "Loss and gradients are n times too large: take `fs.pmean`, not `fs.psum`.": (
                lambda n: _run_params(_summed_loss, n)
            ),
            "The loss is not averaged, so it is that of the own rows, and gradients are n times too"
            " large.": lambda n: _run_params(_local_loss, n),
        },
        run=_run_params,
        names="devices",
    ),
)

# -- 4. prefetch ----------------------------------------------------------------------------------


class _GatherRecorder:
    """Gathers of layers that take until they are waited for, and the order of all calls."""

    def __init__(self, shards: int) -> None:
        self.events: list[tuple[str, int]] = []
        self.shards = [torch.tensor(float(i)) for i in range(shards)]

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
        for number, own in enumerate(self.shards):
            if shard is own:
                return number
        raise WrongAnswer("`start` takes one of the shards.")


class _GatherHandle:
    def __init__(self, recorder: _GatherRecorder, number: int) -> None:
        self._recorder = recorder
        self._number = number

    def wait(self) -> Tensor:
        """Return the full weight."""
        self._recorder.events.append(("wait", self._number))
        return torch.tensor(float(self._number), dtype=torch.float64)


def _grade_prefetch(answer: Any) -> None:
    function = as_function(answer, "answer(shards, x, start, layer)")
    for layers in (1, 4):
        recorder = _GatherRecorder(layers)
        result = function(recorder.shards, torch.zeros(()), recorder.start, recorder.layer)
        expected = torch.zeros(())
        for number in range(layers):
            expected = expected * 2 + number
        _grade_events(recorder.events, layers)
        if not is_same(result, expected):
            raise WrongAnswer("The answer must return the result of the last layer.")


def _grade_events(events: list[tuple[str, int]], layers: int) -> None:
    starts = [number for kind, number in events if kind == "start"]
    if sorted(starts) != list(range(layers)):
        raise WrongAnswer(f"Of {layers} shards it gathers {starts}; each must be gathered once.")
    used = [number for kind, number in events if kind == "layer"]
    if used != list(range(layers)):
        raise WrongAnswer(f"The layers run in the order {used}.")
    for number in range(layers):
        place = events.index(("layer", number))
        ahead = number + 1
        is_last = ahead == layers
        if not is_last and ("start", ahead) not in events[:place]:
            raise WrongAnswer(
                f"Layer {number} computes while nothing is on its way: start the gather of layer"
                f" {ahead} before it."
            )
        early = [n for kind, n in events[:place] if kind == "start" and n > ahead]
        if early:
            raise WrongAnswer(
                f"While layer {number} computes, layer {early[0]} is gathered already: the full"
                " model"
                " is in memory again. One ahead is enough."
            )


PREFETCH = Exercise(
    "from_nothing.prefetch",
    "Prefetch. `start(shard)` starts to gather and returns a handle, whose `wait()` returns the"
    " full"
    " weight; `layer(w, x)` computes. Apply all layers to `x`, such that while one computes the"
    " next"
    " weight, and no other, is on its way. Return the last result.",
    "answer(shards, x, start, layer)",
    (
        "Start the first before the loop.",
        "In the loop: wait for this one, start the next one, compute.",
        "The last layer has no next one.",
    ),
    "The gather now costs nothing as long as it is shorter than a layer: ZeRO-3 at full speed.",
    _grade_prefetch,
)

# -- 5. a step that is certified ------------------------------------------------------------------

_STEPS = 3


def _serial_steps(n: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    params, x, y = _model(n)
    moments = [torch.zeros_like(w) for w in params]
    losses: list[Tensor] = []
    for _ in range(_STEPS):
        grads, loss = torch.func.grad_and_value(loss_of)(params, x, y)
        moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
        params = [w - 0.1 * m for w, m in zip(params, moments, strict=True)]
        losses.append(loss)
    return params, moments, losses


def _run_steps(function: Any, n: int) -> Any:
    def on_device(shards: Any, x: Tensor, y: Tensor) -> Any:
        moments = [torch.zeros_like(w) for w in shards]
        losses: list[Tensor] = []
        for _ in range(_STEPS):
            result = call(function, shards, moments, x, y)
            if not isinstance(result, tuple) or len(result) != 3:
                raise WrongAnswer("The answer must return (shards, moments, loss).")
            shards, moments, loss = result
            losses.append(loss)
        return shards, moments, losses

    shards = _shards(_model(n)[0], n)
    with fs.ledger() as comm:
        results = on_devices(on_device, fs.make_mesh({"data": n}), shards, *_rows(n))
    if not comm.calls(collective="psum_scatter") and is_same(results, _trained(n)):
        raise WrongAnswer(
            "Right, but gradients are reduced in full. Differentiate the gathers: their backward"
            " is a reduce-scatter."
        )
    return results


def _trained(n: int) -> list[Any]:
    params, moments, losses = _serial_steps(n)
    pairs = zip(_shards(params, n), _shards(moments, n), strict=True)
    return [(own_params, own_moments, losses) for own_params, own_moments in pairs]


def _step_of(loss_fn: Any, *, is_momentum_used: bool = True) -> Callable[..., Any]:
    def step(shards: Any, moments: Any, x: Tensor, y: Tensor) -> Any:
        grads, loss = torch.func.grad_and_value(loss_fn)(shards, x, y)
        moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
        moves = moments if is_momentum_used else grads
        return [w - 0.1 * m for w, m in zip(shards, moves, strict=True)], moments, loss

    return step


STEP = Exercise(
    "from_nothing.step",
    "A training step of ZeRO-3, all of it: from the device's rows of weights and momentum, `shards`"
    " and `moments`, and its rows of the batch, to `(shards, moments, loss)`, with m = 0.9 m + g"
    " and"
    " w = w - 0.1 m. The check trains three steps in float64 on two and three devices, and on one.",
    "answer(shards, moments, x, y)",
    (
        "Your loss of stop 3 is a function of shards. What differentiates it?",
        "`torch.func.grad_and_value(loss)(shards, x, y)` returns the shards of the gradient.",
        "The update is elementwise, so it runs on shards as it is.",
    ),
    "Put it into a file, and `fshard certify` compares it in processes: the last block of the"
    " page.",
    lambda answer: grade_cases(
        answer,
        "answer(shards, moments, x, y)",
        [(2,), (3,)],
        _trained,
        {
            "The first loss is right and the next is not: gradients are of the own rows alone. A"
            ' gather that varies, without `to="replicated"`, adds them.': (
                lambda n: _run_steps(_step_of(_with_gather(to="replicated")), n)
            ),
            "The loss is n times too large, and so is each step: average it.": (
                lambda n: _run_steps(_step_of(_summed_loss), n)
            ),
            "Each device returns the loss of its own rows, and gradients are summed, not"
            " averaged.": (lambda n: _run_steps(_step_of(_local_loss), n)),
            "The momentum is updated and not used: the weights move by the gradient.": (
                lambda n: _run_steps(_step_of(_with_gather(), is_momentum_used=False), n)
            ),
        },
        run=_run_steps,
        names="devices",
    ),
)

EXERCISES = (REDUCE, STATE, PARAMS, PREFETCH, STEP)
