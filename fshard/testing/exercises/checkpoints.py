"""Exercises of the notebook "Checkpoints"."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import fshard as fs
from fshard import P
from fshard.testing.grading import Answer, Cases, Exercise, WrongAnswer, mistake

__all__ = ["EXERCISES"]


# -- the bytes that a device writes ---------------------------------------------------------------


@cache
def written_bytes(rows: int, data: int, model: int) -> int:
    """Count the bytes of data that a device writes: a file of safetensors without its header."""
    mesh = fs.make_mesh({"data": data, "model": model})
    array = fs.device_put(torch.ones(rows, 4), fs.Layout(mesh, P("model")))
    sizes: list[int] = []
    with TemporaryDirectory() as folder:
        fs.save(folder, {"w": array})
        for file in Path(folder).glob("*.safetensors"):
            content = file.read_bytes()
            header_bytes = 8 + int.from_bytes(content[:8], "little")
            sizes.append(len(content) - header_bytes)
    return max(sizes)


@mistake(
    "That is the device's shard. Devices with an equal one divide it: each byte is written once."
)
def bytes_of_shard(rows: int, data: int, model: int) -> int:
    return 16 * rows // model


@mistake("That is the full tensor. Each device writes a part of what it stores.")
def bytes_of_tensor(rows: int, data: int, model: int) -> int:
    return 16 * rows


@mistake("That is a number of elements. A float32 has 4 bytes.")
def written_elements(rows: int, data: int, model: int) -> float:
    return 4 * rows / (data * model)


@mistake('The axis "data" does not shard the tensor; "model" does. Both divide the work.')
def bytes_by_data(rows: int, data: int, model: int) -> int:
    return 16 * rows // data


WRITTEN = Exercise(
    name="checkpoints.written",
    question=(
        'A float32 tensor of `rows` x 4 has the layout `P("model")` on a mesh of `data` x `model`'
        " devices. How many bytes of it does each device write in `fs.save`, if all is divisible?"
    ),
    form="answer(rows, data, model)",
    hints=(
        'Devices along "data" have equal shards. Does each of them write its shard?',
        "Each byte is written once, and the devices with equal shards divide it.",
        "All bytes, divided by all devices.",
    ),
    why="Saving takes 1/n of the time, though the layout has copies: replicas are writers, too.",
    grade=Cases(
        cases=[(24, 2, 3), (16, 4, 2), (12, 1, 3)],
        truth=written_bytes,
        mistakes=(bytes_of_shard, bytes_of_tensor, written_elements, bytes_by_data),
    ),
)


# -- a loop that may be killed --------------------------------------------------------------------

UNTIL = 4
SUM = torch.full((2,), 10.0)  # 1 + 2 + 3 + 4


class _Crash(BaseException):
    """The end of the process, in the check of a loop: `except Exception` does not catch it."""


class _Counted:
    """A step that adds its number to a sum, and crashes at some calls."""

    def __init__(self, crashes: tuple[int, ...]) -> None:
        self.crashes = crashes
        self.calls = 0
        self.numbers: list[int] = []

    def __call__(self, state: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        if self.calls in self.crashes:
            raise _Crash
        if self.calls > 100:
            raise WrongAnswer("After a hundred steps the loop has not ended.")
        self.numbers.append(state["steps"])
        return {"w": state["w"] + state["steps"] + 1, "steps": state["steps"] + 1}


def grade_loop(answer: Answer) -> None:
    for crashes in ((), (2, 4)):
        step = _Counted(crashes)
        with TemporaryDirectory() as path:
            folder = fs.Checkpoints(path)
            state = last_state(answer, folder, step)
            latest = folder.latest
        grade_end(state, latest, step)


def last_state(answer: Answer, folder: fs.Checkpoints, step: _Counted) -> Any:
    """Call the loop again after each crash, as a cluster does."""
    for _ in range(len(step.crashes) + 1):
        state = {"w": torch.zeros(2), "steps": 0}
        try:
            return answer(folder, step, state, UNTIL)
        except _Crash:
            continue
    raise AssertionError("a step crashes only as often as it is planned")


def grade_end(state: Any, latest: int | None, step: _Counted) -> None:
    """Compare the end of a loop with that of one that was never killed."""
    numbers = step.numbers
    if not isinstance(state, dict) or set(state) != {"w", "steps"}:
        raise WrongAnswer("The answer must return the state of the last step.")
    if step.crashes and numbers.count(0) > 1:
        raise WrongAnswer(
            "After a crash it begins at step 0. `folder.latest` is the last saved step, or"
            " None; `folder.restore(state)` has its tree."
        )
    if len(numbers) > UNTIL:
        raise WrongAnswer(
            f"It makes the steps {numbers}, where {UNTIL} are enough. How many are left follows"
            ' from `state["steps"]` after it was restored.'
        )
    if state["steps"] != UNTIL or len(numbers) < UNTIL:
        raise WrongAnswer(f"Until {UNTIL} it makes the steps {numbers}.")
    if not torch.equal(state["w"], SUM):
        raise WrongAnswer(
            f"The sum is {state['w'].tolist()}, and without a crash {SUM.tolist()}: the number of"
            " steps is restored, and the weights are not."
        )
    if latest != UNTIL:
        raise WrongAnswer(
            f"The last state is not saved: `folder.latest` is {latest}. Save after the step, under"
            " the number of steps that are made then."
        )


LOOP = Exercise(
    name="checkpoints.loop",
    question=(
        "Write a loop that may be killed at any moment and started again: `folder` is an"
        " `fs.Checkpoints`, `step(state)` returns the next state, `state` is the one to begin with"
        ' if nothing is saved. It has `state["steps"]`, the number of steps made. Save after each'
        " step; return the state after `until` steps. No saved step may be made twice."
    ),
    form="answer(folder, step, state, until)",
    hints=(
        "Before the loop: if `folder.latest` is not None, `state = folder.restore(state)`.",
        '`while state["steps"] < until:` and not `for _ in range(until)`.',
        '`folder.save(state["steps"], state)` after the step.',
    ),
    why="It is the loop of all elastic and preemptible runs; the mesh may change in between.",
    grade=grade_loop,
)


# -- a checkpoint of another mesh -----------------------------------------------------------------


def grade_restored(answer: Answer) -> None:
    for n in (2, 4):
        mesh = fs.make_mesh({"data": n})
        saved_on = fs.make_mesh({"x": 3})
        w = torch.arange(32.0).view(8, 4)
        tree = {
            "w": fs.device_put(w, fs.Layout(saved_on, P.flat("x"))),
            "norm": torch.ones(4),
            "steps": 7,
        }
        with TemporaryDirectory() as path:
            fs.save(path, tree)
            restored = answer(path, mesh)

        if not isinstance(restored, dict) or set(restored) != set(tree):
            raise WrongAnswer(
                "The answer must return the tree of the checkpoint, with `w`, `norm` and `steps`."
            )
        grade_leaf("w", restored["w"], fs.Layout(mesh, P.flat("data")))
        grade_leaf("norm", restored["norm"], fs.Layout(mesh, P()))


def grade_leaf(name: str, leaf: Any, layout: fs.Layout) -> None:
    if not isinstance(leaf, fs.Sharded):
        raise WrongAnswer(f"`{name}` is a plain tensor. With `mesh=` the rules give it a layout.")
    if leaf.layout.mesh != layout.mesh:
        raise WrongAnswer(f"`{name}` is on {leaf.layout.mesh}; it must be on {layout.mesh}.")
    if leaf.spec != layout.spec:
        raise WrongAnswer(
            f"`{name}` has the layout `{leaf.spec}`; the question has `{layout.spec}`."
            " A rule is a pattern of names and a `P`; the first one that fits holds."
        )


RESTORED = Exercise(
    name="checkpoints.restored",
    question=(
        "A checkpoint at `path` has the arrays `w` and `norm` and a number `steps`, from a mesh of"
        ' three devices. Restore it on `mesh`, of the axis "data": `norm` replicated, all other'
        " arrays flat, as FSDP has them."
    ),
    form="answer(path, mesh)",
    hints=(
        "`fs.restore(path, rules, mesh=mesh)` makes the tree.",
        '`fs.fsdp("data")` is the rule of flat layouts, for the pattern `"**"`.',
        'One pattern for `norm`, `P()`; then `"**"`.',
    ),
    why="No layout of the past binds a run: a checkpoint of 3 devices is read by 4 or by 4,000.",
    grade=grade_restored,
)

EXERCISES = (WRITTEN, LOOP, RESTORED)
