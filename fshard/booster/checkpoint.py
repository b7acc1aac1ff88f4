"""Save and load what a loop has: the methods of `Booster`."""

from __future__ import annotations

import os
from typing import Any, Protocol

from fshard.booster.model import BoostedModel
from fshard.booster.optimizer import BoostedOptimizer
from fshard.checkpoint.names import is_object
from fshard.checkpoint.random import RandomState
from fshard.checkpoint.restore import restore
from fshard.checkpoint.save import save
from fshard.mesh.layout import PyTree

Folder = str | os.PathLike[str]


class StepFolder(Protocol):
    """A folder of checkpoints by step, as `fs.Checkpoints` is one."""

    def save(self, step: int, tree: PyTree, /, **options: Any) -> None: ...
    def restore(self, target: PyTree, /, **options: Any) -> PyTree: ...


class Counters:
    """The counts and the seed that decide the next random draws of a boosted model."""

    def __init__(self, model: BoostedModel) -> None:
        self._own = vars(model)

    def state_dict(self) -> dict[str, int]:
        return {name: self._own[f"_{name}"] for name in ("seed", "steps", "forwards", "others")}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._own.update({f"_{name}": x for name, x in state.items()})


class Checkpointing:
    """The methods of `Booster` that save and load, also under the names of Colossal-AI's."""

    def save(
        self,
        folder: Folder | StepFolder,
        model: BoostedModel,
        optimizer: BoostedOptimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        **options: Any,
    ) -> None:
        """Save what a loop has, as `boost` has returned it, and the random generators.

        A loop that loads it, on any number of devices and with any plugin, continues as this one does: in mid-epoch too.

        Args:
            folder: a path, for `fs.save`; or an `fs.Checkpoints`, which gets the number of the model's steps.
            options: of these: metrics, timeout; metrics, wait.
        """
        tree = _tree(model, optimizer, lr_scheduler, dataloader)
        if isinstance(folder, str | os.PathLike):
            save(folder, tree, **options)
        else:
            folder.save(tree["counters"].state_dict()["steps"], tree, **options)

    def load(
        self,
        folder: Folder | StepFolder,
        model: BoostedModel,
        optimizer: BoostedOptimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
    ) -> None:
        """Load what `save` has saved, the last of an `fs.Checkpoints`; of what is not given nothing is read."""
        tree = _tree(model, optimizer, lr_scheduler, dataloader)
        only = [f"{name}.**" for name in tree]
        if isinstance(folder, str | os.PathLike):
            restore(folder, tree, only=only)
        else:
            folder.restore(tree, only=only)

    def save_model(self, model: BoostedModel, checkpoint: Folder) -> None:
        """Save parameters and buffers."""
        save(checkpoint, model)

    def load_model(self, model: BoostedModel, checkpoint: Folder, strict: bool = True) -> None:
        """Load parameters and buffers from any source of `fs.restore`; those that have all names if `strict`."""
        restore(checkpoint, model, strict=strict)

    def save_optimizer(self, optimizer: BoostedOptimizer, checkpoint: Folder) -> None:
        """Save an optimizer's state and groups."""
        save(checkpoint, optimizer)

    def load_optimizer(self, optimizer: BoostedOptimizer, checkpoint: Folder) -> None:
        """Load an optimizer's state and groups."""
        restore(checkpoint, optimizer)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: Folder) -> None:
        """Save a scheduler's state."""
        save(checkpoint, lr_scheduler)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: Folder) -> None:
        """Load a scheduler's state."""
        restore(checkpoint, lr_scheduler)


def _tree(
    model: BoostedModel, optimizer: BoostedOptimizer | None, lr_scheduler: Any, dataloader: Any
) -> dict[str, Any]:
    """Return the tree of all that is given."""
    given = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "dataloader": dataloader}
    kinds = {"model": BoostedModel, "optimizer": BoostedOptimizer | None}
    wrong = [
        f"{name} must be as boost has returned it" for name, kind in kinds.items() if not isinstance(given[name], kind)
    ]
    wrong += [
        f"{name} must have a state_dict; got a {type(x).__name__}"
        for name, x in given.items()
        if x is not None and not is_object(x)
    ]
    if wrong:
        raise TypeError(f"{'; '.join(wrong)}.")
    own = {"counters": Counters(model), "random": RandomState()}
    return {name: x for name, x in given.items() if x is not None} | own
