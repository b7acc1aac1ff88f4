"""The command `fshard certify`: does a program, or a script, train in processes as in one?

fshard certify train.py:program --mesh data=2              a function program(rank, world)
fshard certify --run train.py --mesh data=2 -- --lr 0.1    a script as torchrun runs it
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fshard.rounding import TOLERANCES
from fshard.testing.certificate import Certificate
from fshard.testing.certificate_page import certificate_page
from fshard.testing.programs.certify import certify_program
from fshard.testing.programs.record import MissingAxisError
from fshard.testing.programs.source import program_named
from fshard.testing.scripts.script import certify_script

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCES}


def run(arguments: Sequence[str]) -> int:
    """Certify a program or a script; return the status of the command.

    It is 0 if it trains as in one process, 1 if it does not, 2 if neither is known.
    """
    words, of_script = _divided(arguments)
    options, unknown = _parser().parse_known_args(words)
    try:
        _validate(options, unknown)
        meshes = [_axes(text) for text in options.mesh]
        if options.steps is not None and options.steps < 1:
            raise UsageError(f"--steps must be >= 1; got {options.steps}.")
        if options.run is None:
            certificate = _certified_program(options, meshes, of_script)
        else:
            certificate = _certified_script(options, meshes, of_script)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except MissingAxisError as error:
        sys.stderr.write(f"fshard certify: {error}\n")
        return 2
    except Exception as error:
        notes = getattr(error, "__notes__", ())
        lines = [f"{type(error).__name__}: {error}", *notes]
        sys.stderr.write("\n".join(lines) + "\n")
        return 2
    sys.stdout.write(f"{certificate}\n")
    if options.json:
        Path(options.json).write_text(certificate.json())
    if options.html:
        Path(options.html).write_text(certificate_page(certificate), encoding="utf-8")
    return _status(certificate)


def _status(certificate: Certificate) -> int:
    if certificate.ok:
        return 0
    is_found = any(row.verdict == "DIVERGENT" for row in certificate.rows)
    return 1 if is_found else 2


class UsageError(ValueError):
    """A command line without anything that can be run."""

    def __init__(self, text: str) -> None:
        super().__init__(f"fshard certify: {text}")


def _validate(options: argparse.Namespace, unknown: Sequence[str]) -> None:
    """Raise before anything runs if words mean nothing, or files cannot be written."""
    if unknown:
        text = f"options must be those of fshard certify; got {' '.join(unknown)}."
        if options.run is not None:
            text += " Arguments of the script stand behind --."
        raise UsageError(text)
    files = {"--json": options.json, "--html": options.html, "--record": options.record}
    for option, name in files.items():
        if name is None:
            continue
        if Path(name).is_dir() or not Path(name).parent.is_dir():
            raise UsageError(f"{option} must be a file in a folder that exists; got {name}.")


def _divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of the command, and those behind `--`, which are the script's.

    >>> _divided(["--run", "train.py", "--", "--steps", "5"])
    (['--run', 'train.py'], ['--steps', '5'])
    """
    words = list(arguments)
    if "--" not in words:
        return words, []
    end = words.index("--")
    return words[:end], words[end + 1 :]


def _certified_program(
    options: argparse.Namespace, meshes: list[dict[str, int]], of_script: Sequence[str]
) -> Certificate:
    if options.program is None:
        raise UsageError("what to certify must be FILE:NAME or --run FILE; got neither.")
    if options.record is not None:
        raise UsageError("--record needs --run FILE.")
    if of_script or options.alone is not None:
        raise UsageError("arguments of a script need --run FILE.")
    try:
        program = program_named(options.program)
    except (ValueError, OSError) as error:
        raise UsageError(str(error).removeprefix("fshard certify: ")) from None
    return certify_program(
        program,
        meshes,
        steps=options.steps or 3,
        **_options_of_both(options),
        timeout=options.timeout or 60.0,
    )


