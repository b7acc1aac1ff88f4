"""The commands of plans.

fshard plan         ranks the layouts of a model of Hugging Face
fshard calibrate    measures this machine, for its cluster
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fshard.arguments import ArgumentParser
from fshard.errors import PlanError
from fshard.launching.launch import launch
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.runtimes.launchers import process_count
from fshard.optim.rules.adam import adamw
from fshard.optim.wrappers import with_master_weights
from fshard.parallelism.tables import read_table
from fshard.parallelism.value import FIELDS, Parallelism
from fshard.plan.calibrate import calibrate
from fshard.plan.cluster import MACHINES, PRESETS, Cluster, cluster, is_machine
from fshard.plan.estimate import PlanEstimate
from fshard.plan.hugging_face.modules import model_of_config
from fshard.plan.layers import LayerTracer
from fshard.plan.models import Transformer
from fshard.plan.program import layered_model
from fshard.plan.search import GOALS, LARGEST_COUNT, Plans, best_by, search
from fshard.plan.space import NOT_SEARCHED
from fshard.plan.tables.layout import field_values, layout_fields
from fshard.plan.tables.progress import ProgressLine
from fshard.plan.tables.summary import Training
from fshard.plan.tables.why import Reason

OPTIMIZER = with_master_weights(adamw(3e-4))
"""The optimizer of a search."""

LONGEST = 2**30
"""The most tokens of a sample."""

SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""The suffixes of a number of tokens."""


def run_plan(arguments: Sequence[str]) -> int:
    """Search and print the table; write the best plan if a file is given; return the exit status."""
    parser = _plan_parser()
    options, extra = parser.parse_known_args(arguments)
    if extra:
        _refuse(parser, extra)
    training = Training(options.tokens, options.price)
    constraints = _constraints(options)
    layouts = [layout_fields(text) for text in options.why]
    for path in (options.out, options.json):
        _validate_folder(path)

    run = {name: vars(options)[name] for name in _RUN}
    model, machine = model_and_machine(run)
    with ProgressLine() as progress:
        found = _searches(model, machine, options, constraints, progress)
        plans = _joined(found.plans)
        reasons = list[Reason]()
        for layout, each in product(layouts, found.plans):
            progress("comparing the layouts of --why")
            reasons.append(each.reason(layout))

    sys.stdout.write(f"{plans.text(**vars(training))}\n")
    for error in found.errors:
        sys.stdout.write(f"{error}\n")
    for reason in reasons:
        sys.stdout.write(f"\n{reason.text}\n")
    if options.json is not None:
        why = [reason.to_dict() for reason in reasons]
        table = {**run, **plans.to_dict(**vars(training)), "why": why}
        Path(options.json).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    if options.out is not None:
        best_by(options.goal, plans).save(options.out)
        _append_run(options.out, run, plans)
    return 0


_RUN = ("config", "gpu", "node", "sequence")
"""The arguments of a search that `fshard explore` needs too: the table "run" of a plan's file."""

_CONSTRAINTS = tuple([name for name in FIELDS if name not in NOT_SEARCHED])
"""The fields of a plan that arguments constrain."""

_FORMER = {"sequence": "sequence_devices"}
"""Fields whose names other arguments have: `--sequence` is the number of tokens."""


def _plan_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="fshard plan", description="Rank meshes and options of training a model."
    )
    add = parser.add_argument
    add("config", help="config.json of Hugging Face, or its folder")
    add("--devices", type=_counts, required=True, help="their number, or several: 64,128,256")
    machines = f"{', '.join(PRESETS)}, or a file of fshard calibrate"
    add("--gpu", type=_machine, required=True, help=machines)
    add("--node", type=_count, help="devices of a node")
    add("--global-batch", type=_count, required=True, help="samples of a step")
    length = "tokens of a sample; default: the most that the model takes"
    add("--sequence", type=_length, help=length)
    add("--goal", choices=GOALS, default="time", help="what the best plan has least of")
    add("--tokens", type=_number, help="of the training, for its days: 15T")
    add("--price", type=_number, help="of a device and hour, for the cost of the training")
    add(
        "--why",
        action="append",
        default=[],
        metavar="LAYOUT",
        help="the terms by which a layout loses, or why it is rejected: data=8,tensor=8",
    )
    add("-o", "--out", help="a TOML file for the best plan: fs.Parallelism.load, fshard explore")
    add("--json", metavar="OUT", help="a file for all numbers")

    group = parser.add_argument_group(
        "constraints", "fields of fs.Parallelism, with one value or several: --tensor 1,8"
    )
    for name in _CONSTRAINTS:
        option = _FORMER.get(name, name).replace("_", "-")
        group.add_argument(f"--{option}", dest=f"field_{name}", metavar="VALUES")
    return parser


