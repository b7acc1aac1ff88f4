"""`Parallelism`: how devices share a training step, as one frozen value that checks itself.

axis      "pipe"    "replica"         "data"          "expert"          "seq"     "model", innermost
shards    stages    batch, no ZeRO    batch, ZeRO     batch, experts    tokens    layers

The axes of layers have other names in other modes: see `MODEL_AXES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod
from os import PathLike
from typing import Any, Literal, get_args

from fshard.errors import PlanError
from fshard.mesh.layout import Mesh
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.layout.mesh import Runtime
from fshard.mesh.runtimes.launchers import process_count
from fshard.mesh.spmd.scope import here
from fshard.optim.partition import Stage
from fshard.parallelism.modes import MODEL_AXES, TensorMode, model_axes
from fshard.parallelism.tables import fields_of, write_table
from fshard.pipeline.schedule.builders import BUILDERS, pipeline_schedule
from fshard.pipeline.schedule.schedule import Schedule
from fshard.tensor.layer_plans import SequenceMode
from fshard.tensor.sequence import Algorithm
from fshard.transforms.options import (
    KnownKeywords,
    integer,
    must_be,
    one_of,
    refusal,
    unknown,
)

Recomputed = str | int
"""The layers whose activations are recomputed: see `Parallelism`."""

RECOMPUTED_IN_LAYERS = ("never", "selective", "full")
"""A layer keeps for its backward: everything; the results of matrix products; its input."""

RECOMPUTED_IN_STAGES = ("never", "always", "except_last")
"""The names of `stage_functions`, which recomputes stages, or groups of their layers."""

IN_LOOPS = ("interleaved", "bfs")
"""The schedules with any number of stages on a device."""

ONE_STAGE = ("gpipe", "1f1b", "zb-h1", "zb-h2")
"""The schedules with one stage on a device; those that remain have two."""

SIZES = ("data", "replicas", "experts", "pipeline", "sequence", "tensor")
"""The numbers of devices along each axis, whose product is the number of devices."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Parallelism(KnownKeywords):
    """How devices share a training step: the sizes of the mesh, ZeRO, stages and microbatches.

    A number of devices is called like what they share: `sequence=2` are two devices that share
    the tokens of their samples, along the axis "seq".

    Args:
        data: number of devices that have other samples; None: all that are left.
        pipeline: number of devices of the pipeline.
        tensor: number of devices that share each layer.
        tensor_mode: how they share it: "1d" (Megatron), "2d" (a square of devices), "2.5d"
            (`tensor_depth` squares), "3d" (a cube).
        tensor_depth: number of squares in "2.5d".
        sequence: number of devices that share the tokens, dim 1 of all inputs.
        sequence_mode: the algorithm of their attention: see `fs.tensor.attention`; or "megatron":
            the devices that share layers share the tokens of norms and dropout too, sequence=1.
        experts: number of devices that share the experts of each layer; they have other samples.
        replicas: number of groups of devices along which ZeRO does not shard (HSDP); 1 in stages.
        zero_stage: 0 to 3 of ZeRO, along the devices that have other samples.
        rows: number of samples of a microbatch on a device, for estimates: a step takes any.
        microbatches: number of microbatches of each device's part of a batch; None: as many as
            stages, or 1 without stages. The number need not divide the batch.
        schedule: a name of `pipeline_schedule`.
        chunks: number of stages per device; None: one, or two where the schedule needs them.
        recompute: the activations that are computed again in the backward. Of each layer: "never",
            all but matrix products ("selective"), all ("full"), or all but values that
            `fs.nn.checkpoint_name` names ("except attention, mlp"). Of stages: "always",
            "except_last" or a number of layers, see `stage_functions`.
        state_memory: "host" if the optimizer's state is there, and the update streams it to the
            device; not in stages.

    >>> parallelism = Parallelism(pipeline=2, tensor=4, zero_stage=1)
    >>> parallelism
    Parallelism(pipeline=2, tensor=4, zero_stage=1, microbatches=2)
    >>> parallelism.mesh(16)
    Mesh(pipe=2, data=2, model=4; 16 devices, virtual, cpu)
    >>> parallelism.misfit(devices=12)
    'data * pipeline * experts * sequence * tensor must be the number of devices, 12; got 1 * 2 * ...'
    """

    data: int | None = None
    pipeline: int = 1
    tensor: int = 1
    tensor_mode: TensorMode = "1d"
    tensor_depth: int = 1
    sequence: int = 1
    sequence_mode: SequenceMode = "gather"
    experts: int = 1
    replicas: int = 1
    zero_stage: Stage = 0
    rows: int = 1
    microbatches: int | None = None
    schedule: str = "1f1b"
    chunks: int | None = None
    recompute: Recomputed = "never"
    state_memory: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        errors = _invalid_fields(self)
        if not errors:
            self._set_defaults()
            errors = _contradictions(self)
        if errors:
            raise PlanError(f"Parallelism: {'; '.join(errors)}.")

    def _set_defaults(self) -> None:
        """Write the numbers that follow from the others, so that they are seen in the repr."""
        if self.chunks is None:
            needs_two = self.in_stages and self.schedule not in ONE_STAGE
            object.__setattr__(self, "chunks", 2 if needs_two else 1)
        if self.microbatches is None:
            # With fewer microbatches than stages some device idles in every phase of a schedule.
            object.__setattr__(self, "microbatches", self.stages if self.in_stages else 1)

    def __repr__(self) -> str:
        default = _default()
        texts = list[str]()
        for field in fields(self):
            value = vars(self)[field.name]
            if value != vars(default)[field.name]:
                texts.append(f"{field.name}={value!r}")
        return f"Parallelism({', '.join(texts)})"

    # -- stages -----------------------------------------------------------------------------------

    @property
    def in_stages(self) -> bool:
        """True if the model is split into stages."""
        return self.pipeline > 1

    @property
    def stages(self) -> int:
        """The number of stages of the model."""
        assert self.chunks is not None
        return self.pipeline * self.chunks

    def pipeline_schedule(self) -> Schedule:
        """Return the schedule of the stages."""
        assert self.microbatches is not None
        devices = self.pipeline if self.schedule in IN_LOOPS else None
        return _schedule(self.schedule, self.stages, self.microbatches, devices)

    # -- the mesh ---------------------------------------------------------------------------------

    @property
    def inner_axes(self) -> dict[str, int]:
        """The axes of tokens and layers, along which devices share samples."""
        if self.tensor == self.sequence == 1:
            return {}
        token_axis = {"seq": self.sequence} if self.sequence > 1 else {}
        return {**token_axis, **model_axes(self.tensor, self.tensor_mode, self.tensor_depth)}

    @property
    def expert_axes(self) -> dict[str, int]:
        """The axis of experts, if there is one."""
        return {"expert": self.experts} if self.experts > 1 else {}

    @property
    def token_axis(self) -> str | None:
        """The axis that shards tokens; None if no device shares them."""
        if self.sequence > 1:
            return "seq"
        return MODEL_AXES[self.tensor_mode][0] if self.sequence_mode == "megatron" else None

    @property
    def zero_axes(self) -> tuple[str, ...]:
        """The axes of samples along which ZeRO shards."""
        return ("data", *self.expert_axes)

    @property
    def local_axes(self) -> tuple[str, ...]:
        """The axes along which parameters are used as they are stored: `local=` of a step."""
        return (*self.expert_axes, *self.inner_axes)

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh by axis, for `make_mesh`; `data` must be a number."""
        if self.data is None:
            raise PlanError(
                "Parallelism: data must be a number before there is a mesh; got None. "
                "Give the number of devices: parallelism.on(devices)."
            )
        replica_axis = {"replica": self.replicas} if self.replicas > 1 else {}
        outer = {"pipe": self.pipeline, **replica_axis, "data": self.data}
        return {**outer, **self.expert_axes, **self.inner_axes}

    @property
    def devices(self) -> int:
        """The number of devices."""
        return prod(self.axes.values())

    @property
    def rows_of_step(self) -> int:
        """The number of samples of a step on all devices."""
        assert self.data is not None and self.microbatches is not None
        samples = self.rows * self.microbatches
        return self.replicas * self.data * self.experts * samples

    def on(self, devices: int) -> Parallelism:
        """Return the parallelism on a number of devices, with `data` as a number."""
        reason = self.misfit(devices=devices)
        if reason:
            raise PlanError(f"Parallelism: {reason}.")
        return replace(self, data=devices // (self._device_product() // (self.data or 1)))

    def mesh(self, devices: int | None = None, *, runtime: Runtime | None = None) -> Mesh:
        """Return the mesh of a number of devices; by default all of `fs.run`, or all processes.

        Outside of both, with `data` as a number, their number is the product of the sizes.
        """
        if devices is None:
            has_all_sizes = self.data is not None and here() is None and process_count() == 1
            devices = self.devices if has_all_sizes else present_devices()
        return make_mesh(self.on(devices).axes, runtime=runtime)

    def scaled(self, devices: int) -> Parallelism:
        """Return the same on fewer devices: the largest axes are halved, the batch with them."""
        count = self.devices
        sizes: dict[str, Any] = {name: vars(self)[name] for name in SIZES}
        while count > devices:
            name = max(_HALVED_FIRST, key=lambda name: sizes[name])
            if sizes[name] % 2:
                raise PlanError(
                    f"Parallelism.scaled: {name} must be a multiple of two; got {sizes[name]}."
                )
            sizes[name] //= 2
            count //= 2
        if sizes["tensor"] == 1 and self.sequence_mode == "megatron":
            sizes["sequence_mode"] = "gather"  # there is no axis of layers left
        return replace(self, **sizes)

    def of_layer(self) -> Parallelism:
        """Return the parallelism of the devices that share a layer and its samples: a cache's key.

        Fields that change no layer have their defaults; all others stay, those of later too.
        """
        return replace(
            self,
            data=1,
            replicas=1,
            pipeline=1,
            zero_stage=0,
            microbatches=1,
            schedule="1f1b",
            chunks=1,
            state_memory="device",
        )

    # -- what it divides --------------------------------------------------------------------------

    def misfit(
        self,
        *,
        devices: int | None = None,
        layers: int | None = None,
        batch: int | None = None,
        node: int | None = None,
    ) -> str:
        """Return why some devices, layers or samples cannot be divided so; "" if they can.

        Args:
            devices: their number.
            layers: number of repeated layers of the model, of which each stage has one or more.
            batch: number of samples of a step, which microbatches of `rows` samples divide.
            node: number of devices of a node, inside of which layers are shared.
        """
        reasons = list[str]()
        if devices is not None and not self._divides(devices):
            reasons.append(self._device_misfit(devices))
        if node is not None and self.tensor > node:
            reasons.append(
                f"tensor must be at most the {node} devices of a node; got {self.tensor}"
            )
        if layers is not None and self.stages > layers:
            reasons.append(
                f"pipeline * chunks must be at most the number of layers, {layers}; "
                f"got {self.pipeline} * {self.chunks} = {self.stages}"
            )
        data = self.data or 1
        samples = data * self.replicas * self.experts * self.rows
        if batch is not None and batch % samples:
            reasons.append(
                f"data * replicas * experts * rows must divide the samples of a step, {batch}; got "
                f"{data} * {self.replicas} * {self.experts} * {self.rows} = {samples}"
            )
        return "; ".join(reasons)

    def _device_product(self) -> int:
        """Return the product of all sizes, where `data` counts as 1 if it is not known."""
        inner = prod(self.inner_axes.values())
        return (self.data or 1) * self.replicas * self.pipeline * self.experts * inner

    def _divides(self, devices: int) -> bool:
        product = self._device_product()
        return devices % product == 0 if self.data is None else devices == product

    def _device_misfit(self, devices: int) -> str:
        data = self.data
        if data is None:
            data = max(devices // self._device_product(), 1)
        sizes = {"data": data, "replicas": self.replicas, "pipeline": self.pipeline}
        sizes |= {"experts": self.experts, "sequence": self.sequence, "tensor": self.tensor}
        if self.replicas == 1:
            del sizes["replicas"]  # most have none, and it would be one more name to read
        return (
            f"{' * '.join(sizes)} must be the number of devices, {devices}; "
            f"got {' * '.join(map(str, sizes.values()))} = {prod(sizes.values())}"
        )

    # -- as a table -------------------------------------------------------------------------------

    @classmethod
    def load(cls, source: Mapping[str, Any] | str | PathLike[str]) -> Parallelism:
        """Return the parallelism of a file or a dict; one error names all that is wrong.

        Args:
            source: a file that `save` or `fshard plan -o` has written, another one of TOML or
                JSON, or a dict: fields by name. As in Colossal-AI's configuration, `pipeline` may
                be dict(size=), `tensor` dict(size=, mode=, depth=), also with mode="sequence",
                which shards tokens with ring self-attention; all may be in a table "parallel".

        >>> Parallelism.load(dict(pipeline=2, tensor=dict(size=4, mode="2d")))
        Parallelism(pipeline=2, tensor=4, tensor_mode='2d', microbatches=2)
        """
        values, errors = fields_of(source, "Parallelism.load")
        errors += unknown("Parallelism", values, FIELDS)
        known = {name: value for name, value in values.items() if name in FIELDS}
        loaded = list[Parallelism]()
        errors += refusal(lambda: loaded.append(cls(**known)))
        if errors:
            texts = [error.removeprefix("Parallelism: ") for error in errors]
            raise PlanError(f"Parallelism.load: {'; '.join(texts)}.")
        return loaded[0]

    def save(self, path: str | PathLike[str]) -> None:
        """Write a TOML file, which `load` reads.

        >>> import tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "plan.toml")
        >>> Parallelism(data=4, recompute="full").save(path)
        >>> Parallelism.load(path)
        Parallelism(data=4, recompute='full')
        """
        write_table(path, vars(self))


FIELDS = tuple(field.name for field in fields(Parallelism))

CHOICES: dict[str, tuple[Any, ...]] = {
    "tensor_mode": get_args(TensorMode),
    "sequence_mode": (*get_args(Algorithm), "megatron"),
    "zero_stage": get_args(Stage),
    "state_memory": ("device", "host"),
}
"""The legal values of fields that have few."""

_HALVED_FIRST = ("data", "pipeline", "tensor", "sequence", "experts", "replicas")
"""The sizes in the order in which `scaled` halves those that are equal."""


@cache
def _default() -> Parallelism:
    return Parallelism()


@cache  # a search on 64 devices has 2,552 plans with 160 schedules
def _schedule(name: str, stages: int, microbatches: int, devices: int | None) -> Schedule:
    return pipeline_schedule(name, stages=stages, microbatches=microbatches, devices=devices)


def present_devices() -> int:
    """Return the number of devices of `fs.run`, or of processes."""
    scope = here()
    return scope.mesh.root_size if scope is not None else process_count()


def kept_names(recompute: object) -> tuple[str, ...]:
    """Return the names of values that layers keep for their backward.

    >>> kept_names("except attention, mlp"), kept_names("full")
    (('attention', 'mlp'), ())
    """
    text = str(recompute)
    if not text.startswith("except "):
        return ()
    names = [name.strip() for name in text.removeprefix("except ").split(",")]
    return tuple([name for name in names if name])


def _invalid_fields(parallelism: Parallelism) -> list[str]:
    """List the fields that have another type, or none of the legal values."""
    errors = list[str]()
    for name, value in vars(parallelism).items():
        if name in CHOICES:
            errors += one_of(name, value, *CHOICES[name])
        elif name == "recompute":
            errors += _invalid_recompute(value)
        elif name == "schedule":
            errors += _invalid_schedule(value)
        elif value is not None or name not in ("data", "microbatches", "chunks"):
            errors += integer(name, value)
    return errors


def _invalid_schedule(name: Any) -> list[str]:
    if isinstance(name, str) and name in BUILDERS:
        return []
    # Its own error names all schedules, and the nearest one.
    return refusal(lambda: pipeline_schedule(name, stages=2, microbatches=1))


def _invalid_recompute(recompute: Recomputed) -> list[str]:
    is_legal = (
        recompute in (*RECOMPUTED_IN_LAYERS, *RECOMPUTED_IN_STAGES)
        or kept_names(recompute) != ()
        or not integer("recompute", recompute)
    )
    choices = (
        '"never", "selective", "full" or "except a, b"; of stages "always", "except_last" '
        "or an integer >= 1"
    )
    return must_be("recompute", choices, recompute, is_legal)


def _contradictions(parallelism: Parallelism) -> list[str]:
    """List the fields, each valid, that contradict each other."""
    p = parallelism
    errors = refusal(lambda: model_axes(p.tensor, p.tensor_mode, p.tensor_depth))
    shares_layers = p.tensor > 1 and p.tensor_mode == "1d" and p.sequence == 1
    if p.sequence_mode == "megatron" and not shares_layers:
        errors.append(
            'sequence_mode="megatron" shards tokens along the axis of the layers, so it must have '
            f'tensor > 1, tensor_mode="1d" and sequence=1; got {p.tensor}, "{p.tensor_mode}" '
            f"and {p.sequence}"
        )
    if p.in_stages:
        errors += _contradictions_of_stages(p)
    return errors


def _contradictions_of_stages(p: Parallelism) -> list[str]:
    errors = list[str]()
    has_any_number = p.schedule in IN_LOOPS
    expected_chunks = 1 if p.schedule in ONE_STAGE else 2
    if not has_any_number and p.chunks != expected_chunks:
        errors.append(
            f'chunks must be {expected_chunks} for schedule="{p.schedule}"; got {p.chunks}'
        )
    if p.replicas > 1:
        errors.append(f"replicas must be 1 with pipeline > 1; got {p.replicas}")
    if p.state_memory != "device":
        errors.append('state_memory must be "device" with pipeline > 1; got "host"')
    return errors
