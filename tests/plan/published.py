"""Published runs of a TOML file as models and plans: their utilization as published and estimated.

    PYTHONPATH=$PWD python -m tests.plan.published [files]     the table; default: all that are here

A file has the sizes that its paper names. What it leaves out is as in Megatron at the time: a GPT
(gated = false) has biases, dropout of 0.1, tied words, four times its width, and attention by its
formula, which "selective" recomputes. A number of samples that was not published is the one of the
fastest plan that fits. Facts of a machine and of its software are keys too:

    network     bytes per second that a device sends to other nodes, where the preset has others
    engine      "deepspeed": its stages wait for each message (`p2p.send`), reduce gradients when all
                backwards are over, and add them in operations of their own
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from fshard import optim
from fshard.parallelism import Parallelism
from fshard.plan import PlanEstimate, Transformer, cluster
from fshard.plan.cluster import Cluster
from fshard.plan.layers import LayerTracer
from fshard.plan.program import layered_model

HERE = Path(__file__).parent
PUBLISHED = HERE / "published_runs.toml"
OTHERS = HERE / "other_runs.toml"
OPTIMIZER = optim.with_master_weights(optim.adamw(3e-4))
ROWS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Run:
    """A published run, by the keys of its file."""

    keys: dict[str, Any]

    @property
    def name(self) -> str:
        return self.keys["name"]

    @property
    def published(self) -> float:
        """The utilization in percent, as the paper counts."""
        return 100 * self.keys.get("mfu", self.keys.get("hfu"))

    @property
    def model(self) -> Transformer:
        keys = self.keys
        gated = keys["gated"]
        is_selective = keys.get("recompute") == "selective"
        attention = "recomputed" if is_selective else "formula"
        is_fused = gated or keys.get("attention") == "fused"
        return Transformer(
            layers=keys["layers"],
            hidden=keys["hidden"],
            ffn=keys.get("ffn", 4 * keys["hidden"]),
            heads=keys["heads"],
            kv_heads=keys["kv_heads"],
            vocab=keys["vocab"],
            sequence=keys["sequence"],
            gated=gated,
            tied=keys.get("tied", not gated),
            bias=keys.get("bias", not gated),
            dropout=keys.get("dropout", 0.0 if gated else 0.1),
            attention="fused" if is_fused else attention,
        )

    @property
    def plans(self) -> Iterator[Parallelism]:
        """The plans that may be the published one."""
        keys = self.keys
        shares_tokens = keys.get("sequence_parallel", keys["gated"])
        has_layer_axis = shares_tokens and keys["tensor"] > 1 and keys.get("context", 1) == 1
        mode = "gather"
        if has_layer_axis:
            mode = "megatron"
        elif keys.get("context", 1) > 1:
            mode = "zigzag"  # each device has as much of causal attention as the others
        recompute = keys.get("recompute", "none")
        if recompute == "none" or (recompute == "selective" and not keys["gated"]):
            recompute = "never"
        schedule = keys.get("schedule", "1f1b")
        most_chunks = keys["layers"] // keys["pipeline"]
        legal_chunks = [None]
        if schedule == "interleaved":
            legal_chunks = [keys["chunks"]] if "chunks" in keys else range(2, most_chunks + 1)
        legal_rows = [keys["microbatch"]] if "microbatch" in keys else ROWS
        for rows, chunks in product(legal_rows, legal_chunks):
            samples = keys["data"] * rows
            if keys["global_batch"] < samples * (1 if "microbatch" in keys else keys["pipeline"]):
                continue
            yield Parallelism(
                data=keys["data"],
                pipeline=keys["pipeline"],
                tensor=keys["tensor"],
                sequence=keys.get("context", 1),
                sequence_mode=mode,
                zero_stage=keys.get("zero", 0),
                rows=rows,
                microbatches=round(keys["global_batch"] / samples),
                schedule=schedule,
                chunks=chunks,
                recompute=recompute,
            )

    def flops(self, plan: Parallelism) -> float:
        """Return the operations that the paper counts in a step."""
        model = self.model
        batch = plan.rows_of_step
        if "hfu" in self.keys:  # formula 3 of arXiv 2104.04473
            s, h, v, n = model.sequence, model.hidden, model.vocab, model.layers
            return 96 * batch * s * n * h * h * (1 + s / (6 * h) + v / (16 * n * h))
        return model.flops(batch, attention="attention" in self.keys.get("counted", ""))

    def machine(self) -> Cluster:
        machine = cluster(self.keys["gpu"], node=self.keys["node"])
        if "network" in self.keys:
            inside, outside = machine.links
            outside = replace(outside, bandwidth=self.keys["network"])
            machine = replace(machine, links=(inside, outside))
        if self.is_deepspeed:
            machine = replace(machine, efficiency=replace(machine.efficiency, overlap=0))
        return machine

    @property
    def is_deepspeed(self) -> bool:
        """True if stages are DeepSpeed's: see above."""
        return self.keys.get("engine") == "deepspeed"

    @cached_property
    def tracer(self) -> LayerTracer:
        return LayerTracer(layered_model(self.model, None, OPTIMIZER, None, None), self.machine())

    @cached_property
    def estimate(self) -> PlanEstimate:
        """The fastest plan that fits; if none does, the first."""
        estimates = [PlanEstimate(plan, self.tracer) for plan in self.plans]
        fitting = [x for x in estimates if not x.excess()]
        return max(fitting or estimates[:1], key=self.estimated_of)

    def estimated_of(self, estimate: PlanEstimate) -> float:
        # Megatron adds gradients of microbatches inside of matrix products, fshard and DeepSpeed
        # in operations of their own.
        sums = 0.0 if self.is_deepspeed else estimate.terms["sums of gradients"]
        ratio = estimate.seconds / (estimate.seconds - sums)
        return 100 * ratio * estimate.utilization(self.flops(estimate.plan))

    @property
    def estimated(self) -> float:
        """The estimated utilization in percent."""
        return self.estimated_of(self.estimate)

    @property
    def error(self) -> float:
        return self.estimated - self.published


def runs_of(*paths: str | Path) -> list[Run]:
    """Return the runs of some files."""
    runs = list[Run]()
    for path in paths:
        table = tomllib.loads(Path(path).read_text())
        runs += [Run(keys) for keys in table["run"]]
    return runs


def main() -> None:
    """Print the table."""
    runs = runs_of(*(sys.argv[1:] or [PUBLISHED, OTHERS]))
    sys.stdout.write("| run | devices | published | estimated | error | GB | fits |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    for run in runs:
        gigabytes = f"{run.estimate.peak / 1e9:.1f}"
        fits = "no" if run.estimate.excess() else "yes"
        cells = [run.name, f"{run.keys['devices']:,} {run.keys['gpu']}", f"{run.published:.1f}"]
        cells += [f"{run.estimated:.1f}", f"{run.error:+.1f}", gigabytes, fits]
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()
    errors = [abs(run.error) for run in runs]
    sys.stdout.write(f"mean {sum(errors) / len(errors):.2f}, worst {max(errors):.2f}\n")


if __name__ == "__main__":
    main()
