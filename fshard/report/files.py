"""Writers: `JsonLines`, which needs nothing, `TensorBoard`, and `Tracker` for W&B and trackio."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from fshard.errors import FshardError


class JsonLines:
    """Appends a line of JSON per step: pandas.read_json(path, lines=True) reads them.

    A line is on disk when its step has been reported; non-finite numbers are null.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     lines = JsonLines(Path(folder) / "run.jsonl")
    ...     lines.write(1, {"loss": 0.5, "grad_norm": float("inf")})
    ...     lines.close()
    ...     print((Path(folder) / "run.jsonl").read_text())
    {"step": 1, "loss": 0.5, "grad_norm": null}
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line."""
        # JSON has no inf and no nan.
        row = {name: x if isfinite(x) else None for name, x in values.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **row}) + "\n")

    def close(self) -> None:
        """Nothing is open between steps."""


class TensorBoard:
    """Writes scalars for TensorBoard into a folder; needs the package tensorboard."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._writer: Any = None
        if find_spec("tensorboard") is None:
            raise FshardError(
                "TensorBoard needs the package tensorboard: pip install 'fshard[tensorboard]'."
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write a point of each curve."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self.folder)
        for name, x in values.items():
            self._writer.add_scalar(name, x, step)

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


_TRACKERS = ("wandb", "trackio")


class Tracker:
    """Logs numbers to a run of Weights & Biases or of trackio; needs that package.

    The run begins with the first step that is written, so on one device only.

    Args:
        package: "wandb" or "trackio".
        options: of its `init`: the project, the name, the config; of wandb also mode="offline".
    """

    def __init__(self, package: Literal["wandb", "trackio"], **options: Any) -> None:
        if package not in _TRACKERS:
            raise ValueError(f'Tracker: package must be "wandb" or "trackio"; got {package!r}.')
        if find_spec(package) is None:
            raise FshardError(f"Tracker needs the package {package}: pip install {package}.")
        self.package = package
        self.options = options
        self._run: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        if self._run is None:
            self._run = import_module(self.package).init(**self.options)
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is left, and end the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None
