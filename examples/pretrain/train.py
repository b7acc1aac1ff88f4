"""Pretrain a small Llama as a function of its parameters: `fs.train_step`, and layouts as values.

    python examples/pretrain/train.py                                     four virtual devices
    python examples/pretrain/train.py --mesh data=2,model=2 --zero 3      ZeRO-3 of sharded layers
    fshard run --processes 4 examples/pretrain/train.py --reproducible    four processes

Started again with the same --folder, it goes on from the last checkpoint, on any mesh. With
--reproducible the run has the same bits on 1, 2, 4 or 8 devices along "data", however often it is
killed.
"""

from time import perf_counter

from options import load_text, make_mesh, new_model, new_optimizer, parse, rows_of
from text import batch_of, write
from torch.func import functional_call

import fshard as fs
from fshard import P


def main():
    args = parse(__doc__)
    mesh = make_mesh(args)
    tokenizer, training, held_out = load_text(args)
    model = new_model(tokenizer, args)
    held_out_batch = batch_of(iter(rows_of(held_out, args)), 4 * args.batch)

    rows = rows_of(training, args)
    params, state, step, evaluate = sharded(model, mesh, held_out_batch, args)
    run = {"params": params, "state": state, "rows": rows, "random": fs.RandomState(), "steps": 0}
    folder = fs.Checkpoints(args.folder, keep=2, every=args.every)
    if folder.latest is not None:
        run = folder.restore(run)
        if fs.mesh.process_index() == 0:
            print(f"resumed after step {run['steps']}")

    stream = iter(rows)
    writers = [fs.report.Bar(args.steps), fs.report.JsonLines(args.folder / "report.jsonl")]
    with fs.report.Report(*writers, step=run["steps"]) as report:
        while run["steps"] < args.steps:
            start = perf_counter()
            batch = batch_of(stream, args.batch)
            run["params"], run["state"], metrics = step(run["params"], run["state"], batch)
            run["steps"] += 1
            tokens = batch["tokens"].numel()
            metrics["tokens_per_second"] = tokens / (perf_counter() - start)
            if run["steps"] % args.every == 0:
                metrics["held_out_loss"] = evaluate(run["params"], held_out_batch)
            report(metrics)
            folder.save(run["steps"], run, wait=False, metrics=metrics)
    folder.wait()

    params = fs.comm.mean(run["params"]) if args.diloco else fs.unshard(run["params"])
    if fs.mesh.process_index() == 0:
        print(f"\n{write(lambda x: functional_call(model, params, x), tokenizer, args.words)}")


def sharded(model, mesh, sample, args):
    """Return the parameters and the optimizer's state in their layouts, a step, and an evaluation."""
    axes = tuple(axis for axis in ("replica", "data", "expert") if axis in mesh.axis_names)
    zero_axes = tuple(axis for axis in axes if axis != "replica")
    plan, rules = layer_layouts(model, mesh, sample)
    apply, params, buffers = fs.functionalize(model, plan=plan)
    if args.zero == 3:
        rules = fs.fsdp(zero_axes, within=rules)
    params = fs.shard_params(params, rules, mesh=mesh)

    def loss_fn(params, batch):
        loss, _ = apply(params, buffers, batch["tokens"], batch["targets"])
        return loss if plan is None else plan.full(loss)

    local = tuple(axis for axis in ("expert", "model") if axis in mesh.axis_names)
    how = {"local": local, "reproducible": args.reproducible}
    evaluate = fs.evaluate(loss_fn, mesh=mesh, batch=P(axes), **how)

    # The step of one replica: those along the axis "replica" are trained apart.
    inner = mesh[tuple(axis for axis in mesh.axis_names if axis != "replica")]
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), new_optimizer(args))
    opt = fs.partition_optimizer(opt, mesh=inner, axis=zero_axes, stage=args.zero)
    step = fs.train_step(loss_fn, opt, mesh=inner, batch=P(zero_axes), donate=True, **how)
    if not args.diloco:
        return params, opt.init(params), step, evaluate

    outer = fs.optim.sgd(0.7, momentum=0.9, nesterov=True)
    step = fs.comm.diloco(step, outer, every=args.diloco, mesh=mesh, axis="replica")

    def evaluate_mean(params, batch):
        return evaluate(fs.shard_params(fs.comm.mean(params), rules, mesh=mesh), batch)

    return *step.init(params), step, evaluate_mean


def layer_layouts(model, mesh, sample):
    """Return the plan of the layers along the axis "model", or None, and the rules of parameters."""
    if "model" in mesh.axis_names:
        arguments = {name: rows[:2] for name, rows in sample.items()}
        plan = fs.tensor_parallel(model, axis="model", sample=arguments)
        return plan, plan.rules
    if "expert" in mesh.axis_names:
        return None, {"blocks.*.mlp.experts.*": P("expert"), "**": P()}
    return None, P()


if __name__ == "__main__":
    main()
