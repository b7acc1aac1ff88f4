"""`ModelPlan`: sizes of a mesh and options of training, by which a model with repeated layers is trained."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

from fshard.booster.hybrid import HybridParallelPlugin
from fshard.errors import PlanError
from fshard.pipeline.schedule.builders import BUILDERS, pipeline_schedule
from fshard.pipeline.schedule.schedule import Schedule
from fshard.tensor.layer_plans import SequenceMode
from fshard.tensor.sequence import Algorithm

RECOMPUTE = ("never", "selective", "full", "except a, b")
"""A layer keeps for its backward: everything; the results of matrix products; its input; its input and named values."""
IN_LOOPS = ("interleaved", "bfs")
"""The schedules with any number of stages on a device."""
ONE_STAGE = ("gpipe", "1f1b", "zb-h1", "zb-h2")
"""The schedules with one stage on a device; those that remain have two."""


@dataclass(frozen=True)
class ModelPlan:
    """Sizes of a mesh, and options of training.

    Args:
        data, pipeline, tensor: sizes of the axes of samples, stages and layers.
        zero_stage: of ZeRO, along "data".
        rows: samples of a microbatch on a device.
        microbatches: of a device in a step.
        schedule: of the stages.
        chunks: stages of a device.
        recompute: what each layer computes again in the backward: nothing ("never"), all but matrix products ("selective"),
            all ("full"), or all but values that `fs.nn.checkpoint_name` names ("except attention, mlp").
        sequence: size of the axis of tokens.
        sequence_mode: the algorithm of attention on it; or "megatron": devices that share layers share tokens between them.
        experts: size of the axis of experts, whose devices have other samples.
        replicas: size of an axis of samples along which ZeRO does not shard (HSDP); 1 with stages.
        state_memory: "host" if the optimizer's state is there, and the update streams it to the device; not with stages.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    rows: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = "never"
    sequence: int = 1
    sequence_mode: SequenceMode = "gather"
    experts: int = 1
    replicas: int = 1
    state_memory: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        legal = {"zero_stage": (0, 1, 2, 3), "recompute": RECOMPUTE, "schedule": (*BUILDERS,)}
        legal |= {
            "sequence_mode": (*get_args(Algorithm), "megatron"),
            "state_memory": ("device", "host"),
        }
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        errors = [
            f"{name} must be one of {', '.join(map(str, legal[name]))}; got {x!r}"
            for name, x in values.items()
            if name in legal
            and x not in legal[name]
            and not (name == "recompute" and kept_names(x))
        ]
        errors += [
            f"{name} must be an integer >= 1; got {x!r}"
            for name, x in values.items()
            if name not in legal and (type(x) is not int or x < 1)
        ]
        if errors:
            raise PlanError(f"plan: {'; '.join(errors)}.")

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh, for `make_mesh`."""
        sizes = {
            "replica": self.replicas,
            "data": self.data,
            "expert": self.experts,
            "seq": self.sequence,
        }
        some = {axis: size for axis, size in sizes.items() if size > 1 or axis == "data"}
        return {"pipe": self.pipeline, **some, "model": self.tensor}

    @property
    def rows_of_step(self) -> int:
        """The samples of a step on all devices."""
        return self.replicas * self.data * self.experts * self.rows * self.microbatches

    @property
    def devices(self) -> int:
        """The number of devices."""
        return prod(self.mesh.values())

    def of_stages(self) -> Schedule:
        """Return the schedule of the stages."""
        return _schedule(
            self.schedule, self.chunks * self.pipeline, self.microbatches, self.pipeline
        )

    def plugin(self, *, blocks: str, sample: Any = None) -> HybridParallelPlugin:
        """Return the plugin of a Booster.

        Args:
            blocks: path of the layers in the model.
            sample: a microbatch, by which stages and layers are planned: see `HybridParallelPlugin`.
        """
        errors = list[str]()
        if self.recompute not in ("never", "full") or (
            self.recompute == "full" and self.pipeline == 1
        ):
            errors.append(
                f'recompute must be "never", or "full" in stages; got "{self.recompute}": wrap the layers in fs.remat'
            )
        if self.microbatches > 1 and self.pipeline == 1:
            errors.append(
                f"microbatches must be 1 without stages; got {self.microbatches}: accumulate in the loop"
            )
        if self.replicas > 1:
            errors.append(f"replicas must be 1; got {self.replicas}")
        if self.state_memory != "device":
            errors.append(
                'state_memory must be "device": the plugin\'s offload= updates on the host'
            )
        if errors:
            raise PlanError(
                f"plan.plugin: {'; '.join(errors)}, and take fs.Booster(replace(plan, ...).plugin(...))."
            )
        stages: dict[str, Any] = {
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "chunks": self.chunks,
        }
        stages |= {"blocks": blocks, "recompute": 1 if self.recompute == "full" else "never"}
        return HybridParallelPlugin(
            data=self.data,
            pipeline=self.pipeline,
            tensor=self.tensor,
            sequence=self.sequence,
            sequence_mode=self.sequence_mode,
            experts=self.experts,
            zero_stage=self.zero_stage,
            sample=sample,
            **(stages if self.pipeline > 1 else {}),
        )

    def scaled(self, devices: int) -> ModelPlan:
        """Return the same plan on fewer devices: the largest axes are halved, the batch with them."""
        plan = self
        while plan.devices > devices:
            axis = max(
                ("data", "pipeline", "tensor", "sequence", "experts", "replicas"),
                key=lambda name: getattr(plan, name),
            )
            if getattr(plan, axis) % 2:
                raise PlanError(
                    f"plan.scaled: {axis} must be a multiple of two; got {getattr(plan, axis)}."
                )
            plan = replace(plan, **{axis: getattr(plan, axis) // 2})
        return plan

    def save(self, path: str | Path) -> None:
        """Write a TOML file, which `load` reads."""
        lines = [f"{name} = {x!r}".replace("'", '"') for name, x in asdict(self).items()]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ModelPlan:
        """Read a TOML file; raise naming all keys that are unknown or of another type. A table `run` is not read.

        >>> import tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "plan.toml")
        >>> ModelPlan(data=4, recompute="full").save(path)
        >>> ModelPlan.load(path)
        ModelPlan(data=4, pipeline=1, tensor=1, zero_stage=0, rows=1, microbatches=1, schedule='1f1b', chunks=1, ...
        """
        table = table_of(path)
        table.pop("run", None)
        keys = [field.name for field in fields(cls)]
        if unknown := [key for key in table if key not in keys]:
            raise PlanError(
                f"plan.load: {path} must have keys of {', '.join(keys)}; got {', '.join(unknown)}."
            )
        return cls(**table)


def kept_names(recompute: object) -> tuple[str, ...]:
    """Return the names of values that layers keep for their backward.

    >>> kept_names("except attention, mlp"), kept_names("full")
    (('attention', 'mlp'), ())
    """
    before, exception, names = str(recompute).partition("except ")
    return (
        tuple(name.strip() for name in names.split(",") if name.strip())
        if exception and not before
        else ()
    )


def table_of(path: str | Path) -> dict[str, Any]:
    """Return what a TOML file has; raise if it is none."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"plan.load: {path} must be a TOML file: {error}.") from None


@cache
def _schedule(name: str, stages: int, microbatches: int, devices: int) -> Schedule:
    """Return the schedule, which many plans have."""
    return pipeline_schedule(
        name,
        stages=stages,
        microbatches=microbatches,
        devices=devices if name in IN_LOOPS else None,
    )
