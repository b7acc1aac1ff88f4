"""Save and load what a loop has: the methods of `Booster`."""

from __future__ import annotations

import os
from typing import Any

from fshard.booster.model import BoostedModel
from fshard.booster.optimizer import BoostedOptimizer
from fshard.checkpoint.folder import Checkpoints
from fshard.checkpoint.foreign.export import export
from fshard.checkpoint.names import is_object
from fshard.checkpoint.random import RandomState
from fshard.checkpoint.restore import restore
from fshard.checkpoint.save import save
from fshard.transforms.options import unknown

Folder = str | os.PathLike[str]

_COUNTERS = ("_seed", "_steps", "_forwards", "_others")
"""The attributes of a boosted model that decide its next random draws."""


class Checkpointing:
    """The methods of `Booster` that save and load, also under the names of Colossal-AI's."""

    def save(
        self,
        folder: Folder | Checkpoints,
        model: BoostedModel,
        optimizer: BoostedOptimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        **options: Any,
    ) -> None:
        """Save what a loop has, as `boost` has returned it, and the random generators.

        A loop that loads it, on any number of devices and with any plugin, continues as this one
        does: in mid-epoch too.

        Args:
            folder: a path, for `fs.save`; or an `fs.Checkpoints`, or the run of `fs.elastic`,
                which get the number of the model's steps.
            options: of these: metrics, timeout; metrics, wait.
        """
        tree = _tree(model, optimizer, lr_scheduler, dataloader)
        if isinstance(folder, str | os.PathLike):
            save(folder, tree, **options)
        else:
            folder.save(tree["counters"]["_steps"], tree, **options)

    def load(
        self,
        folder: Folder | Checkpoints,
        model: BoostedModel,
        optimizer: BoostedOptimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
    ) -> None:
        """Load what `save` has saved, the last of an `fs.Checkpoints` or a run of `fs.elastic`.

        Nothing is read of what is not given.
        """
        tree = _tree(model, optimizer, lr_scheduler, dataloader)
        only = [*tree]
        if isinstance(folder, str | os.PathLike):
            tree = restore(folder, tree, only=only)
        else:
            tree = folder.restore(tree, only=only)
        vars(model).update(tree["counters"])

    def load_model(
        self, model: BoostedModel, checkpoint: Folder, strict: bool = True, *, trust: bool = False
    ) -> None:
        """Load parameters and buffers, those of all replicas, from any source of `fs.restore`.

        If `strict`, the source must have all names.
        """
        target: Any = model if model.replicas is None else model.state_dict()
        restore(checkpoint, target, strict=strict, trust=trust)
        if target is not model:
            model.load_state_dict(target)

    def save_model(self, x: Any, /, checkpoint: Folder, **options: Any) -> None:
        """Save the state of a model, an optimizer (with its groups) or a scheduler.

        Of replicas the mean is saved. There are no options: those of Colossal-AI's raise.
        """
        errors = unknown("save_model, save_optimizer", options, ["checkpoint"])
        if errors:
            raise TypeError(f"{errors[0]}.")
        has_replicas = isinstance(x, BoostedModel) and x.replicas is not None
        save(checkpoint, x.state_dict() if has_replicas else x)

    save_optimizer = save_lr_scheduler = save_model

    def load_optimizer(self, x: Any, /, checkpoint: Folder) -> None:
        """Load the state of an optimizer (with its groups) or a scheduler."""
        restore(checkpoint, x)

    load_lr_scheduler = load_optimizer

    def save_lora_as_pretrained(self, model: BoostedModel, checkpoint: Folder) -> None:
        """Write the weights that `enable_lora` has added as an adapter of peft: see `fs.export`."""
        export(checkpoint, model, to="peft", model=model.module)


def _tree(model: Any, optimizer: Any, lr_scheduler: Any, dataloader: Any) -> dict[str, Any]:
    """Return the tree of all that is given."""
    others = {"optimizer": optimizer, "lr_scheduler": lr_scheduler, "dataloader": dataloader}
    given_others = {name: x for name, x in others.items() if x is not None}
    objects = {"model": model, **given_others}
    expected_types = {"model": BoostedModel, "optimizer": BoostedOptimizer}
    errors = list[str]()
    for name, x in objects.items():
        expected_type = expected_types.get(name, object)
        is_boosted = isinstance(x, expected_type) and is_object(x)
        if not is_boosted:
            errors.append(f"{name} must be as boost has returned it; got a {type(x).__name__}")
    if errors:
        raise TypeError(f"{'; '.join(errors)}.")
    counters = {name: vars(model)[name] for name in _COUNTERS}
    return {**objects, "counters": counters, "random": RandomState()}
