"""`Parallelism`: how devices share a training step, as one value; and a model's parts by it.

value.py     the value: sizes of axes and options of a step; its checks, its mesh, its schedule
modes.py     the axes that shard layers, in each mode of tensor parallelism
tables.py    the value as a table: TOML or JSON, Colossal-AI's configuration
build.py     (model, parallelism) -> functions, parameters, buffers and options of a step
"""

from fshard.parallelism.value import Parallelism

__all__ = ["Parallelism"]
