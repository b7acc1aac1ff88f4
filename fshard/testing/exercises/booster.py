"""Exercises of the notebook "A torch loop on any layout"."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs
from fshard.testing.grading import (
    Exercise,
    PerDevice,
    WrongAnswer,
    as_function,
    grade_cases,
    on_devices,
)


def _losses(n: int) -> PerDevice:
    return PerDevice(torch.tensor(float(i * i), requires_grad=True) for i in range(n))


def _run_loss(function: Any, n: int) -> list[Any]:
    results = on_devices(function, fs.make_mesh({"data": n}), _losses(n))
    if any(isinstance(x, Tensor) and x.requires_grad for x in results):
        raise WrongAnswer(
            "The result still has a graph, so a log of it keeps the activations of each step."
            " Detach the loss first."
        )
    return results


LOSS = Exercise(
    "booster.loss",
    'In a loop, each device of "data" has the `loss` of its own rows, a tensor with a graph. Return'
    " what should be printed: the loss of the entire batch, equal on all devices, a tensor"
    " without a"
    " graph. All devices have as many rows.",
    "answer(loss)",
    (
        "Each device has a mean of its rows; the loss of the batch is their mean.",
        "`loss.detach()`, and a collective.",
    ),
    "A loss that is printed by device 0 alone is that of an n-th of the batch: noisier, by"
    " sqrt(n).",
    lambda answer: grade_cases(
        answer,
        "answer(loss)",
        [(2,), (5,)],
        lambda n: [torch.stack([*_losses(n)]).mean()] * n,
        {
            "That is the loss of the device's own rows. Average it over the devices.": _losses,
            "That is the sum. The loss of the batch is the mean of the devices' means.": (
                lambda n: [torch.stack([*_losses(n)]).sum()] * n
            ),
            "That is the largest of the losses.": (
                lambda n: [torch.stack([*_losses(n)]).max()] * n
            ),
        },
        run=_run_loss,
        names="devices",
    ),
)


_PLUGINS = (fs.DDPPlugin, fs.ZeroPlugin, fs.FSDPPlugin, fs.HybridParallelPlugin)


def _bytes_of(tree: Any) -> int:
    return sum(x.shards[0].nbytes for x in tree_leaves(tree) if isinstance(x, fs.Sharded))


def _grade_plugin(answer: Any) -> None:
    function = as_function(answer, "answer(mesh)")
    for n in (4, 8):
        mesh = fs.make_mesh({"data": n}, runtime="abstract")
        plugin = function(mesh)
        if not isinstance(plugin, _PLUGINS):
            raise WrongAnswer("The answer must return a plugin, such as `fs.DDPPlugin(mesh=mesh)`.")
        if plugin.mesh is not mesh:
            raise WrongAnswer("The plugin must have the mesh that is given: `mesh=mesh`.")
        model = nn.Linear(64, 64, bias=False, device="meta")
        optimizer = torch.optim.AdamW(model.parameters())
        state = fs.Booster(plugin).init(model, optimizer, nn.MSELoss())
        params = _bytes_of(state.params)
        moments = _bytes_of(state.optimizer)
        if params < 64 * 64 * 4:
            raise WrongAnswer(
                f"On {n} devices each stores {params} bytes of parameters, a shard. They are then"
                " gathered for each use, which is half as much communication again; they fit here."
            )
        if moments > 2 * 64 * 64 * 4 // n:
            raise WrongAnswer(
                f"On {n} devices each stores {moments} bytes of optimizer state: all of it. Which"
                " stage of ZeRO shards the state, and not the parameters?"
            )


PLUGIN = Exercise(
    "booster.plugin",
    "The parameters fit on each device, and with Adam's state they do not. Return the plugin for"
    " `mesh` with the least communication with which all fits.",
    "answer(mesh)",
    (
        "DDP stores all three trees on each device, FSDP shards all of them.",
        "`fs.ZeroPlugin(stage=1, mesh=mesh)` or stage 2.",
    ),
    "The simplest plugin that fits is the fastest: sharding more costs bytes on the wire.",
    _grade_plugin,
)


@cache
def _batches(count: int, batch_size: int, n: int) -> int:
    """Count the batches that a boosted loader gives to a device."""
    data = TensorDataset(torch.ones(count, 1), torch.ones(count, 1))

    def on_device() -> int:
        model = nn.Linear(1, 1)
        loader = DataLoader(data, batch_size=batch_size)
        boosted = fs.Booster(fs.DDPPlugin()).boost(
            model, torch.optim.SGD(model.parameters()), nn.MSELoss(), loader
        )
        return sum(1 for _ in boosted[3])

    return fs.run(on_device, mesh=fs.make_mesh({"data": n}))[0]


STEPS = Exercise(
    "booster.steps",
    "A DataLoader over `count` samples with `batch_size` is boosted on `n` devices. How many steps"
    " has an epoch?",
    "answer(count, batch_size, n)",
    (
        "A batch is that of all devices together: each device gets its part of it.",
        "So the loop has as many steps as on one device. Is the last batch full?",
    ),
    "The loop, the learning rate and the scheduler mean the same on any number of devices.",
    lambda answer: grade_cases(
        answer,
        "answer(count, batch_size, n)",
        [(24, 8, 2), (20, 8, 2), (26, 4, 4)],
        _batches,
        {
            "In torch's DistributedSampler a batch is one device's. Here it is that of all: the"
            " number of steps does not depend on n.": (
                lambda count, batch_size, n: -(-count // (batch_size * n))
            ),
            "The last batch may be smaller, and is not dropped: round up.": (
                lambda count, batch_size, n: count // batch_size
            ),
            "Each device has its part of each batch, not batches of its own.": (
                lambda count, batch_size, n: -(-count // batch_size) * n
            ),
        },
    ),
)


@cache
def _adapted(inputs: int, outputs: int, rank: int) -> int:
    """Count the numbers that an adapted linear layer learns."""

    def on_device() -> int:
        model = nn.Sequential(nn.Linear(inputs, outputs))
        config = fs.nn.LoraConfig(r=rank)
        model = fs.Booster(fs.DDPPlugin()).enable_lora(model, lora_config=config)
        return sum(x.numel() for x in model.parameters() if x.requires_grad)

    return fs.run(on_device, mesh=fs.make_mesh({"data": 1}))[0]


ADAPTER = Exercise(
    "booster.adapter",
    "`enable_lora` lets an `nn.Linear(inputs, outputs)`, with a bias, learn a difference of `rank`."
    " How many numbers are trained?",
    "answer(inputs, outputs, rank)",
    (
        "The difference is a product of two narrow matrices.",
        "One is (rank, inputs), the other (outputs, rank). The bias is frozen.",
    ),
    "Gradients and optimizer state are of these alone: so are the bytes that a step sends.",
    lambda answer: grade_cases(
        answer,
        "answer(inputs, outputs, rank)",
        [(8, 6, 2), (5, 9, 1)],
        _adapted,
        {
            "That is one of the two factors.": lambda inputs, outputs, rank: rank * inputs,
            'The bias is frozen, too: `bias="none"` is the default.': (
                lambda inputs, outputs, rank: rank * (inputs + outputs) + outputs
            ),
            "That would be full matrices. The factors are narrow: they have `rank` rows or"
            " columns.": (lambda inputs, outputs, rank: rank * inputs * outputs),
            "The weight itself is frozen; its difference alone is trained.": (
                lambda inputs, outputs, rank: rank * (inputs + outputs) + inputs * outputs
            ),
        },
    ),
)

EXERCISES = (LOSS, PLUGIN, STEPS, ADAPTER)
