"""Time the answers of the lab to changes of a small model, and of one of 405 billion parameters.

    python benchmarks/lab.py               each state is new: a kept answer takes no time
    python benchmarks/lab.py --rounds 5

Prints the median and the longest answer of each change, in milliseconds: the engine's part, without
the proof, which follows in a thread of its own, and without the browser, which draws in 20 to 50 ms.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

import fshard as fs
from fshard.laboratory.engine import Engine
from fshard.laboratory.state import LabState
from fshard.laboratory.subject import Subject

SMALL: dict[str, dict[str, Any]] = {
    "ZeRO-0": {"zero_stage": 0},
    "ZeRO-1": {"zero_stage": 1},
    "ZeRO-2": {"zero_stage": 2},
    "ZeRO-3, 2 samples": {"zero_stage": 3, "rows": 2},
    "layers on 2 devices": {"tensor": 2, "zero_stage": 3},
    "layers on 4 devices": {"tensor": 4, "zero_stage": 1},
    "2 stages": {"pipeline": 2},
    "recomputed": {"zero_stage": 3, "recompute": "full"},
}
LARGE: dict[str, dict[str, Any]] = {
    "layers on 8 devices": {"tensor": 8, "zero_stage": 3},
    "and 16 stages": {"tensor": 8, "pipeline": 16, "zero_stage": 1, "microbatches": 16},
    "recomputed": {
        "tensor": 8,
        "pipeline": 16,
        "zero_stage": 1,
        "microbatches": 16,
        "recompute": "full",
    },
    "8 stages": {"tensor": 8, "pipeline": 8, "zero_stage": 1, "microbatches": 16},
}
LLAMA_405B = fs.plan.Transformer(
    layers=126,
    hidden=16384,
    ffn=53248,
    heads=128,
    kv_heads=8,
    vocab=128256,
    sequence=8192,
)


def answers(state: LabState, changes: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the milliseconds of each change, by an engine that knows the first state alone."""
    engine = Engine(Subject(), state)
    message = {"page": "", "slot": "A", "leaf": None}
    times = dict[str, float]()
    first = {"first answer": {}}
    for number, (name, fields) in enumerate({**first, **changes}.items()):
        changed = replace(state, plan=fs.Parallelism(**fields)) if fields else state
        begin = perf_counter()
        reply = engine.reply({**message, "id": number, "state": changed.to_json()})
        times[name] = 1e3 * (perf_counter() - begin)
        assert reply["kind"] == "answer", reply
    engine.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    models = {
        "small, 8 devices": (LabState(plan=fs.Parallelism(zero_stage=3)), SMALL),
        "405B, 16,384 devices": (
            LabState(model=LLAMA_405B, devices=16384, plan=fs.Parallelism(tensor=8)),
            LARGE,
        ),
    }
    table = Table("model", "change", "median, ms", "longest, ms")
    for model, (state, changes) in models.items():
        runs = [answers(state, changes) for _ in range(rounds)]
        for change in runs[0]:
            times = [run[change] for run in runs]
            table.add_row(model, change, f"{median(times):.0f}", f"{max(times):.0f}")
        table.add_section()
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
