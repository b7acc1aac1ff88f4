"""Answers to the exercises of checkpoints: the right ones, and wrong ones by their hint."""

import fshard as fs
from fshard import P


def loop(folder, step, state, until):
    if folder.latest is not None:
        state = folder.restore(state)
    while state["steps"] < until:
        state = step(state)
        folder.save(state["steps"], state)
    return state


def from_zero(folder, step, state, until):
    while state["steps"] < until:
        state = step(state)
        folder.save(state["steps"], state)
    return state


def saved_before(folder, step, state, until):
    if folder.latest is not None:
        state = folder.restore(state)
    while state["steps"] < until:
        folder.save(state["steps"], state)
        state = step(state)
    return state


def counted_by_range(folder, step, state, until):
    if folder.latest is not None:
        state = folder.restore(state)
    for _ in range(until):
        state = step(state)
        folder.save(state["steps"], state)
    return state


def endless(folder, step, state, until):
    while True:
        state = step(state)


def one_short(folder, step, state, until):
    while state["steps"] < until - 1:
        state = step(state)
    return state


SOLUTIONS = {
    "checkpoints.written": lambda rows, data, model: 16 * rows // (data * model),
    "checkpoints.loop": loop,
    "checkpoints.restored": lambda path, mesh: fs.restore(
        path, {"norm": P(), "**": fs.fsdp("data")}, mesh=mesh
    ),
}

WRONG = {
    "checkpoints.written": {
        "device's shard": lambda rows, data, model: 16 * rows // model,
        "full tensor": lambda rows, data, model: 16 * rows,
        "elements": lambda rows, data, model: 4 * rows / (data * model),
        "does not shard": lambda rows, data, model: 16 * rows // data,
    },
    "checkpoints.loop": {
        "begins at step 0": from_zero,
        "last state is not saved": saved_before,
        "must return the state": lambda folder, step, state, until: None,
        "makes the steps [0, 1, 2].": one_short,
        "has not ended": endless,
        "[0, 1, 2, 3, 4": counted_by_range,
    },
    "checkpoints.restored": {
        "plain tensor": lambda path, mesh: fs.restore(path),
        "`norm` has the layout": lambda path, mesh: fs.restore(path, fs.fsdp("data"), mesh=mesh),
        "`w` has the layout": lambda path, mesh: fs.restore(path, P(), mesh=mesh),
        "must be on": lambda path, mesh: fs.restore(
            path, {"norm": P(), "**": fs.fsdp("data")}, mesh=fs.make_mesh({"data": 3})
        ),
        "tree of the checkpoint": lambda path, mesh: fs.restore(path, only=["w"]),
    },
}
