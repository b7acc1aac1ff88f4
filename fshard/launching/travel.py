"""Pickling of a function, its arguments and its results for another process.

By reference: pickle writes the name of a function or class, and the other process imports its
module. By value: functions outside of importable modules (in a notebook, the running script, a
lambda, a nested function) are written by cloudpickle, with all that they refer to. A script's own
functions are pickled by value although they could be imported, because that would run the script
again in every process.
"""

from __future__ import annotations

import io
import pickle
from importlib import import_module
from types import FunctionType
from typing import Any


def by_value(value: Any) -> bytes:
    """Pickle a value, with the objects that another process cannot import by value."""
    buffer = io.BytesIO()
    try:
        _Importable(buffer).dump(value)
        return buffer.getvalue()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        try:
            cloudpickle: Any = import_module("cloudpickle")
        except ImportError as missing:
            raise ImportError(
                f"This cannot be sent to other processes by name: {error}. Install cloudpickle "
                "(pip install cloudpickle, or pip install 'fshard[notebooks]') to send it as it "
                "is, or write it into a module of its own and import that."
            ) from missing
        return cloudpickle.dumps(value)


class _Importable(pickle.Pickler):
    """Raises for objects of the running script or notebook."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type) and obj.__module__ == "__main__":
            raise pickle.PicklingError(
                f"{obj.__qualname__} is defined in the running script or notebook"
            )
        return NotImplemented
