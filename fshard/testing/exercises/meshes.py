"""Exercises of the notebook "Meshes and layouts"."""

from __future__ import annotations

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.testing.grading import (
    Answer,
    Cases,
    Exercise,
    PerDevice,
    WrongAnswer,
    mistake,
    on_devices,
)

__all__ = ["EXERCISES"]


def mesh_of(data: int, model: int) -> fs.Mesh:
    return fs.make_mesh({"data": data, "model": model})


# -- the shape of a shard -------------------------------------------------------------------------


def shard_shape(rows: int, columns: int, mesh: fs.Mesh) -> tuple[int, ...]:
    layout = fs.Layout(mesh, P("data", "model"))
    array = fs.device_put(torch.empty(rows, columns), layout)
    return tuple(array.shards[0].shape)


@mistake("The axes are swapped: the first entry of `P` shards dim 0, the rows.")
def swapped_axes(rows: int, columns: int, mesh: fs.Mesh) -> tuple[int, int]:
    return rows // mesh.shape["model"], columns // mesh.shape["data"]


@mistake("Each dim is divided by its own axis alone, not by all devices.")
def divided_by_all_devices(rows: int, columns: int, mesh: fs.Mesh) -> tuple[int, int]:
    return rows // mesh.size, columns // mesh.size


@mistake('The columns are sharded, too: the second entry is "model".')
def full_columns(rows: int, columns: int, mesh: fs.Mesh) -> tuple[int, int]:
    return rows // mesh.shape["data"], columns


@mistake("It divides by 4 and 2, the sizes of the mesh above. Read them from `mesh.shape`.")
def sizes_of_the_notebook(rows: int, columns: int, mesh: fs.Mesh) -> tuple[int, int]:
    return rows // 4, columns // 2


SHARD_SHAPE = Exercise(
    name="meshes.shard_shape",
    question=(
        'A tensor of `rows` x `columns` has the layout `P("data", "model")` on `mesh`. What is the'
        ' shape of a shard? `mesh.shape["data"]` is the number of devices along "data".'
    ),
    form="answer(rows, columns, mesh)",
    hints=(
        "The first entry of a `P` is for dim 0, the second for dim 1.",
        "A dim is divided by the size of the axis that shards it.",
        '`rows // mesh.shape["data"]` is the first of the two.',
    ),
    why="Memory and work of a device follow from this shape, and so does what must be sent.",
    grade=Cases(
        cases=[(12, 6, mesh_of(3, 2)), (8, 8, mesh_of(1, 4))],
        truth=shard_shape,
        mistakes=(swapped_axes, divided_by_all_devices, full_columns, sizes_of_the_notebook),
    ),
)


# -- copies ---------------------------------------------------------------------------------------


def copies(mesh: fs.Mesh) -> int:
    full = torch.arange(24.0).reshape(2, 12)
    array = fs.device_put(full, fs.Layout(mesh, P(None, "model")))
    return sum(bool((shard == 0).any()) for shard in array.shards)


@mistake(
    "That is the number of different shards. Each is stored several times: along the axis that the"
    " layout does not name."
)
def different_shards(mesh: fs.Mesh) -> int:
    return mesh.shape["model"]


@mistake('Not all: devices along "model" have other columns.')
def all_devices(mesh: fs.Mesh) -> int:
    return mesh.size


@mistake("One would be if the layout named all axes. Which one is missing?")
def one_device(mesh: fs.Mesh) -> int:
    return 1


COPIES = Exercise(
    name="meshes.copies",
    question=(
        'A tensor has the layout `P(None, "model")` on `mesh`, of the axes "data" and "model". How'
        " many devices store its first element?"
    ),
    form="answer(mesh)",
    hints=(
        "Which axis does the layout not name?",
        "Devices that differ along an unnamed axis alone have equal shards.",
    ),
    why='Data parallelism is this layout: one copy of the weights for each device along "data".',
    grade=Cases(
        cases=[(mesh_of(3, 2),), (mesh_of(2, 4),), (mesh_of(5, 1),)],
        truth=copies,
        mistakes=(different_shards, all_devices, one_device),
    ),
)


# -- neighbours -----------------------------------------------------------------------------------


def order_of_devices(spec: P, mesh: fs.Mesh) -> list[int]:
    """Return the first element of each device's shard of a vector, in mesh order."""
    vector = fs.device_put(torch.arange(mesh.size), fs.Layout(mesh, spec))
    return [int(shard[0]) for shard in vector.shards]


def grade_neighbours(answer: object) -> None:
    if not isinstance(answer, P):
        raise WrongAnswer("The answer must be a layout's spec, `P(...)`.")
    if len(answer.axes) < 2:
        raise WrongAnswer("Both axes shard the vector, so both stand in the `P`.")

    mesh = mesh_of(2, 3)
    try:
        order = order_of_devices(answer, mesh)
    except fs.errors.LayoutError:
        raise WrongAnswer(
            "A vector has one dim, so `P` has one entry: a tuple of two axes."
        ) from None
    if order != order_of_devices(P(("model", "data")), mesh):
        raise WrongAnswer(
            'The first axis of the tuple is the major one: with `("data", "model")` neighbours'
            ' along "model" have neighbouring shards. Here they are those along "data".'
        )


