"""Exercises of the notebook "Meshes and layouts"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.testing.grading import Exercise, WrongAnswer, grade_cases, on_devices


def _mesh(data: int, model: int) -> fs.Mesh:
    return fs.make_mesh({"data": data, "model": model})


def _shard_shape(rows: int, columns: int, mesh: fs.Mesh) -> tuple[int, ...]:
    layout = fs.Layout(mesh, P("data", "model"))
    return tuple(fs.device_put(torch.empty(rows, columns), layout).shards[0].shape)


SHARD_SHAPE = Exercise(
    "meshes.shard_shape",
    'A tensor of `rows` x `columns` has the layout `P("data", "model")` on `mesh`. What is the'
    ' shape of a shard? `mesh.shape["data"]` is the number of devices along "data".',
    "answer(rows, columns, mesh)",
    (
        "The first entry of a `P` is for dim 0, the second for dim 1.",
        "A dim is divided by the size of the axis that shards it.",
        '`rows // mesh.shape["data"]` is the first of the two.',
    ),
    "Memory and work of a device follow from this shape, and so does what must be sent.",
    lambda answer: grade_cases(
        answer,
        "answer(rows, columns, mesh)",
        [(12, 6, _mesh(3, 2)), (8, 8, _mesh(1, 4))],
        _shard_shape,
        {
            "The axes are swapped: the first entry of `P` shards dim 0, the rows.": (
                lambda rows, columns, mesh: (
                    rows // mesh.shape["model"],
                    columns // mesh.shape["data"],
                )
            ),
            "Each dim is divided by its own axis alone, not by all devices.": (
                lambda rows, columns, mesh: (rows // mesh.size, columns // mesh.size)
            ),
            'The columns are sharded, too: the second entry is "model".': (
                lambda rows, columns, mesh: (rows // mesh.shape["data"], columns)
            ),
            "It divides by 4 and 2, the sizes of the mesh above. Read them from `mesh.shape`.": (
                lambda rows, columns, mesh: (rows // 4, columns // 2)
            ),
        },
    ),
)


def _copies(mesh: fs.Mesh) -> int:
    full = torch.arange(24.0).reshape(2, 12)
    array = fs.device_put(full, fs.Layout(mesh, P(None, "model")))
    return sum(bool((shard == 0).any()) for shard in array.shards)


COPIES = Exercise(
    "meshes.copies",
    'A tensor has the layout `P(None, "model")` on `mesh`, of the axes "data" and "model". How many'
    " devices store its first element?",
    "answer(mesh)",
    (
        "Which axis does the layout not name?",
        "Devices that differ along an unnamed axis alone have equal shards.",
    ),
    'Data parallelism is this layout: one copy of the weights for each device along "data".',
    lambda answer: grade_cases(
        answer,
        "answer(mesh)",
        [(_mesh(3, 2),), (_mesh(2, 4),), (_mesh(5, 1),)],
        _copies,
        {
            "That is the number of different shards. Each is stored several times: along the axis"
            " that the layout does not name.": lambda mesh: mesh.shape["model"],
            'Not all: devices along "model" have other columns.': lambda mesh: mesh.size,
            "One would be if the layout named all axes. Which one is missing?": lambda mesh: 1,
        },
    ),
)


def _order(spec: P, data: int, model: int) -> list[int]:
    """Return the first element of each device's shard: the order of devices along the vector."""
    mesh = _mesh(data, model)
    vector = fs.device_put(torch.arange(mesh.size), fs.Layout(mesh, spec))
    return [int(shard[0]) for shard in vector.shards]


def _grade_neighbours(answer: Any) -> None:
    if not isinstance(answer, P):
        raise WrongAnswer("The answer must be a layout's spec, `P(...)`.")
    if len(answer.axes) < 2:
        raise WrongAnswer("Both axes shard the vector, so both stand in the `P`.")
    try:
        order = _order(answer, 2, 3)
    except fs.errors.LayoutError:
        raise WrongAnswer(
            "A vector has one dim, so `P` has one entry: a tuple of two axes."
        ) from None
    if order != _order(P(("model", "data")), 2, 3):
        raise WrongAnswer(
            'The first axis of the tuple is the major one: with `("data", "model")` neighbours'
            " along"
            ' "model" have neighbouring shards. Here they are those along "data".'
        )


