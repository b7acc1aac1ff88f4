"""The command `fshard certify FILE:NAME`: does a program train in processes as in one?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fshard.rounding import TOLERANCES
from fshard.testing.certificate_page import certificate_page
from fshard.testing.programs.certify import certify_program
from fshard.testing.programs.source import program_named

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCES}


def run(arguments: Sequence[str]) -> int:
    """Certify a program; return the status of the command.

    It is 0 if the program trains as in one process, 1 if it does not, 2 if there is an error.
    """
    options = _parser().parse_args(arguments)
    try:
        program = program_named(options.program)
        meshes = [_axes(text) for text in options.mesh]
        splits = dict([_split(text) for text in options.split])
        parts = dict([_parts(text) for text in options.parts])
    except (ValueError, OSError) as error:  # a mistake of the command line
        sys.stderr.write(f"{error}\n")
        return 2
    try:
        certificate = certify_program(
            program,
            meshes,
            steps=options.steps,
            dtype=DTYPES.get(options.dtype),
            splits=splits,
            parts=parts,
            timeout=options.timeout,
        )
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
    return 0 if certificate.ok else 1


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
            raise ValueError(f"fshard certify: a mesh must be like data=2,model=4; got {text!r}.")
        axes[name] = int(size)
    return axes


def _split(text: str) -> tuple[str, int]:
    """Return an axis and the dim of batches that is split along it.

    >>> _split("context=1")
    ('context', 1)
    """
    axis, _, dim = text.partition("=")
    if not axis.isidentifier() or not dim.isdecimal():
        raise ValueError(f"fshard certify: a split must be like context=1; got {text!r}.")
    return axis, int(dim)


def _parts(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the names of parameters and the rows of their parts.

    >>> _parts("*.qkv.bias=64,16,16")
    ('*.qkv.bias', (64, 16, 16))
    """
    pattern, _, rows = text.rpartition("=")
    are_numbers = all(number.isdecimal() for number in rows.split(","))
    if not pattern or not are_numbers:
        raise ValueError(f"fshard certify: parts must be like *.qkv.bias=64,16,16; got {text!r}.")
    return pattern, tuple([int(number) for number in rows.split(",")])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fshard certify",
        description="Train a program of torch.distributed on CPUs in processes and in one, and "
        "compare losses, gradients and parameters: see fshard.testing.certify_program. Status 0: "
        "they agree; 1: they do not; 2: an error.",
    )
    parser.add_argument(
        "program", metavar="FILE:NAME", help="a function program(rank, world) in a file"
    )
    parser.add_argument(
        "--mesh",
        action="append",
        required=True,
        help="axes, such as data=2,model=2; several are tried",
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--dtype", choices=DTYPES, help="the lowest one that tensors may be sent and reduced in"
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
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each mesh")
    parser.add_argument("--json", help="a file for the certificate")
    parser.add_argument("--html", help="a file for a page with the tree of the model's leaves")
    return parser
