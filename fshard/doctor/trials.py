"""Every collective, on many kinds of tensors, held to its oracle by the conformance suite: results, gradients, bytes."""

from __future__ import annotations

from dataclasses import dataclass

import fshard as fs
from fshard.testing.cases import Case, all_cases, large_cases
from fshard.testing.conformance import check_runtime
from fshard.testing.oracles import ORACLES


@dataclass(frozen=True)
class Trial:
    """What one collective was found to do."""

    collective: str
    cases: int
    complaints: tuple[str, ...] = ()


def attempt(mesh: fs.Mesh) -> list[Trial]:
    """Try all collectives on a mesh, in all its processes; each looks at its own results."""
    cases = [*all_cases(mesh), *large_cases(mesh)]
    return [_tried(mesh, name, [case for case in cases if case.collective == name]) for name in ORACLES]


def _tried(mesh: fs.Mesh, name: str, cases: list[Case]) -> Trial:
    try:
        check_runtime(mesh, cases)
    except AssertionError as error:
        return Trial(name, len(cases), tuple(line.strip() for line in str(error).splitlines()[1:]))
    return Trial(name, len(cases))
