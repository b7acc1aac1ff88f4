"""Exercises of the notebook "ZeRO is a table of layouts"."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import torch
from optree import tree_leaves
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.testing.grading import (
    Exercise,
    PerDevice,
    WrongAnswer,
    as_function,
    grade_cases,
    grade_results,
    is_same,
    loss_and_gradient,
    on_devices,
    sent,
)


def _bytes_on_a_device(tree: Any) -> int:
    leaves = tree_leaves(tree, namespace="fshard")
    return sum(x.shards[0].nbytes for x in leaves if isinstance(x, fs.Sharded))


@cache
def _stored(numbers: int, n: int, stage: Any) -> tuple[int, int, int]:
    """Count the bytes of parameters, gradients and Adam's state that a device stores."""
    mesh = fs.make_mesh({"data": n})
    rules = fs.fsdp("data") if stage == 3 else P()
    params = fs.shard_params({"w": torch.ones(numbers)}, rules, mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(1e-3), mesh=mesh, axis="data", stage=stage)

    def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (params["w"] * x.sum()).sum()

    gradient = fs.grad(loss_fn, mesh=mesh, batch=P("data"), gradients=opt.gradients)
    grads = gradient(params, torch.ones(n))
    params_bytes = _bytes_on_a_device(params)
    grads_bytes = _bytes_on_a_device(grads)
    return params_bytes, grads_bytes, _bytes_on_a_device(opt.init(params))


def _flat_bytes(numbers: int, n: int, stage: int) -> int:
    return sum(_stored(numbers, n, stage))


