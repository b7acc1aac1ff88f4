"""Exercises of the notebook "ZeRO is a table of layouts"."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.testing.grading import (
    Answer,
    Cases,
    Exercise,
    PerDevice,
    WrongAnswer,
    is_same,
    loss_and_gradient,
    mistake,
    on_devices,
    sent,
    stored,
)

__all__ = ["EXERCISES"]


# -- the bytes that a device stores ---------------------------------------------------------------


@cache
def stored_by_tree(numbers: int, n: int, stage: Any) -> tuple[int, int, int]:
    """Count the bytes of parameters, gradients and Adam's state that a device stores."""
    mesh = fs.make_mesh({"data": n})
    rules = fs.fsdp("data") if stage == 3 else P()
    params = fs.shard_params({"w": torch.ones(numbers)}, rules, mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(1e-3), mesh=mesh, axis="data", stage=stage)

    def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (params["w"] * x.sum()).sum()

    gradient = fs.grad(loss_fn, mesh=mesh, batch=P("data"), gradients=opt.gradients)
    grads = gradient(params, torch.ones(n))
    return stored(params), stored(grads), stored(opt.init(params))


def flat_bytes(numbers: int, n: int, stage: int) -> int:
    return sum(stored_by_tree(numbers, n, stage))


@mistake("Adam has two running means, so its state is 8 bytes a parameter, not 4.")
def with_one_running_mean(numbers: int, n: int, stage: int) -> int:
    _, _, state_bytes = stored_by_tree(numbers, n, stage)
    return flat_bytes(numbers, n, stage) - state_bytes // 2


@mistake("That is a number of elements. A float32 has 4 bytes.")
def stored_elements(numbers: int, n: int, stage: int) -> Fraction:
    return Fraction(flat_bytes(numbers, n, stage), 4)


@mistake("Stages 1 and 2 do not shard the parameters: each device stores all of them.")
def with_all_stages_as_3(numbers: int, n: int, stage: int) -> Fraction:
    devices_of_a_tree = 1 if stage == 0 else n
    return Fraction(16 * numbers, devices_of_a_tree)


@mistake("All stages are the same in it. Stage 3 shards all three trees, stage 0 none.")
def with_all_stages_as_0(numbers: int, n: int, stage: int) -> int:
    return 16 * numbers


@mistake("Stage 1 shards the gradients, too: their sum is only needed where the state is.")
def with_full_gradients_in_stage_1(numbers: int, n: int, stage: int) -> int:
    count = flat_bytes(numbers, n, stage)
    if stage == 1:
        count += 4 * numbers - 4 * numbers // n
    return count


FLAT_BYTES = Exercise(
    name="zero.flat_bytes",
    question=(
        "A model has `numbers` parameters in float32 and is trained by Adam on `n` devices, which"
        " divide `numbers`. How many bytes of parameters, gradients and optimizer state does one"
        " device store in ZeRO stage 0, 1, 2 or 3?"
    ),
    form="answer(numbers, n, stage)",
    hints=(
        "Without sharding it is 16 bytes a parameter: 4, 4, and twice 4.",
        "Which of the three trees does a stage shard? It is a row of the first table.",
        "Stage 0: (4 + 4 + 8) B. Stages 1 and 2: gradients and state are divided by n.",
    ),
    why="These 16 bytes are why a model that computes on one device may not train on it.",
    grade=Cases(
        cases=[(48, 3, 0), (48, 3, 1), (40, 5, 2), (48, 4, 3), (48, 1, 3)],
        truth=flat_bytes,
        mistakes=(
            with_one_running_mean,
            stored_elements,
            with_all_stages_as_3,
            with_all_stages_as_0,
            with_full_gradients_in_stage_1,
        ),
    ),
)


# -- the bytes that a device sends ----------------------------------------------------------------


@cache
def sent_in_a_step(stage: int, n: int, numbers: int) -> Fraction:
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


@mistake("Stage 3 gathers the parameters twice: for the forward, and again for the backward.")
def with_one_gather(stage: int, n: int, numbers: int) -> Fraction:
    return sent_in_a_step(0, n, numbers)


@mistake("A device keeps its own n-th, so (n - 1)/n of the bytes are sent, not all.")
def with_own_shards(stage: int, n: int, numbers: int) -> int:
    collectives = 3 if stage == 3 else 2
    return 4 * numbers * collectives


@mistake("That is a number of elements. A float32 has 4 bytes.")
def sent_elements(stage: int, n: int, numbers: int) -> Fraction:
    return sent_in_a_step(stage, n, numbers) / 4


@mistake("That is sent by all devices together. Divide by n.")
def sent_by_all_devices(stage: int, n: int, numbers: int) -> Fraction:
    return sent_in_a_step(stage, n, numbers) * n


@mistake("Stage 1 sends the new parameters back: the reduction is only one half.")
def with_the_reduction_alone(stage: int, n: int, numbers: int) -> Fraction:
    count = sent_in_a_step(stage, n, numbers)
    if stage in (1, 2):
        count /= 2
    return count


