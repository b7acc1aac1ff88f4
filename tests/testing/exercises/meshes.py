"""Answers to the exercises of meshes and layouts: right ones, and wrong ones by their hint."""

import fshard as fs
from fshard import P


def shard_shape(rows, columns, mesh):
    return rows // mesh.shape["data"], columns // mesh.shape["model"]


SOLUTIONS = {
    "meshes.shard_shape": shard_shape,
    "meshes.copies": lambda mesh: mesh.shape["data"],
    "meshes.neighbours": P(("model", "data")),
    "meshes.flat": P.flat("data", "model"),
    "meshes.matmul": lambda a, b: fs.psum(a @ b, "model"),
}

WRONG = {
    "meshes.shard_shape": {
        "swapped": lambda rows, columns, mesh: (
            rows // mesh.shape["model"],
            columns // mesh.shape["data"],
        ),
        "own axis alone": lambda rows, columns, mesh: (rows // mesh.size, columns // mesh.size),
        "columns are sharded": lambda rows, columns, mesh: (rows // mesh.shape["data"], columns),
        "divides by 4": lambda rows, columns, mesh: (rows // 4, columns // 2),
        "the program has (4, 3)": lambda rows, columns, mesh: (rows, columns),
        "KeyError": lambda rows, columns, mesh: rows // mesh.shape["rows"],
    },
    "meshes.copies": {
        "different shards": lambda mesh: mesh.shape["model"],
        "Not all": lambda mesh: mesh.size,
        "all axes": lambda mesh: 1,
    },
    "meshes.neighbours": {
        "major one": P(("data", "model")),
        "both stand": P("data"),
        "one entry": P("data", "model"),
        "must be a layout's spec": ("model", "data"),
    },
    "meshes.flat": {
        "not divisible": P(("data", "model")),
        "equal copies": P.flat("data"),
        "full tensor": P(),
    },
    "meshes.matmul": {
        "is a summand": lambda a, b: a @ b,
        "other rows. The inner dim": lambda a, b: fs.psum(a @ b, "data"),
        "both axes": lambda a, b: fs.psum(a @ b, ("data", "model")),
        "A mean divides": lambda a, b: fs.pmean(a @ b, "model"),
        "RuntimeError": lambda a, b: b @ a,
    },
}
