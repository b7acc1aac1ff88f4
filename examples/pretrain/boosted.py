"""Pretrain the same Llama in torch's loop: the Booster, and a plugin that decides the layouts.

    python examples/pretrain/boosted.py                                     four virtual devices
    python examples/pretrain/boosted.py --mesh data=2,model=2 --zero 3      ZeRO-3 of sharded layers
    fshard run --processes 4 examples/pretrain/boosted.py --reproducible    four processes

Started again with the same --folder, it goes on from the last checkpoint, as `train.py` does.
"""

from time import perf_counter

import torch
from options import load_text, make_mesh, new_model, new_optimizer, parse, rows_of
from text import batch_of, write
from torch.utils.data import DataLoader

import fshard as fs


def main(args, tokenizer, training, held_out):
    """Train, as one device of the mesh; return the model."""
    held_out_batch = batch_of(iter(rows_of(held_out, args)), 4 * args.batch)
    plugin = new_plugin(args, held_out_batch)
    booster = fs.Booster(plugin)
    model, optimizer, _, loader, _ = booster.boost(
        new_model(tokenizer, args),
        new_optimizer(args),
        dataloader=DataLoader(rows_of(training, args), args.batch),  # rows of all devices together
    )

    run = {"model": model, "optimizer": optimizer, "loader": loader, "steps": 0}
    folder = fs.Checkpoints(args.folder, keep=2, every=args.every)
    if folder.latest is not None:
        run = folder.restore(run)

    # Devices along the axis "model" have the same rows, and count once.
    batch_mesh = plugin.mesh[plugin.axes()]
    own_rows = shard_of(held_out_batch, batch_mesh)
    batches = iter(loader)
    writers = [fs.report.Bar(args.steps), fs.report.JsonLines(args.folder / "report.jsonl")]
    with fs.report.Report(*writers, mesh=batch_mesh, step=run["steps"]) as report:
        while run["steps"] < args.steps:
            start = perf_counter()
            rows = next(batches)
            loss = model(rows[:, :-1], rows[:, 1:])
            booster.backward(loss, optimizer)
            metrics = {"loss": loss, "grad_norm": booster.clip_grad_norm(optimizer, 1.0)}
            optimizer.step()
            optimizer.zero_grad()
            run["steps"] += 1
            metrics["tokens_per_second"] = args.batch * args.length / (perf_counter() - start)
            if run["steps"] % args.every == 0:
                with torch.no_grad():
                    metrics["held_out_loss"] = model(**own_rows)
            report(metrics, samples=loader.samples)
            folder.save(run["steps"], run, wait=False)
    folder.wait()
    return model.unwrap()  # a copy with full parameters, on every device


def new_plugin(args, sample):
    """Return the plugin of the mesh's axes and of ZeRO."""
    mesh = make_mesh(args)
    if args.diloco:
        raise SystemExit("--diloco is of train.py. Here replicas are averaged: local_steps=.")
    return fs.HybridParallelPlugin(
        mesh=mesh,
        tensor=mesh.shape.get("model", 1),
        experts=mesh.shape.get("expert", 1),
        zero_stage=args.zero,
        reproducible=args.reproducible,
        sample={name: rows[:2] for name, rows in sample.items()},
    )


def shard_of(batch, mesh):
    """Return this device's rows of a batch."""
    index = fs.axis_index(mesh.axis_names)
    return {name: rows.chunk(mesh.size)[index] for name, rows in batch.items()}


if __name__ == "__main__":
    args = parse(__doc__)
    tokenizer, *encoded = load_text(args)
    model, *_ = fs.run(main, args, tokenizer, *encoded, mesh=make_mesh(args))
    if fs.mesh.process_index() == 0:
        print(f"\n{write(model, tokenizer, args.words)}")
