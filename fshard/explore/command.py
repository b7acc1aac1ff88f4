"""The command `fshard explore`: the page of a plan, of two, or of a recorded program."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fshard.arguments import ArgumentParser
from fshard.errors import PlanError
from fshard.explore.described import DescribedPlan, described
from fshard.explore.page import page
from fshard.plan.command import plan_of_file
from fshard.plan.models import Transformer
from fshard.plan.tables.progress import ProgressLine
from fshard.torch_collectives import Recording


def run(arguments: Sequence[str]) -> int:
    """Write the page; return the exit status."""
    parser = ArgumentParser(
        prog="fshard explore",
        description="Write a plan's step as one HTML file, or two with their differences, or the "
        "collectives that a program has called.",
    )
    parser.add_argument(
        "file", nargs="+", help="of fshard plan -o, or a recording (.json); one or two"
    )
    parser.add_argument("-o", "--out", default="plan.html", help="the page to write (%(default)s)")
    options = parser.parse_args(arguments)
    if len(options.file) > 2:
        raise PlanError(f"explore: one or two files are needed; got {len(options.file)}.")
    if not Path(options.out).absolute().parent.is_dir():
        raise PlanError(f"explore: the folder of {options.out} must exist.")

    shown: list[DescribedPlan | Recording] = []
    with ProgressLine() as progress:
        for path in options.file:
            progress(f"running the program of {path} without values")
            shown.append(_opened(path))
        first, *others = shown
        compare = None
        if others:
            (compare,) = others
        progress(f"writing {options.out}")
        path = page(first, options.out, compare=compare)
    sys.stdout.write(f"{path}\n")
    return 0


def _opened(path: str) -> DescribedPlan | Recording:
    """Return what a file has: a recording, or a plan with its cost."""
    if Path(path).suffix == ".json":
        return Recording.load(path)
    saved = plan_of_file(path)
    model = saved.model
    module = model
    if isinstance(module, Transformer):
        module = module.build()
    name = _name(saved.run["config"])
    try:
        return described(
            saved.estimate, module, name, saved.run.get("plans", ()), saved.run.get("tried", 0)
        )
    except (ValueError, RuntimeError) as error:  # such as more stages than layers
        first_line = str(error).partition("\n")[0]
        raise PlanError(f"explore: the plan of {path} must have a program; {first_line}") from None


def _name(config: str) -> str:
    """Return the name of a model: of its folder, or of a file that is not called config.json."""
    path = Path(config)
    if path.is_dir():
        return path.resolve().name
    if path.name == "config.json":
        return path.resolve().parent.name
    return path.stem