def _refuse(parser: ArgumentParser, extra: Sequence[str]) -> None:
    """Raise for arguments that are none, such as the second of `--zero-stage 2 3`."""
    text = f"unrecognized arguments: {' '.join(extra)}"
    are_values = not any([word.startswith("-") for word in extra])
    if are_values:
        text += ". Several values of one argument are joined by commas: --zero-stage 2,3"
    parser.error(text)


def _constraints(options: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    """Return the values of each field that an argument names."""
    constraints = dict[str, tuple[Any, ...]]()
    for name in _CONSTRAINTS:
        text = vars(options)[f"field_{name}"]
        if text is not None:
            constraints[name] = field_values(name, text)
    return constraints


# -- numbers of arguments --------------------------------------------------------------------------


def _integer(largest: int) -> Callable[[str], int]:
    """Return a function that reads an integer from 1 to another one."""

    def read(text: str) -> int:
        is_integer = text.isascii() and text.isdecimal() and len(text) < 20
        if not is_integer or not 1 <= int(text) <= largest:
            raise argparse.ArgumentTypeError(
                f"must be an integer from 1 to {largest}; got {text!r}"
            )
        return int(text)

    return read


_count = _integer(LARGEST_COUNT)
_length = _integer(LONGEST)


def _counts(text: str) -> list[int]:
    """Return the numbers in a text, by commas, each once and the smallest first."""
    return sorted({_count(part.strip()) for part in text.split(",")})


def _machine(text: str) -> str:
    """Return a name of a machine, or the path of its file."""
    if not is_machine(text):
        raise argparse.ArgumentTypeError(f"must be {MACHINES}; got {text!r}")
    return text


def _number(text: str) -> float:
    """Return a number above 0.

    >>> _number("15T"), _number("2.5")
    (15000000000000.0, 2.5)
    """
    suffix = text[-1:].upper()
    digits = text.removesuffix(text[-1:]) if suffix in SUFFIXES else text
    try:
        number = float(digits) * SUFFIXES.get(suffix, 1.0)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(
            f"must be a number above 0, such as 2.5 or 15T; got {text!r}"
        )
    return number


def _validate_folder(path: str | None) -> None:
    """Raise if no file can be written there, before a search takes its time."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise PlanError(f"fshard plan: {path} must be a file in a folder that can be written.")


# -- searches --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Searches:
    """The plans of each number of devices, and the errors of those where none fits."""

    plans: list[Plans]
    errors: list[str]


def _searches(
    model: tuple[Transformer | nn.Module, PyTree],
    machine: Cluster,
    options: argparse.Namespace,
    constraints: Mapping[str, Any],
    progress: ProgressLine,
) -> Searches:
    """Search each number of devices; raise if no plan fits any."""
    found = Searches([], [])
    for devices in options.devices:
        try:
            plans = search(
                *model,
                cluster=machine,
                optimizer=OPTIMIZER,
                devices=devices,
                global_batch=options.global_batch,
                goal=options.goal,
                progress=progress,
                **constraints,
            )
            found.plans.append(plans)
        except PlanError as error:
            found.errors.append(str(error))
    if not found.plans:
        raise PlanError(found.errors[0])
    return found


def _joined(searches: Sequence[Plans]) -> Plans:
    """Return the plans of several numbers of devices as one value."""
    if len(searches) == 1:
        return searches[0]
    estimates = list(chain.from_iterable([plans.estimates for plans in searches]))
    return Plans(estimates, [], sum([plans.tried for plans in searches]))


def _append_run(path: str, run: Mapping[str, Any], plans: Plans) -> None:
    """Append the arguments, with the path of the model from any folder, and the best plans."""
    table = {**run, "config": str(Path(run["config"]).resolve()), "tried": plans.tried}
    lines = ["", "[run]", *_lines(table)]
    for row in plans.rows():
        lines += ["", "[[run.plans]]", *_lines(row)]
    with Path(path).open("a", encoding="utf-8") as file:
        file.write("\n".join([*lines, ""]))


def _lines(values: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of TOML; None, which TOML has not, is left out."""
    lines = list[str]()
    for name, value in values.items():
        if value is not None:
            lines.append(f"{name} = {json.dumps(value)}")
    return lines


def model_and_machine(
    run: Mapping[str, Any],
) -> tuple[tuple[Transformer | nn.Module, PyTree], Cluster]:
    """Return the model with its batch, and the machine, of a search."""
    # A wrong name of a machine is found before a model is built.
    machine = cluster(run["gpu"], node=run.get("node"))
    return model_of_config(run["config"], sequence=run.get("sequence")), machine


class SavedPlan(NamedTuple):
    """A plan that `fshard plan -o` has written.

    Args:
        estimate: of the plan, on its machine.
        model: that was searched.
        run: the arguments and the best plans of the search.
    """

    estimate: PlanEstimate
    model: Transformer | nn.Module
    run: Mapping[str, Any]


def plan_of_file(path: str) -> SavedPlan:
    """Return the plan that `fshard plan -o` has written, and its model."""
    run = read_table(path, "explore").get("run", {})
    _validate_run(run, path)
    (model, batch), machine = model_and_machine(run)
    plan = Parallelism.load(path)
    if plan.data is None:
        raise PlanError(f"explore: {path} must have data as a number; got none.")
    tracer = LayerTracer(layered_model(model, batch, OPTIMIZER, None, None), machine)
    return SavedPlan(PlanEstimate(plan, tracer), model, run)


def _validate_run(run: Any, path: str) -> None:
    """Raise if the arguments of a search are not as `fshard plan -o` writes them."""
    if not isinstance(run, Mapping) or not {"config", "gpu"} <= run.keys():
        raise PlanError(
            f"explore: {path} must be a file of `fshard plan -o`, with config and gpu in a table "
            f"run; got {run}."
        )
    unknown = [name for name in run if name not in (*_RUN, "tried", "plans")]
    wrong = [name for name in ("config", "gpu") if not isinstance(run[name], str)]
    for name in ("node", "sequence", "tried"):
        value = run.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= LONGEST):
            wrong.append(name)
    if not _are_rows(run.get("plans", [])):
        wrong.append("plans")
    if unknown or wrong:
        names = ", ".join([*unknown, *wrong])
        raise PlanError(
            f"explore: the table run of {path} must be as `fshard plan -o` writes it; "
            f"got another {names}."
        )


