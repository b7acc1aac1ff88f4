"""Exercises of the notebook "A torch loop on any layout"."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs
from fshard.testing.grading import (
    Answer,
    Cases,
    Exercise,
    PerDevice,
    WrongAnswer,
    mistake,
    on_devices,
    stored,
)

__all__ = ["EXERCISES"]


# -- the loss to print ----------------------------------------------------------------------------


def losses(devices: int) -> PerDevice:
    return PerDevice(torch.tensor(float(i * i), requires_grad=True) for i in range(devices))


def run_loss(answer: Answer, devices: int) -> PerDevice:
    results = on_devices(answer, fs.make_mesh({"data": devices}), losses(devices))
    for result in results:
        if isinstance(result, Tensor) and result.requires_grad:
            raise WrongAnswer(
                "The result still has a graph, so a log of it keeps the activations of each step."
                " Detach the loss first."
            )
    return results


def loss_of_batch(devices: int) -> list[Tensor]:
    return [torch.stack(losses(devices)).mean()] * devices


@mistake("That is the loss of the device's own rows. Average it over the devices.")
def local_loss(loss: Tensor) -> Tensor:
    return loss.detach()


@mistake("That is the sum. The loss of the batch is the mean of the devices' means.")
def sum_of_losses(loss: Tensor) -> Tensor:
    return fs.psum(loss.detach(), "data")


@mistake("That is the largest of the losses.")
def largest_loss(loss: Tensor) -> Tensor:
    return fs.pmax(loss.detach(), "data")


LOSS = Exercise(
    name="booster.loss",
    question=(
        'In a loop, each device of "data" has the `loss` of its own rows, a tensor with a graph.'
        " Return what should be printed: the loss of the entire batch, equal on all devices, a"
        " tensor without a graph. All devices have as many rows."
    ),
    form="answer(loss)",
    hints=(
        "Each device has a mean of its rows; the loss of the batch is their mean.",
        "`loss.detach()`, and a collective.",
    ),
    why=(
        "A loss that is printed by device 0 alone is that of an n-th of the batch: noisier, by"
        " sqrt(n)."
    ),
    grade=Cases(
        cases=[(2,), (5,)],
        truth=loss_of_batch,
        mistakes=(local_loss, sum_of_losses, largest_loss),
        run=run_loss,
    ),
)


# -- the plugin with the least communication ------------------------------------------------------

PLUGINS = (fs.DDPPlugin, fs.ZeroPlugin, fs.FSDPPlugin, fs.HybridParallelPlugin)
BYTES_OF_WEIGHT = 64 * 64 * 4


def grade_plugin(answer: Answer) -> None:
    for n in (4, 8):
        mesh = fs.make_mesh({"data": n}, runtime="abstract")
        plugin = answer(mesh)
        if not isinstance(plugin, PLUGINS):
            raise WrongAnswer("The answer must return a plugin, such as `fs.DDPPlugin(mesh=mesh)`.")
        if plugin.mesh is not mesh:
            raise WrongAnswer("The plugin must have the mesh that is given: `mesh=mesh`.")

        model = nn.Linear(64, 64, bias=False, device="meta")
        optimizer = torch.optim.AdamW(model.parameters())
        state = fs.Booster(plugin).init(model, optimizer, nn.MSELoss())
        params_bytes = stored(state.params)
        moments_bytes = stored(state.optimizer)
        if params_bytes < BYTES_OF_WEIGHT:
            raise WrongAnswer(
                f"On {n} devices each stores {params_bytes} bytes of parameters, a shard. They are"
                " then gathered for each use, which is half as much communication again; they fit"
                " here."
            )
        if moments_bytes > 2 * BYTES_OF_WEIGHT // n:
            raise WrongAnswer(
                f"On {n} devices each stores {moments_bytes} bytes of optimizer state: all of it."
                " Which stage of ZeRO shards the state, and not the parameters?"
            )


PLUGIN = Exercise(
    name="booster.plugin",
    question=(
        "The parameters fit on each device, and with Adam's state they do not. Return the plugin"
        " for `mesh` with the least communication with which all fits."
    ),
    form="answer(mesh)",
    hints=(
        "DDP stores all three trees on each device, FSDP shards all of them.",
        "`fs.ZeroPlugin(stage=1, mesh=mesh)` or stage 2.",
    ),
    why="The simplest plugin that fits is the fastest: sharding more costs bytes on the wire.",
    grade=grade_plugin,
)


# -- the steps of an epoch ------------------------------------------------------------------------


@cache
def batches(count: int, batch_size: int, n: int) -> int:
    """Count the batches that a boosted loader gives to a device."""
    data = TensorDataset(torch.ones(count, 1), torch.ones(count, 1))

    def on_device() -> int:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        loader = DataLoader(data, batch_size=batch_size)
        booster = fs.Booster(fs.DDPPlugin())
        _, _, _, boosted, _ = booster.boost(model, optimizer, nn.MSELoss(), loader)
        return sum(1 for _ in boosted)

    counts = fs.run(on_device, mesh=fs.make_mesh({"data": n}))
    return counts[0]


@mistake(
    "In torch's DistributedSampler a batch is one device's. Here it is that of all: the number of"
    " steps does not depend on n."
)
def batches_of_one_device(count: int, batch_size: int, n: int) -> int:
    return -(-count // (batch_size * n))


@mistake("The last batch may be smaller, and is not dropped: round up.")
def full_batches(count: int, batch_size: int, n: int) -> int:
    return count // batch_size


@mistake("Each device has its part of each batch, not batches of its own.")
def batches_of_all_devices(count: int, batch_size: int, n: int) -> int:
    return -(-count // batch_size) * n


STEPS = Exercise(
    name="booster.steps",
    question=(
        "A DataLoader over `count` samples with `batch_size` is boosted on `n` devices. How many"
        " steps has an epoch?"
    ),
    form="answer(count, batch_size, n)",
    hints=(
        "A batch is that of all devices together: each device gets its part of it.",
        "So the loop has as many steps as on one device. Is the last batch full?",
    ),
    why="The loop, the learning rate and the scheduler mean the same on any number of devices.",
    grade=Cases(
        cases=[(24, 8, 2), (20, 8, 2), (26, 4, 4)],
        truth=batches,
        mistakes=(batches_of_one_device, full_batches, batches_of_all_devices),
    ),
)


# -- the numbers of an adapter --------------------------------------------------------------------


@cache
def trained(inputs: int, outputs: int, rank: int) -> int:
    """Count the numbers that an adapted linear layer learns."""

    def on_device() -> int:
        model = nn.Sequential(nn.Linear(inputs, outputs))
        config = fs.nn.LoraConfig(r=rank)
        model = fs.Booster(fs.DDPPlugin()).enable_lora(model, lora_config=config)
        return sum(x.numel() for x in model.parameters() if x.requires_grad)

    counts = fs.run(on_device, mesh=fs.make_mesh({"data": 1}))
    return counts[0]


@mistake("That is one of the two factors.")
def one_factor(inputs: int, outputs: int, rank: int) -> int:
    return rank * inputs


@mistake('The bias is frozen, too: `bias="none"` is the default.')
def with_bias(inputs: int, outputs: int, rank: int) -> int:
    return rank * (inputs + outputs) + outputs


@mistake("That would be full matrices. The factors are narrow: they have `rank` rows or columns.")
def full_matrices(inputs: int, outputs: int, rank: int) -> int:
    return rank * inputs * outputs


@mistake("The weight itself is frozen; its difference alone is trained.")
def with_weight(inputs: int, outputs: int, rank: int) -> int:
    return rank * (inputs + outputs) + inputs * outputs


ADAPTER = Exercise(
    name="booster.adapter",
    question=(
        "`enable_lora` lets an `nn.Linear(inputs, outputs)`, with a bias, learn a difference of"
        " `rank`. How many numbers are trained?"
    ),
    form="answer(inputs, outputs, rank)",
    hints=(
        "The difference is a product of two narrow matrices.",
        "One is (rank, inputs), the other (outputs, rank). The bias is frozen.",
    ),
    why="Gradients and optimizer state are of these alone: so are the bytes that a step sends.",
    grade=Cases(
        cases=[(8, 6, 2), (5, 9, 1)],
        truth=trained,
        mistakes=(one_factor, with_bias, full_matrices, with_weight),
    ),
)

EXERCISES = (LOSS, PLUGIN, STEPS, ADAPTER)
