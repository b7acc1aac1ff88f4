"""Train AlexNet on small pictures in a pipeline: its layers are split into stages, and every device runs some of them.

    python examples/pipeline_alexnet.py                                         four virtual devices
    python examples/pipeline_alexnet.py --schedule zbv --stages 8 --microbatches 16
    torchrun --nproc-per-node 2 examples/pipeline_alexnet.py --stages 2         two processes

The schedule decides where stages are placed and in which order devices compute. With --reproducible, all schedules and all
numbers of stages and devices print the same losses, bit for bit.
"""

import argparse

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import fshard as fs
from fshard import P

CLASSES, SIDE = 10, 32

# -- the model, a row of layers -------------------------------------------------------------------------------------


def layers(width):
    """AlexNet for pictures of 32 x 32: with width 64 the layers have about as many channels as in the paper."""
    features = [
        *(
            nn.Conv2d(3, width, kernel_size=3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ),
        *(
            nn.Conv2d(width, 3 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ),
        *(nn.Conv2d(3 * width, 6 * width, kernel_size=3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(6 * width, 4 * width, kernel_size=3, padding=1), nn.ReLU(inplace=True)),
        *(
            nn.Conv2d(4 * width, 4 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ),
    ]
    classifier = [
        *(nn.Dropout(0.2), nn.Linear(16 * width, 16 * width), nn.ReLU(inplace=True)),
        *(nn.Dropout(0.2), nn.Linear(16 * width, 16 * width), nn.ReLU(inplace=True)),
        nn.Linear(16 * width, CLASSES),
    ]
    return [*features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), *classifier]


# -- the pictures: of each class one that is shown shifted, brighter or darker, and through noise ---------------------

PATTERNS = F.interpolate(
    torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0)), SIDE, mode="bicubic"
)


def batch_of(number, size):
    """Draw pictures and their classes: the same ones in every process."""
    draw = torch.Generator().manual_seed(number)
    y = torch.randint(CLASSES, (size,), generator=draw)
    shifts = torch.randint(-3, 4, (size, 2), generator=draw).tolist()
    x = torch.stack(
        [PATTERNS[kind].roll(shift, (1, 2)) for kind, shift in zip(y.tolist(), shifts, strict=True)]
    )
    light = 0.5 + torch.rand(size, 1, 1, 1, generator=draw)
    return light * x + torch.randn(x.shape, generator=draw), y  # (size, 3, side, side), (size,)


def loss_fn(scores, batch):
    return F.cross_entropy(scores, batch[1]), (scores.argmax(1) == batch[1]).float().mean()


# -- the training, in stages ----------------------------------------------------------------------------------------


def options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schedule", default="1f1b", help="gpipe, 1f1b, zb-h1, interleaved, zbv, ..."
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--balance",
        default="parameters",
        help="what stages have alike: uniform, parameters, type:conv",
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument(
        "--data", type=int, default=1, help="how many such pipelines beside each other"
    )
    parser.add_argument(
        "--zero", type=int, default=0, choices=range(4), help="the stage of ZeRO along them"
    )
    parser.add_argument(
        "--reproducible", action="store_true", help="equal bits under all schedules"
    )
    return parser.parse_args()


def main():
    args = options()
    torch.manual_seed(0)
    console = Console(quiet=fs.mesh.process_index() != 0, highlight=False)

    # What is done where, and when: this is all that makes the program a pipeline.
    schedule = fs.pipeline_schedule(
        args.schedule, stages=args.stages, microbatches=args.microbatches
    )
    mesh = fs.make_mesh({"pipe": schedule.devices, "data": args.data})
    stages = fs.pipeline.split_stages(layers(args.width), args.stages, args.balance)
    params = fs.shard_stages(
        stages, fs.fsdp("data") if args.zero == 3 else P(), mesh=mesh, schedule=schedule
    )
    opt = fs.partition_optimizer(fs.optim.adamw(2e-3), mesh=mesh, axis="data", stage=args.zero)
    how = {"loss": loss_fn, "has_aux": True, "reproducible": args.reproducible}
    step = fs.train_step(
        stages, opt, mesh=mesh, batch=P("data"), schedule=schedule, donate=True, **how
    )
    state = opt.init(params)

    console.print(f"[bold]{schedule.name} on {mesh}[/]\n")
    for place, (device, stage) in enumerate(zip(schedule.placement, stages, strict=True)):
        numbers = sum(x.numel() for x in stage.parameters())
        names = " ".join(type(layer).__name__.removesuffix("2d") for layer in stage)
        console.print(
            f"stage {place} on device {device}   {numbers:9,} numbers   {names}", soft_wrap=True
        )
    sim = schedule.simulate()
    console.print(f"\n{sim}\n", soft_wrap=True)
    held = ", ".join(map(str, sim.peak_activations))
    console.print(
        f"bubble {float(sim.bubble):.1%}, {held} activations at most, {sim.messages} messages a step\n"
    )

    for number in range(1, args.steps + 1):
        params, state, metrics = step(params, state, batch_of(number, args.batch))
        if number == 1 or number % (args.steps // 5 or 1) == 0:
            loss, right = metrics["loss"].item(), metrics["aux"].item()
            console.print(
                f"step {number:4}   loss {loss:.9g}   right {right:.0%}"
            )  # nine digits: every bit


if __name__ == "__main__":
    main()
