"""Train a small network on eight devices, data and tensor parallel, and compare with one device.

    python examples/demo.py                                       eight virtual devices, threads of this process
    torchrun --nproc-per-node 8 examples/demo.py                  eight processes

The program is the same.
"""

import torch
from rich.console import Console
from rich.progress import track

import fshard as fs
from fshard import P

STEPS, RATE = 60, 0.5
console = Console(width=110)


def show(*lines):
    """Print on one process only."""
    if fs.mesh.process_index() == 0:
        console.print(*lines, soft_wrap=True)


def initial_params():
    generator = torch.Generator().manual_seed(0)
    return {
        "up": torch.randn(16, 64, generator=generator, dtype=torch.float64) / 4,
        "down": torch.randn(64, 4, generator=generator, dtype=torch.float64) / 8,
    }


def data(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 16, generator=generator, dtype=torch.float64)
    return x, torch.sin(x[:, :4])


def loss_of(params, x, y):
    """What one device does alone."""
    return ((torch.relu(x @ params["up"]) @ params["down"] - y) ** 2).mean()


def sharded_loss(params, x, y):
    """What each of many devices does: columns of `up` and rows of `down` over "model", the batch over "data"."""
    params = {
        name: fs.pvary(w, "data") for name, w in params.items()
    }  # each device uses them with its own batch
    hidden = torch.relu(fs.pvary(x, "model") @ params["up"])
    out = fs.psum(hidden @ params["down"], "model")
    return fs.pmean(((out - y) ** 2).mean(), "data")


def step(loss_of):
    """Turn a loss into a step of gradient descent; the same for one device and for many."""

    def descend(params, x, y):
        params = {name: w.detach().requires_grad_() for name, w in params.items()}
        loss = loss_of(params, x, y)
        gradients = torch.autograd.grad(loss, list(params.values()))
        return {
            name: w.detach() - RATE * gradient
            for (name, w), gradient in zip(params.items(), gradients, strict=True)
        }, loss.detach()

    return descend


def forget_a_collective():
    if fs.axis_index("data") != 2:
        fs.psum(torch.ones(3), "data")


def main():
    mesh = fs.make_mesh({"data": 4, "model": 2})
    specs = {"up": P(None, "model"), "down": P("model")}
    params = fs.device_put(
        initial_params(), {name: fs.Layout(mesh, spec) for name, spec in specs.items()}
    )
    show(f"[bold]{mesh}[/]\n")
    if mesh.runtime == "virtual":
        fs.visualize(params["up"])
        fs.visualize(params)

    train = fs.shard_map(
        step(sharded_loss),
        mesh=mesh,
        in_specs=(specs, P("data"), P("data")),
        out_specs=(specs, P()),
    )
    alone, serial = initial_params(), step(loss_of)
    steps = range(STEPS)
    gap = 0.0
    for number in (
        track(steps, "training on 8 devices and on one") if mesh.runtime == "virtual" else steps
    ):
        params, loss = train(params, *data(number))
        alone, expected = serial(alone, *data(number))
        gap = max(gap, abs(fs.unshard(loss).item() - expected.item()))
        if number % 15 == 0:
            show(
                f"step {number:3}   loss {fs.unshard(loss).item():.6f}   on one device {expected.item():.6f}"
            )
    show(f"\nlargest difference of the losses in {STEPS} steps: {gap:.1e}\n")
    assert gap < 1e-12

    with fs.ledger() as comm:
        train(params, *data(0))
    show(comm.table())

    planned = fs.make_mesh(dict(mesh.shape), runtime="abstract")
    plan = fs.shard_map(
        step(sharded_loss),
        mesh=planned,
        in_specs=(specs, P("data"), P("data")),
        out_specs=(specs, P()),
    )
    with fs.ledger() as counted:
        plan(initial_params(), *data(0))
    show(
        f"counted beforehand on an abstract mesh, without data: {int(counted.bytes()):,} bytes per device\n"
    )
    assert counted.bytes() == comm.bytes()

    if mesh.runtime == "virtual":
        show("[bold]A collective that one device forgets is an error, not a hang:[/]")
        try:
            fs.run(forget_a_collective, mesh=fs.make_mesh({"data": 4}))
        except fs.errors.DeadlockError as error:
            show(f"[red]{type(error).__name__}[/]: {error}")
        show(
            "\nThe same file on real processes:  [bold]torchrun --nproc-per-node 8 examples/demo.py[/]"
        )


if __name__ == "__main__":
    main()
