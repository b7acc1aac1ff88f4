"""What all processes found, judged: one sentence, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fshard.doctor.examine import Findings
from fshard.doctor.machine import why_not_direct


@dataclass(frozen=True)
class Verdict:
    """Whether all is well, why, and what to do."""

    well: bool
    sentence: str
    advice: tuple[str, ...] = ()


def judge(findings: Sequence[Findings]) -> Verdict:
    """Judge what all processes found."""
    wrong = [one for one in (_collectives(findings), _versions(findings)) if one]
    if wrong:
        return Verdict(False, "Not well: " + "; ".join(wrong) + ".", (*_remedies(findings), *_hints(findings)))
    first, n = findings[0], len(findings)
    who = f"{n} processes over {first.way}" if n > 1 else "1 process"
    gpus = ", ".join(sorted({gpu for one in findings for gpu in one.machine.gpus}))
    where = f" on {gpus}" if first.device == "cuda" else ""
    count = sum(len(_functions(trial.collective)) for trial in first.trials)
    return Verdict(True, f"All well: {who}{where}, {count} collectives right.", _hints(findings))


def failed(error: BaseException, processes: int) -> Verdict:
    """Judge an error that came instead of findings."""
    kind = f"{type(error).__name__}: {error}".rstrip(".")
    advice = ("FSHARD_CHECK=1 says which process is in which call.", *getattr(error, "__notes__", []))
    return Verdict(False, f"Not well: {processes} processes did not get through. {kind}.", advice)


def _functions(name: str) -> tuple[str, ...]:
    """Return the functions that are tried under one name: `send_recv` are two."""
    return ("send", "recv") if name == "send_recv" else (name,)


def _collectives(findings: Sequence[Findings]) -> str | None:
    """Say which collectives are wrong, each with an example."""
    told: list[str] = []
    for place, trial in enumerate(findings[0].trials):
        complaints = [complaint for one in findings for complaint in one.trials[place].complaints]
        if complaints:
            name = " and ".join(_functions(trial.collective))
            told.append(f"{name} wrong in {len(complaints)} of {trial.cases * len(findings)} results, {complaints[0]}")
    return "; ".join(told) if told else None


def _versions(findings: Sequence[Findings]) -> str | None:
    found = {one.machine.versions: one.rank for one in findings}
    if len(found) == 1:
        return None
    each = ", ".join(f"process {rank} has Python {p}, torch {t}, fshard {f}" for (p, t, f), rank in found.items())
    return f"the processes run different versions ({each})"


def _remedies(findings: Sequence[Findings]) -> list[str]:
    """Say how to find out where a wrong result comes from."""
    if not _collectives(findings):
        return ["Install the same versions on all machines."]
    way = findings[0].way
    if "direct" in way:
        return [
            "Run it again with FSHARD_DIRECT=0, which sends everything through gloo: if all is right then, reading memory "
            "goes wrong here, and FSHARD_DIRECT=0 is the way out."
        ]
    if way == "nccl":
        return [
            "Run it again with --device cpu: if all is right then, it is NCCL; NCCL_P2P_DISABLE=1 avoids its fast ways."
        ]
    return ["Nothing but torch's gloo lies between the processes: install torch anew, or another version."]


def _hints(findings: Sequence[Findings]) -> tuple[str, ...]:
    """Say what could be faster, though it is right."""
    first = findings[0]
    hints: list[str] = []
    hosts = {one.machine.host for one in findings}
    if first.way == "gloo" and len(findings) > len(hosts):
        hints.append(
            f"Processes of one machine talk through gloo, which is slower than reading memory: {why_not_direct()}."
        )
    if first.device == "cpu" and first.machine.processors < len(findings) // len(hosts):
        hints.append(
            f"{len(findings) // len(hosts)} processes share {first.machine.processors} processors of {first.machine.host}: "
            "what is measured is how they wait for each other."
        )
    if first.machine.gpus and first.device == "cpu":
        hints.append("There are GPUs that were not tried: --device cuda.")
    return tuple(hints)