def _are_rows(rows: Any) -> bool:
    """Return True for plans as `Plans.rows` has them."""
    if not isinstance(rows, list):
        return False
    for row in cast(list[Any], rows):
        values = cast(dict[str, Any], row) if isinstance(row, dict) else {}
        texts = [values.get(name) for name in ("plan", "reason")]
        numbers = [values.get(name) for name in ("seconds", "mfu", "peak")]
        are_texts = all([isinstance(text, str) for text in texts])
        are_numbers = all([isinstance(x, int | float) and isfinite(x) for x in numbers])
        if not are_texts or not are_numbers:
            return False
    return True


def run_calibrate(arguments: Sequence[str]) -> int:
    """Measure, write, and print the path; return the exit status."""
    parser = ArgumentParser(
        prog="fshard calibrate", description="Measure this machine in about half a minute."
    )
    cores = torch.cuda.device_count() or max((os.cpu_count() or 1) // 2, 1)
    parser.add_argument(
        "--processes", type=_integer(1024), default=cores, help="that compute at once (%(default)s)"
    )
    parser.add_argument(
        "-o", "--out", default="cluster.toml", help="the file to write (%(default)s)"
    )
    options = parser.parse_args(arguments)
    _validate_folder(options.out)
    machine = launch(_measured, processes=options.processes)[0]
    machine.save(options.out)
    sys.stdout.write(f"{options.out}\n")
    return 0


def _measured() -> Cluster:
    torch.set_num_threads(1)
    return calibrate(make_mesh({"all": process_count()}))