SENT = Exercise(
    name="zero.sent",
    question=(
        "How many bytes does a device send in a step of ZeRO stage 0, 1, 2 or 3, for `numbers`"
        " float32 parameters on `n` devices? Stage 3 gathers parameters for the forward and again"
        " for the backward. Losses and norms do not count."
    ),
    form="answer(stage, n, numbers)",
    hints=(
        "An all-gather or a reduce-scatter of B bytes sends (n - 1)/n B from each device.",
        "A `psum` is both, one after the other.",
        "Stages 0 to 2 have a reduction of gradients and a way back to all devices. Stage 3"
        " gathers twice and reduces once.",
    ),
    why="Stages 1 and 2 cost no byte more than data parallelism; stage 3 costs half as much again.",
    grade=Cases(
        cases=[(0, 3, 30), (1, 3, 30), (2, 5, 40), (3, 4, 48), (3, 8, 64)],
        truth=sent_in_a_step,
        mistakes=(
            with_one_gather,
            with_own_shards,
            sent_elements,
            sent_by_all_devices,
            with_the_reduction_alone,
        ),
    ),
)


# -- reduce a gradient ----------------------------------------------------------------------------


def gradients(n: int) -> PerDevice:
    draw = torch.Generator().manual_seed(n)
    return PerDevice(torch.randn(2 * n, 3, generator=draw) for _ in range(n))


def run_reduce(answer: Answer, n: int) -> PerDevice:
    return on_devices(answer, fs.make_mesh({"data": n}), gradients(n))


def shards_of_mean(n: int) -> list[Tensor]:
    mean = torch.stack(gradients(n)).mean(0)
    return [*mean.chunk(n)]


@mistake(
    "That is the shard of the sum. The loss is a mean over devices, and so is its gradient: divide"
    ' by `fs.axis_size("data")`.'
)
def shard_of_sum(grad: Tensor) -> Tensor:
    return fs.psum_scatter(grad, "data")


@mistake("All devices have all rows of the mean. A device stores its shard alone.")
def all_rows_of_mean(grad: Tensor) -> Tensor:
    return fs.pmean(grad, "data")


@mistake("These are rows of the device's own gradient. Those of other devices must be added.")
def rows_of_own_gradient(grad: Tensor) -> Tensor:
    return grad.chunk(fs.axis_size("data"))[fs.axis_index("data")]


@mistake('It divides by 4, whatever the mesh is. The size is `fs.axis_size("data")`.')
def a_quarter_of_sum(grad: Tensor) -> Tensor:
    return fs.psum_scatter(grad, "data") / 4


REDUCE_CASES = Cases(
    cases=[(3,), (4,)],
    truth=shards_of_mean,
    mistakes=(shard_of_sum, all_rows_of_mean, rows_of_own_gradient, a_quarter_of_sum),
    run=run_reduce,
)


def grade_reduce(answer: Answer) -> None:
    """Check that no more is sent than needed, then the values."""
    for (n,) in REDUCE_CASES.cases:
        with fs.ledger() as comm:
            result = run_reduce(answer, n)
        half_of_psum = Fraction(n - 1, n) * gradients(n)[0].nbytes
        if comm.bytes() > half_of_psum and is_same(result, shards_of_mean(n)):
            raise WrongAnswer(
                f"The values are right, but a device sends {float(comm.bytes()):g} bytes, where"
                f" {float(half_of_psum):g} are enough: one collective sums, and leaves each device"
                " its shard of the sum."
            )
    REDUCE_CASES(answer)


REDUCE = Exercise(
    name="zero.reduce",
    question=(
        "Each device has computed the full gradient of its own rows. Write what ZeRO-2 does with"
        " it, as a function that runs on each device: it takes the local gradient and returns the"
        ' device\'s shard (of dim 0, over the axis "data") of the mean over devices. Send no more'
        " than needed."
    ),
    form="answer(grad)",
    hints=(
        "Which collective sums, and leaves each device a shard of the sum?",
        '`fs.psum_scatter(grad, "data")` is the sum. And the mean?',
        'Divide by `fs.axis_size("data")`.',
    ),
    why=(
        "This is the transpose of the all-gather of parameters: autograd writes it for you in stage"
        " 3."
    ),
    grade=grade_reduce,
)


# -- gather a weight at its use -------------------------------------------------------------------


def weight_and_batch(devices: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10 + devices)
    w = torch.randn(2 * devices, 3, generator=draw)
    x = torch.randn(2 * devices, 2 * devices, generator=draw)
    return w, x


def loss_of(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w).square().mean()


def run_zero3(answer: Answer, devices: int) -> tuple[list[Any], Tensor]:
    """Return the loss on each device, and the gradient put together from its shards."""
    w, x = weight_and_batch(devices)
    mesh = fs.make_mesh({"data": devices})
    shards = PerDevice(w.chunk(devices))
    rows = PerDevice(x.chunk(devices))

    def on_device(shard: Tensor, rows: Tensor) -> tuple[Any, Any]:
        return loss_and_gradient(answer, shard, rows)

    pairs = on_devices(on_device, mesh, shards, rows)
    return [loss for loss, _ in pairs], torch.cat([grad for _, grad in pairs])