FLAT_BYTES = Exercise(
    "zero.flat_bytes",
    "A model has `numbers` parameters in float32 and is trained by Adam on `n` devices, which"
    " divide"
    " `numbers`. How many bytes of parameters, gradients and optimizer state does one device store"
    " in ZeRO stage 0, 1, 2 or 3?",
    "answer(numbers, n, stage)",
    (
        "Without sharding it is 16 bytes a parameter: 4, 4, and twice 4.",
        "Which of the three trees does a stage shard? It is a row of the first table.",
        "Stage 0: (4 + 4 + 8) B. Stages 1 and 2: gradients and state are divided by n.",
    ),
    "These 16 bytes are why a model that computes on one device may not train on it.",
    lambda answer: grade_cases(
        answer,
        "answer(numbers, n, stage)",
        [(48, 3, 0), (48, 3, 1), (40, 5, 2), (48, 4, 3), (48, 1, 3)],
        _flat_bytes,
        {
            "Adam has two running means, so its state is 8 bytes a parameter, not 4.": (
                lambda numbers, n, stage: (
                    _flat_bytes(numbers, n, stage) - _stored(numbers, n, stage)[2] // 2
                )
            ),
            "That is a number of elements. A float32 has 4 bytes.": (
                lambda numbers, n, stage: Fraction(_flat_bytes(numbers, n, stage), 4)
            ),
            "Stages 1 and 2 do not shard the parameters: each device stores all of them.": (
                lambda numbers, n, stage: 16 * numbers if stage == 0 else Fraction(16 * numbers, n)
            ),
            "All stages are the same in it. Stage 3 shards all three trees, stage 0 none.": (
                lambda numbers, n, stage: 16 * numbers
            ),
            "Stage 1 shards the gradients, too: their sum is only needed where the state is.": (
                lambda numbers, n, stage: (
                    _flat_bytes(numbers, n, stage)
                    + (4 * numbers - 4 * numbers // n if stage == 1 else 0)
                )
            ),
        },
    ),
)


@cache
def _sent(stage: int, n: int, numbers: int) -> int | Fraction:
    """Count the bytes of the collectives of a stage, on devices without values."""
    mesh = fs.make_mesh({"data": n}, runtime="abstract")
    full = torch.empty(numbers, device="meta")
    shard = torch.empty(numbers // n, device="meta")

    def step() -> None:
        if stage == 0:
            fs.psum(full, "data")
            return
        fs.psum_scatter(full, "data")
        fs.all_gather(shard, "data")
        if stage == 3:
            fs.all_gather(shard, "data")

    return sent(lambda: fs.run(step, mesh=mesh))


SENT = Exercise(
    "zero.sent",
    "How many bytes does a device send in a step of ZeRO stage 0, 1, 2 or 3, for `numbers` float32"
    " parameters on `n` devices? Stage 3 gathers parameters for the forward and again for the"
    " backward. Losses and norms do not count.",
    "answer(stage, n, numbers)",
    (
        "An all-gather or a reduce-scatter of B bytes sends (n - 1)/n B from each device.",
        "A `psum` is both, one after the other.",
        "Stages 0 to 2 have a reduction of gradients and a way back to all devices. Stage 3 gathers"
        " twice and reduces once.",
    ),
    "Stages 1 and 2 cost no byte more than data parallelism; stage 3 costs half as much again.",
    lambda answer: grade_cases(
        answer,
        "answer(stage, n, numbers)",
        [(0, 3, 30), (1, 3, 30), (2, 5, 40), (3, 4, 48), (3, 8, 64)],
        _sent,
        {
            "Stage 3 gathers the parameters twice: for the forward, and again for the backward.": (
                lambda stage, n, numbers: _sent(0, n, numbers)
            ),
            "A device keeps its own n-th, so (n - 1)/n of the bytes are sent, not all.": (
                lambda stage, n, numbers: 4 * numbers * (3 if stage == 3 else 2)
            ),
            "That is a number of elements. A float32 has 4 bytes.": (
                lambda stage, n, numbers: _sent(stage, n, numbers) / 4
            ),
            "That is sent by all devices together. Divide by n.": (
                lambda stage, n, numbers: _sent(stage, n, numbers) * n
            ),
            "Stage 1 sends the new parameters back: the reduction is only one half.": (
                lambda stage, n, numbers: _sent(stage, n, numbers) / (2 if stage in (1, 2) else 1)
            ),
        },
    ),
)


def _grads(n: int) -> PerDevice:
    draw = torch.Generator().manual_seed(n)
    return PerDevice(torch.randn(2 * n, 3, generator=draw) for _ in range(n))


def _grade_reduce(answer: Any) -> None:
    form = "answer(grad)"
    function = as_function(answer, form)
    cases = [(3,), (4,)]
    results: list[Any] = []
    for (n,) in cases:
        mesh = fs.make_mesh({"data": n})
        count = sent(lambda m=mesh, n=n: results.append(on_devices(function, m, _grads(n))))
        if count > _half_of_psum(n) and is_same(results[-1], _mean_shards(n)):
            raise WrongAnswer(
                f"The values are right, but a device sends {float(count):g} bytes, where"
                f" {float(_half_of_psum(n)):g} are enough: one collective sums, and leaves each"
                " device its shard of the sum."
            )
    grade_results(
        results,
        "answer(n)",
        cases,
        _mean_shards,
        {
            "That is the shard of the sum. The loss is a mean over devices, and so is its gradient:"
            ' divide by `fs.axis_size("data")`.': lambda n: [n * x for x in _mean_shards(n)],
            "All devices have all rows of the mean. A device stores its shard alone.": (
                lambda n: [torch.cat(_mean_shards(n))] * n
            ),
            "These are rows of the device's own gradient. Those of other devices must be added.": (
                lambda n: [x.chunk(n)[i] for i, x in enumerate(_grads(n))]
            ),
            'It divides by 4, whatever the mesh is. The size is `fs.axis_size("data")`.': (
                lambda n: [x * n / 4 for x in _mean_shards(n)]
            ),
        },
    )


def _mean_shards(n: int) -> list[Tensor]:
    return list(torch.stack(_grads(n)).mean(0).chunk(n))


def _half_of_psum(n: int) -> Fraction:
    return Fraction(n - 1, n) * _grads(n)[0].nbytes


REDUCE = Exercise(
    "zero.reduce",
    "Each device has computed the full gradient of its own rows. Write what ZeRO-2 does with it, as"
    " a function that runs on each device: it takes the local gradient and returns the device's"
    ' shard (of dim 0, over the axis "data") of the mean over devices. Send no more than needed.',
    "answer(grad)",
    (
        "Which collective sums, and leaves each device a shard of the sum?",
        '`fs.psum_scatter(grad, "data")` is the sum. And the mean?',
        'Divide by `fs.axis_size("data")`.',
    ),
    "This is the transpose of the all-gather of parameters: autograd writes it for you in stage 3.",
    _grade_reduce,
)


def _weights(n: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10 + n)
    return torch.randn(2 * n, 3, generator=draw), torch.randn(2 * n, 2 * n, generator=draw)


def _loss(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w).square().mean()


def _serial(n: int) -> tuple[Tensor, Tensor]:
    w, x = _weights(n)
    grad, loss = torch.func.grad_and_value(_loss)(w, x)
    return loss, grad


def _run_zero3(function: Any, n: int) -> tuple[Any, Any]:
    w, x = _weights(n)
    mesh = fs.make_mesh({"data": n})

    def on_device(shard: Tensor, rows: Tensor) -> tuple[Any, Any]:
        return loss_and_gradient(function, shard, rows)

    rows = PerDevice(x.chunk(n))
    pairs = on_devices(on_device, mesh, PerDevice(w.chunk(n)), rows)
    return [loss for loss, _ in pairs], torch.cat([grad for _, grad in pairs])


def _zero3(n: int) -> tuple[Any, Any]:
    loss, grad = _serial(n)
    return [loss] * n, grad


def _zero3_scaled(n: int) -> tuple[Any, Any]:
    loss, grad = _serial(n)
    return [n * loss] * n, n * grad


def _zero3_own_rows(n: int) -> tuple[Any, Any]:
    """Return the loss if each device takes the gradient of its own rows alone."""
    loss, _ = _serial(n)
    w, x = _weights(n)
    shards = [torch.func.grad(_loss)(w, rows) for rows in x.chunk(n)]
    return [loss] * n, torch.cat([g.chunk(n)[i] / n for i, g in enumerate(shards)])


def _zero3_local(n: int) -> tuple[Any, Any]:
    """Return the loss if it is not averaged."""
    _, grad = _serial(n)
    w, x = _weights(n)
    return [_loss(w, rows) for rows in x.chunk(n)], n * grad


GATHER = Exercise(
    "zero.gather_at_use",
    "Write the loss of ZeRO-3 as a device has it. It gets its `shard` of a weight `w` (rows, over"
    ' "data") and its `rows` of the batch, and returns the mean over all devices of'
    " `torch.tanh(x @ w).square().mean()`. The check takes the gradient of your loss with respect"
    " to the shard.",
    "answer(shard, rows)",
    (
        "First gather the weight, then compute as on one device, then average the loss.",
        "Each device uses the gathered weight with its own rows: it varies, so a plain"
        ' `fs.all_gather` is right, and `to="replicated"` is not.',
        '`w = fs.all_gather(shard, "data")`, then `fs.pmean(..., "data")`.',
    ),
    "Its backward is the reduce-scatter of the exercise before: three lines are ZeRO-3.",
    lambda answer: grade_cases(
        answer,
        "answer(shard, rows)",
        [(3,), (4,)],
        _zero3,
        {
            "Loss and gradient are n times too large: average by `fs.pmean`, do not add by"
            " `fs.psum`.": _zero3_scaled,
            "The loss is right, but the gradient has the device's own rows alone. With"
            ' `to="replicated"` you promise that all devices compute the same with the weight;'
            " they do not.": _zero3_own_rows,
            "Each device returns the loss of its own rows. Average it: `fs.pmean`.": _zero3_local,
        },
        run=_run_zero3,
        names="devices",
    ),
)


def _model(blocks: int) -> dict[str, Any]:
    def block() -> dict[str, Tensor]:
        return {"up": torch.ones(4, 8), "down": torch.ones(8, 4), "norm": torch.ones(4)}

    return {"embed": torch.ones(8, 4), "blocks": [block() for _ in range(blocks)]}


def _specs(rules: Any, blocks: int) -> dict[str, P]:
    mesh = fs.make_mesh({"data": 2, "model": 4})
    params = fs.shard_params(_model(blocks), rules, mesh=mesh)
    specs = {"embed": params["embed"].spec}
    for i, block in enumerate(params["blocks"]):
        specs |= {f"blocks[{i}].{name}": x.spec for name, x in block.items()}
    return specs


def _grade_rules(answer: Any) -> None:
    if isinstance(answer, P) or not isinstance(answer, dict):
        raise WrongAnswer("The answer must be a dict from patterns of names to `P`s.")
    try:
        for blocks in (1, 3):
            _grade_specs(_specs(answer, blocks))
    except (WrongAnswer, fs.errors.LayoutError) as error:
        if any("[0]" in pattern for pattern in answer):
            raise WrongAnswer(
                "Your rules name block 0; the check has a model of three blocks, too. A pattern"
                " for all of them is `blocks[*].up`."
            ) from None
        if "no rule is for" in str(error) and "no leaf is for" not in str(error):
            raise WrongAnswer(
                'Rules must be complete: some leaf has none. `"**": P()` replicates what no'
                " other rule names."
            ) from None
        raise


def _grade_specs(specs: dict[str, P]) -> None:
    for name, spec in specs.items():
        wanted = P() if name.endswith("norm") else P("data")
        if spec == wanted:
            continue
        if name.endswith("norm"):
            raise WrongAnswer(f"`{name}` is a vector, which stays replicated; it is `{spec}`.")
        if spec == P():
            raise WrongAnswer(f"`{name}` is a matrix and is replicated: no rule shards it.")
        raise WrongAnswer(f'`{name}` must be sharded along dim 0 over "data"; it is `{spec}`.')


RULES = Exercise(
    "zero.rules",
    "Write rules for `fs.shard_params`: each matrix of a model with the leaves `embed`,"
    ' `blocks[i].up`, `blocks[i].down` and `blocks[i].norm` is sharded along dim 0 over "data",'
    " and the vectors `norm` are replicated. The number of blocks is not known to you.",
    "answer = {pattern: P(...), ...}",
    (
        "A rule is a pattern of paths and a `P`; `*` is any one index or name.",
        "`blocks[*].up` is `up` of all blocks. What no rule names is an error.",
        '`"**": P()` at the end replicates the rest.',
    ),
    "Rules are data: they outlive a change of the model's depth, and a misspelt one raises.",
    _grade_rules,
)

EXERCISES = (FLAT_BYTES, SENT, REDUCE, GATHER, RULES)
