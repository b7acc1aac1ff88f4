"""Exercises of the notebook "Checkpoints"."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import fshard as fs
from fshard import P
from fshard.testing.grading import Exercise, WrongAnswer, as_function, grade_cases


@cache
def _written(rows: int, data: int, model: int) -> int:
    """Count the bytes of data that device 0 writes: a file of safetensors without its header."""
    mesh = fs.make_mesh({"data": data, "model": model})
    array = fs.device_put(torch.ones(rows, 4), fs.Layout(mesh, P("model")))
    sizes: list[int] = []
    with TemporaryDirectory() as folder:
        fs.save(folder, {"w": array})
        for file in Path(folder).glob("*.safetensors"):
            data_bytes = file.read_bytes()
            sizes.append(len(data_bytes) - 8 - int.from_bytes(data_bytes[:8], "little"))
    return max(sizes)


WRITTEN = Exercise(
    "checkpoints.written",
    'A float32 tensor of `rows` x 4 has the layout `P("model")` on a mesh of `data` x `model`'
    " devices. How many bytes of it does each device write in `fs.save`, if all is divisible?",
    "answer(rows, data, model)",
    (
        'Devices along "data" have equal shards. Does each of them write its shard?',
        "Each byte is written once, and the devices with equal shards divide it.",
        "All bytes, divided by all devices.",
    ),
    "Saving takes 1/n of the time, though the layout has copies: replicas are writers, too.",
    lambda answer: grade_cases(
        answer,
        "answer(rows, data, model)",
        [(24, 2, 3), (16, 4, 2), (12, 1, 3)],
        _written,
        {
            "That is the device's shard. Devices with an equal one divide it: each byte is written"
            " once.": lambda rows, data, model: 16 * rows // model,
            "That is the full tensor. Each device writes a part of what it stores.": (
                lambda rows, data, model: 16 * rows
            ),
            "That is a number of elements. A float32 has 4 bytes.": (
                lambda rows, data, model: 4 * rows / (data * model)
            ),
            'The axis "data" does not shard the tensor; "model" does. Both divide the work.': (
                lambda rows, data, model: 16 * rows // data
            ),
        },
    ),
)


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


_UNTIL = 4
_SUM = torch.full((2,), 10.0)  # 1 + 2 + 3 + 4


def _trained(function: Callable[..., Any], crashes: tuple[int, ...]) -> tuple[Any, Any, _Counted]:
    """Call the loop again after each crash, as a cluster does."""
    step = _Counted(crashes)
    with TemporaryDirectory() as path:
        folder = fs.Checkpoints(path)
        for _ in range(len(crashes) + 1):
            state = {"w": torch.zeros(2), "steps": 0}
            try:
                return function(folder, step, state, _UNTIL), folder.latest, step
            except _Crash:
                continue
    raise AssertionError("a step crashes only as often as it is planned")


def _grade_loop(answer: Any) -> None:
    form = "answer(folder, step, state, until)"
    function = as_function(answer, form)
    for crashes in ((), (2, 4)):
        state, latest, step = _trained(function, crashes)
        _grade_end(state, latest, step)


def _grade_end(state: Any, latest: int | None, step: _Counted) -> None:
    """Compare the end of a loop with that of one that was never killed."""
    made = step.numbers
    if not isinstance(state, dict) or set(state) != {"w", "steps"}:
        raise WrongAnswer("The answer must return the state of the last step.")
    if step.crashes and made.count(0) > 1:
        raise WrongAnswer(
            "After a crash it begins at step 0. `folder.latest` is the last saved step, or"
            " None; `folder.restore(state)` has its tree."
        )
    if len(made) > _UNTIL:
        raise WrongAnswer(
            f"It makes the steps {made}, where {_UNTIL} are enough. How many are left follows from"
            ' `state["steps"]` after it was restored.'
        )
    if state["steps"] != _UNTIL or len(made) < _UNTIL:
        raise WrongAnswer(f"Until {_UNTIL} it makes the steps {made}.")
    if not torch.equal(state["w"], _SUM):
        raise WrongAnswer(
            f"The sum is {state['w'].tolist()}, and without a crash {_SUM.tolist()}: the number of"
            " steps is restored, and the weights are not."
        )
    if latest != _UNTIL:
        raise WrongAnswer(
            f"The last state is not saved: `folder.latest` is {latest}. Save after the step, under"
            " the number of steps that are made then."
        )


LOOP = Exercise(
    "checkpoints.loop",
    "Write a loop that may be killed at any moment and started again: `folder` is an"
    " `fs.Checkpoints`, `step(state)` returns the next state, `state` is the one to begin with if"
    ' nothing is saved. It has `state["steps"]`, the number of steps made. Save after each step;'
    " return the state after `until` steps. No saved step may be made twice.",
    "answer(folder, step, state, until)",
    (
        "Before the loop: if `folder.latest` is not None, `state = folder.restore(state)`.",
        '`while state["steps"] < until:` and not `for _ in range(until)`.',
        '`folder.save(state["steps"], state)` after the step.',
    ),
    "It is the loop of all elastic and preemptible runs; the mesh may change in between.",
    _grade_loop,
)


def _grade_restored(answer: Any) -> None:
    function = as_function(answer, "answer(path, mesh)")
    for n in (2, 4):
        mesh = fs.make_mesh({"data": n})
        full = {"w": torch.arange(32.0).view(8, 4), "norm": torch.ones(4), "steps": 7}
        saved_on = fs.make_mesh({"x": 3})
        with TemporaryDirectory() as path:
            array = fs.device_put(full["w"], fs.Layout(saved_on, P.flat("x")))
            fs.save(path, {**full, "w": array})
            tree = function(path, mesh)
        if not isinstance(tree, dict) or set(tree) != set(full):
            raise WrongAnswer(
                "The answer must return the tree of the checkpoint, with `w`, `norm` and `steps`."
            )
        for name, spec in (("w", P.flat("data")), ("norm", P())):
            _grade_leaf(name, tree[name], fs.Layout(mesh, spec))


def _grade_leaf(name: str, leaf: Any, layout: fs.Layout) -> None:
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
    "checkpoints.restored",
    "A checkpoint at `path` has the arrays `w` and `norm` and a number `steps`, from a mesh of"
    " three"
    ' devices. Restore it on `mesh`, of the axis "data": `norm` replicated, all other arrays flat,'
    " as FSDP has them.",
    "answer(path, mesh)",
    (
        "`fs.restore(path, rules, mesh=mesh)` makes the tree.",
        '`fs.fsdp("data")` is the rule of flat layouts, for the pattern `"**"`.',
        'One pattern for `norm`, `P()`; then `"**"`.',
    ),
    "No layout of the past binds a run: a checkpoint of 3 devices is read by 4 or by 4,000.",
    _grade_restored,
)

EXERCISES = (WRITTEN, LOOP, RESTORED)