def on_one_device(devices: int) -> tuple[list[Tensor], Tensor]:
    w, x = weight_and_batch(devices)
    grad, loss = torch.func.grad_and_value(loss_of)(w, x)
    return [loss] * devices, grad


@mistake("Loss and gradient are n times too large: average by `fs.pmean`, do not add by `fs.psum`.")
def summed_loss(shard: Tensor, rows: Tensor) -> Tensor:
    w = fs.all_gather(shard, "data")
    return fs.psum(loss_of(w, rows), "data")


@mistake(
    'The loss is right, but the gradient has the device\'s own rows alone. With `to="replicated"`'
    " you promise that all devices compute the same with the weight; they do not."
)
def replicated_weight(shard: Tensor, rows: Tensor) -> Tensor:
    w = fs.all_gather(shard, "data", to="replicated")
    return fs.pmean(loss_of(w, rows), "data")


@mistake("Each device returns the loss of its own rows. Average it: `fs.pmean`.")
def local_loss(shard: Tensor, rows: Tensor) -> Tensor:
    w = fs.all_gather(shard, "data")
    return loss_of(w, rows)


GATHER = Exercise(
    name="zero.gather_at_use",
    question=(
        "Write the loss of ZeRO-3 as a device has it. It gets its `shard` of a weight `w` (rows,"
        ' over "data") and its `rows` of the batch, and returns the mean over all devices of'
        " `torch.tanh(x @ w).square().mean()`. The check takes the gradient of your loss with"
        " respect to the shard."
    ),
    form="answer(shard, rows)",
    hints=(
        "First gather the weight, then compute as on one device, then average the loss.",
        "Each device uses the gathered weight with its own rows: it varies, so a plain"
        ' `fs.all_gather` is right, and `to="replicated"` is not.',
        '`w = fs.all_gather(shard, "data")`, then `fs.pmean(..., "data")`.',
    ),
    why="Its backward is the reduce-scatter of the exercise before: three lines are ZeRO-3.",
    grade=Cases(
        cases=[(3,), (4,)],
        truth=on_one_device,
        mistakes=(summed_loss, replicated_weight, local_loss),
        run=run_zero3,
    ),
)


# -- rules ----------------------------------------------------------------------------------------


def model_of(blocks: int) -> dict[str, Any]:
    def block() -> dict[str, Tensor]:
        return {"up": torch.ones(4, 8), "down": torch.ones(8, 4), "norm": torch.ones(4)}

    return {"embed": torch.ones(8, 4), "blocks": [block() for _ in range(blocks)]}


def specs_of(rules: Any, blocks: int) -> dict[str, P]:
    """Return the specs that the rules give to the leaves of a model, by name."""
    mesh = fs.make_mesh({"data": 2, "model": 4})
    params = fs.shard_params(model_of(blocks), rules, mesh=mesh)
    specs = {"embed": params["embed"].spec}
    for i, block in enumerate(params["blocks"]):
        for name, leaf in block.items():
            specs[f"blocks[{i}].{name}"] = leaf.spec
    return specs


def grade_rules(answer: Any) -> None:
    if isinstance(answer, P) or not isinstance(answer, dict):
        raise WrongAnswer("The answer must be a dict from patterns of names to `P`s.")
    try:
        for blocks in (1, 3):
            grade_specs(specs_of(answer, blocks))
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


def grade_specs(specs: dict[str, P]) -> None:
    for name, spec in specs.items():
        is_vector = name.endswith("norm")
        expected = P() if is_vector else P("data")
        if spec == expected:
            continue
        if is_vector:
            raise WrongAnswer(f"`{name}` is a vector, which stays replicated; it is `{spec}`.")
        if spec == P():
            raise WrongAnswer(f"`{name}` is a matrix and is replicated: no rule shards it.")
        raise WrongAnswer(f'`{name}` must be sharded along dim 0 over "data"; it is `{spec}`.')


RULES = Exercise(
    name="zero.rules",
    question=(
        "Write rules for `fs.shard_params`: each matrix of a model with the leaves `embed`,"
        ' `blocks[i].up`, `blocks[i].down` and `blocks[i].norm` is sharded along dim 0 over "data",'
        " and the vectors `norm` are replicated. The number of blocks is not known to you."
    ),
    form="answer = {pattern: P(...), ...}",
    hints=(
        "A rule is a pattern of paths and a `P`; `*` is any one index or name.",
        "`blocks[*].up` is `up` of all blocks. What no rule names is an error.",
        '`"**": P()` at the end replicates the rest.',
    ),
    why="Rules are data: they outlive a change of the model's depth, and a misspelt one raises.",
    grade=grade_rules,
)

EXERCISES = (FLAT_BYTES, SENT, REDUCE, GATHER, RULES)