def _certified_script(
    options: argparse.Namespace, meshes: list[dict[str, int]], of_script: Sequence[str]
) -> Certificate:
    if options.program is not None:
        raise UsageError(
            f"what to certify must be one of FILE:NAME and --run FILE; got {options.program} and "
            f"{options.run}. Arguments of the script stand behind --."
        )
    if not Path(options.run).is_file():
        raise UsageError(f"--run must name a script; got no file {options.run!r}.")
    if options.record is not None and len(meshes) > 1:
        raise UsageError(f"--record needs one --mesh; got {len(meshes)}.")
    return certify_script(
        options.run,
        meshes,
        of_script,
        steps=options.steps or 2,
        alone=None if options.alone is None else shlex.split(options.alone),
        **_options_of_both(options),
        record=options.record,
        timeout=options.timeout or 180.0,
    )


def _options_of_both(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that `certify_program` and `certify_script` have in common."""
    return {
        "dtype": None if options.dtype is None else DTYPES[options.dtype],
        "splits": dict([_split(text) for text in options.split]),
        "parts": dict([_parts(text) for text in options.parts]),
        "same": options.same,
    }


def _axes(text: str) -> dict[str, int]:
    """Return the axes of a mesh.

    >>> _axes("data=2,model=4")
    {'data': 2, 'model': 4}
    """
    axes: dict[str, int] = {}
    for pair in text.split(","):
        name, _, size = pair.partition("=")
        is_size = size.isdecimal() and int(size) > 0
        if not name.isidentifier() or not is_size:
            raise UsageError(f"a mesh must be like data=2,model=4; got {text!r}.")
        axes[name] = int(size)
    return axes


def _split(text: str) -> tuple[str, int]:
    """Return an axis and the dim of batches that is split along it.

    >>> _split("context=1")
    ('context', 1)
    """
    axis, _, dim = text.partition("=")
    if not axis.isidentifier() or not dim.isdecimal():
        raise UsageError(f"a split must be like context=1; got {text!r}.")
    return axis, int(dim)


def _parts(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the names of parameters and the rows of their parts.

    >>> _parts("*.qkv.bias=64,16,16")
    ('*.qkv.bias', (64, 16, 16))
    """
    pattern, _, rows = text.rpartition("=")
    are_numbers = all(number.isdecimal() for number in rows.split(","))
    if not pattern or not are_numbers:
        raise UsageError(f"parts must be like *.qkv.bias=64,16,16; got {text!r}.")
    return pattern, tuple([int(number) for number in rows.split(",")])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fshard certify",
        usage="fshard certify (FILE:NAME | --run FILE) --mesh data=2 [options] [-- arguments]",
        description="Train a program of torch.distributed, or a script of torchrun, on CPUs in "
        "processes and in one, and compare losses, gradients and parameters: see "
        "fshard.testing.certify_program and certify_script. Status 0: they agree; 1: they do not; "
        "2: an error.",
    )
    parser.add_argument(
        "program", metavar="FILE:NAME", nargs="?", help="a function program(rank, world) in a file"
    )
    parser.add_argument(
        "--run", metavar="FILE", help="a script as it is; its arguments stand behind --"
    )
    parser.add_argument(
        "--mesh",
        action="append",
        required=True,
        help="axes, such as data=2,model=2; several are tried",
    )
    parser.add_argument("--steps", type=int, help="3; of a script 2")
    parser.add_argument(
        "--alone", metavar="ARGUMENTS", help='of the script in one process, such as "--tp 1"'
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="the lowest precision that tensors may be reduced in"
    )
    parser.add_argument(
        "--split",
        action="append",
        default=[],
        metavar="AXIS=DIM",
        help="the dim of batches that is split along an axis, such as context=1",
    )
    parser.add_argument(
        "--parts",
        action="append",
        default=[],
        metavar="NAMES=ROWS",
        help="the rows of each part of fused parameters, such as '*.qkv.bias=64,16,16'",
    )
    parser.add_argument(
        "--same",
        action="append",
        default=[],
        metavar="AXIS",
        help="an axis such as data along which equal batches are meant",
    )
    parser.add_argument("--timeout", type=float, help="seconds for each mesh: 60, of a script 180")
    parser.add_argument(
        "--record", metavar="FILE", help="collectives of a script, for `fshard explore FILE`"
    )
    parser.add_argument("--json", help="a file for the certificate")
    parser.add_argument("--html", help="a file for a page with the tree of the model's leaves")
    return parser
