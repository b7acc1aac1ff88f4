"""The axes that shard layers, in each mode of tensor parallelism, and their sizes."""

from __future__ import annotations

from typing import Literal

TensorMode = Literal["1d", "2d", "2.5d", "3d"]

MODEL_AXES: dict[str, tuple[str, ...]] = {
    "1d": ("model",),
    "2d": ("model_i", "model_j"),
    "2.5d": ("model_d", "model_i", "model_j"),
    "3d": ("model_a", "model_b", "model_c"),
}
"""The axes of the layers in each mode; in "2.5d" the first one is the depth."""


def model_axes(size: int, mode: str, depth: int) -> dict[str, int]:
    """Return the sizes of a mode's axes; raise with the nearest legal sizes if there are none.

    >>> model_axes(8, "2.5d", 2)
    {'model_d': 2, 'model_i': 2, 'model_j': 2}
    """
    has_depth = mode == "2.5d"
    if depth != 1 and not has_depth:
        raise ValueError(
            f'tensor_depth={depth} has no meaning for tensor_mode="{mode}"; "2.5d" has a depth.'
        )

    # Apart from the depth all axes of a mode have one size, the side of a square or a cube.
    names = MODEL_AXES[mode]
    sides = names[1:] if has_depth else names
    power = len(sides)
    # The root of a cube may be rounded down to just below an integer.
    side = max(int((size / depth) ** (1 / power) + 1e-9), 1)
    if depth * side**power != size:
        shapes = {
            "2d": "a square",
            "2.5d": f"tensor_depth={depth} times a square",
            "3d": "a cube",
        }
        smaller = depth * side**power
        larger = depth * (side + 1) ** power
        raise ValueError(
            f'tensor must be {shapes[mode]} for tensor_mode="{mode}", got {size}: '
            f"the nearest are {smaller} and {larger}."
        )

    sizes = dict.fromkeys(sides, side)
    return {names[0]: depth, **sizes} if has_depth else sizes