NEIGHBOURS = Exercise(
    "meshes.neighbours",
    'A vector is sharded over both axes of a mesh of "data" and "model". Write the `P` for which'
    ' devices that are next to each other along "data" have neighbouring shards.',
    "answer = P(...)",
    (
        "One dim may be sharded over a tuple of axes.",
        "The first axis of the tuple is the major one: it changes last, as hours and minutes do.",
        'Neighbours are those along the minor axis, the last one; here that is "data".',
    ),
    "Which devices are neighbours decides what a reshard sends, and over which links.",
    _grade_neighbours,
)


def _grade_flat(answer: Any) -> None:
    if not isinstance(answer, P):
        raise WrongAnswer("The answer must be a layout's spec, `P(...)` or `P.flat(...)`.")
    for data, model in ((2, 3), (4, 2)):
        mesh = _mesh(data, model)
        try:
            array = fs.device_put(torch.ones(7, 5), fs.Layout(mesh, answer))
        except fs.errors.LayoutError:
            raise WrongAnswer(
                "7 x 5 is not divisible by the mesh. One kind of layout has no shapes to divide:"
                " it cuts the flattened tensor."
            ) from None
        largest = max(shard.numel() for shard in array.shards)
        if largest == 35:
            raise WrongAnswer("A device stores the full tensor: no axis shards it.")
        if largest > -(-35 // mesh.size):
            raise WrongAnswer(
                f"On {mesh.size} devices one stores {largest} of 35 elements: the devices along one"
                " axis have equal copies. Name both axes."
            )


FLAT = Exercise(
    "meshes.flat",
    'Write a `P` for a tensor of shape (7, 5) that works on any mesh of "data" and "model", such'
    " that no device stores more than its share, ceil(35 / mesh.size).",
    "answer = P(...)",
    (
        "Neither 7 nor 5 need be divisible. Which layout does not look at shapes?",
        '`P.flat("data")` cuts the flattened tensor over "data". And "model"?',
    ),
    "Optimizer states are stored so: Adam does not care which element it updates.",
    _grade_flat,
)


def _factors(data: int, model: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(data)
    width = 2 * model
    a = torch.randn(2 * data, width, generator=draw)
    return a, torch.randn(width, 3, generator=draw)


def _run_matmul(function: Any, data: int, model: int) -> list[Any]:
    a, b = _factors(data, model)
    mesh = _mesh(data, model)
    shards = fs.device_put(a, fs.Layout(mesh, P("data", "model")))
    return on_devices(function, mesh, shards, fs.device_put(b, fs.Layout(mesh, P("model"))))


def _products(data: int, model: int) -> list[Tensor]:
    """Return the rows of the product that each device should have."""
    a, b = _factors(data, model)
    rows = (a @ b).chunk(data)
    return [rows[i // model] for i in range(data * model)]


def _summands(data: int, model: int) -> list[Tensor]:
    """Return the summand that each device computes of its shards."""
    a, b = _factors(data, model)
    shards = []
    for rows in a.chunk(data):
        for left, right in zip(rows.chunk(model, 1), b.chunk(model), strict=True):
            shards.append(left @ right)
    return shards


def _summed_over_data(data: int, model: int) -> list[Tensor]:
    grid = torch.stack(_summands(data, model)).unflatten(0, (data, model))
    return [*grid.sum(0, keepdim=True).expand_as(grid).flatten(0, 1)]


def _summed_over_all(data: int, model: int) -> list[Tensor]:
    total = torch.stack(_summands(data, model)).sum(0)
    return [total] * (data * model)


MATMUL = Exercise(
    "meshes.matmul",
    '`a` has the layout `P("data", "model")`, `b` has `P("model")`. Write what each device does'
    " with its shards, so that it ends with its rows of `a @ b`.",
    "answer(a, b)",
    (
        'The inner dim is sharded over "model", so `a @ b` of shards is a summand.',
        "Which collective adds summands?",
        '`fs.psum(..., "model")`: the devices along "data" have other rows.',
    ),
    "This is the second half of each pair of layers in Megatron's tensor parallelism.",
    lambda answer: grade_cases(
        answer,
        "answer(a, b)",
        [(2, 3), (3, 2)],
        _products,
        {
            "That is a summand: the inner dim is sharded, so the summands along one axis must be"
            " added.": _summands,
            'The sum is along "data", whose devices have other rows. The inner dim is sharded over'
            ' "model".': _summed_over_data,
            'The sum is along both axes, so rows of other devices are mixed in. "model" alone.': (
                _summed_over_all
            ),
            "A mean divides by the number of devices. The product is the sum of summands.": (
                lambda data, model: [x / model for x in _products(data, model)]
            ),
        },
        run=_run_matmul,
        names="data, model",
    ),
)

EXERCISES = (SHARD_SHAPE, COPIES, NEIGHBOURS, FLAT, MATMUL)