NEIGHBOURS = Exercise(
    name="meshes.neighbours",
    question=(
        'A vector is sharded over both axes of a mesh of "data" and "model". Write the `P` for'
        ' which devices that are next to each other along "data" have neighbouring shards.'
    ),
    form="answer = P(...)",
    hints=(
        "One dim may be sharded over a tuple of axes.",
        "The first axis of the tuple is the major one: it changes last, as hours and minutes do.",
        'Neighbours are those along the minor axis, the last one; here that is "data".',
    ),
    why="Which devices are neighbours decides what a reshard sends, and over which links.",
    grade=grade_neighbours,
)


# -- no device stores more than its share ---------------------------------------------------------


def grade_flat(answer: object) -> None:
    if not isinstance(answer, P):
        raise WrongAnswer("The answer must be a layout's spec, `P(...)` or `P.flat(...)`.")
    for mesh in (mesh_of(2, 3), mesh_of(4, 2)):
        try:
            array = fs.device_put(torch.ones(7, 5), fs.Layout(mesh, answer))
        except fs.errors.LayoutError:
            raise WrongAnswer(
                "7 x 5 is not divisible by the mesh. One kind of layout has no shapes to divide:"
                " it cuts the flattened tensor."
            ) from None

        largest = max(shard.numel() for shard in array.shards)
        share = -(-35 // mesh.size)  # rounded up
        if largest == 35:
            raise WrongAnswer("A device stores the full tensor: no axis shards it.")
        if largest > share:
            raise WrongAnswer(
                f"On {mesh.size} devices one stores {largest} of 35 elements: the devices along one"
                " axis have equal copies. Name both axes."
            )


FLAT = Exercise(
    name="meshes.flat",
    question=(
        'Write a `P` for a tensor of shape (7, 5) that works on any mesh of "data" and "model",'
        " such that no device stores more than its share, ceil(35 / mesh.size)."
    ),
    form="answer = P(...)",
    hints=(
        "Neither 7 nor 5 need be divisible. Which layout does not look at shapes?",
        '`P.flat("data")` cuts the flattened tensor over "data". And "model"?',
    ),
    why="Optimizer states are stored so: Adam does not care which element it updates.",
    grade=grade_flat,
)


# -- a product of sharded matrices ----------------------------------------------------------------


def factors(data: int, model: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(data)
    width = 2 * model
    a = torch.randn(2 * data, width, generator=draw)
    b = torch.randn(width, 3, generator=draw)
    return a, b


def run_matmul(answer: Answer, data: int, model: int) -> PerDevice:
    a, b = factors(data, model)
    mesh = mesh_of(data, model)
    a_shards = fs.device_put(a, fs.Layout(mesh, P("data", "model")))
    b_shards = fs.device_put(b, fs.Layout(mesh, P("model")))
    return on_devices(answer, mesh, a_shards, b_shards)


def rows_of_product(data: int, model: int) -> list[Tensor]:
    a, b = factors(data, model)
    rows = (a @ b).chunk(data)
    return [rows[device // model] for device in range(data * model)]


@mistake(
    "That is a summand: the inner dim is sharded, so the summands along one axis must be added."
)
def summand(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


@mistake(
    'The sum is along "data", whose devices have other rows. The inner dim is sharded over "model".'
)
def sum_over_data(a: Tensor, b: Tensor) -> Tensor:
    return fs.psum(a @ b, "data")


@mistake('The sum is along both axes, so rows of other devices are mixed in. "model" alone.')
def sum_over_both(a: Tensor, b: Tensor) -> Tensor:
    return fs.psum(a @ b, ("data", "model"))


@mistake("A mean divides by the number of devices. The product is the sum of summands.")
def mean_over_model(a: Tensor, b: Tensor) -> Tensor:
    return fs.pmean(a @ b, "model")


MATMUL = Exercise(
    name="meshes.matmul",
    question=(
        '`a` has the layout `P("data", "model")`, `b` has `P("model")`. Write what each device does'
        " with its shards, so that it ends with its rows of `a @ b`."
    ),
    form="answer(a, b)",
    hints=(
        'The inner dim is sharded over "model", so `a @ b` of shards is a summand.',
        "Which collective adds summands?",
        '`fs.psum(..., "model")`: the devices along "data" have other rows.',
    ),
    why="This is the second half of each pair of layers in Megatron's tensor parallelism.",
    grade=Cases(
        cases=[(2, 3), (3, 2)],
        truth=rows_of_product,
        mistakes=(summand, sum_over_data, sum_over_both, mean_over_model),
        run=run_matmul,
    ),
)

EXERCISES = (SHARD_SHAPE, COPIES, NEIGHBOURS, FLAT, MATMUL)
