"""`lab`: the lab in a notebook, as a widget of anywidget that sends messages to an `Engine`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from fshard.errors import FshardError, PlanError
from fshard.laboratory.answer import Answer
from fshard.laboratory.engine import Engine, Message
from fshard.laboratory.page import widget_module
from fshard.laboratory.proof import certificate_of_answer, why_not_proven
from fshard.laboratory.state import LabState, given_fields
from fshard.laboratory.subject import Subject
from fshard.mesh.layout import Mesh, PyTree
from fshard.parallelism.value import Parallelism
from fshard.plan.models import Transformer
from fshard.plan.program import Loss

if TYPE_CHECKING:  # slow to import, as it imports DTensor
    from fshard.testing.certificate import Certificate


class Lab:
    """The lab: a state that the page changes, and what follows from it. Made by `fs.lab`.

    In a notebook it shows itself as a widget. Values are those of layout A.
    """

    def __init__(self, subject: Subject, state: LabState) -> None:
        self._engine = Engine(subject, state)

    @property
    def subject(self) -> Subject:
        """The module with its batch and loss, if it is one of the user's own."""
        return self._engine.subject

    @property
    def state(self) -> LabState:
        """The last state that has an answer."""
        return self._engine.shown_state

    @property
    def plan(self) -> Parallelism:
        """The parallelism of the state, on its devices."""
        return self.state.parallelism

    @property
    def code(self) -> str:
        """The program of the state."""
        return self._engine.code(self.state)

    def certificate(self) -> Certificate:
        """Train two steps of the state's program and compare them with those of one device.

        Raises:
            PlanError: for a state without a proof: a large model, dropout, buffers that change.
        """
        answer = self.answer
        reason = why_not_proven(answer)
        if reason:
            raise PlanError(f"lab: {reason}")
        return certificate_of_answer(answer, is_abandoned=lambda: False)

    @property
    def answer(self) -> Answer:
        """The costs of the state's program, and its leaves."""
        return self._engine.answer(self.state)

    def __repr__(self) -> str:
        return f"lab of {self.subject.name}: {self.plan} on {self.state.devices:,} devices"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Return the widget, in a notebook."""
        return self.widget()._repr_mimebundle_(**options)

    def widget(self) -> Any:
        """Return the widget: with several, each shows the same state at first."""
        return widget_of(self._engine)


def widget_of(engine: Engine) -> Any:
    """Return a widget that shows an engine; raise if anywidget is missing."""
    try:
        import anywidget
        import traitlets
    except ModuleNotFoundError as error:
        raise PlanError(
            "lab: a notebook must have anywidget to show the lab; got none. Install it: "
            'pip install "fshard[notebooks]". Or without a notebook: fshard lab.'
        ) from error

    class LabWidget(anywidget.AnyWidget):
        """The page in a cell."""

        _esm = traitlets.Unicode(widget_module()).tag(sync=True)

    widget = LabWidget()

    def receive(_: Any, message: Message, __: Any) -> None:
        # A kernel runs one message after the other: answered in a thread, so that a newer one
        # is seen before an older one is answered.
        engine.expect(message)
        thread = threading.Thread(target=_answer, args=(engine, widget, message), daemon=True)
        thread.start()

    engine.send = widget.send
    widget.on_msg(receive)
    return widget


def _answer(engine: Engine, widget: Any, message: Message) -> None:
    widget.send(engine.reply(message))


def lab(
    model: nn.Module | Transformer | None = None,
    batch: PyTree = None,
    *,
    loss: Loss | None = None,
    blocks: str | None = None,
    mesh: Mapping[str, int] | Mesh | None = None,
    layout: Parallelism | None = None,
    devices: int | None = None,
    cluster: str = "h100",
    optimizer: str = "adamw",
    state: LabState | Mapping[str, Any] | str | None = None,
) -> Lab:
    """Return a lab: choose a mesh, a layout and ZeRO, and see at once what a step then does.

    In a notebook it is a page with controls: shards, collectives, memory, time, the equality with
    one device, and the program to copy. All follow from the program itself, which runs without
    values and devices. `fshard lab` serves the same page without a notebook.

    Args:
        model: the sizes of a `Transformer`, by default a small one; or a module with repeated
            layers, as `fs.plan.search` takes it.
        batch: of a module: one sample or more. A module of transformers needs a mask of two dims
            in it, and `attn_implementation="eager"`.
        loss: of a module: a function of the output and the batch. Default: the cross-entropy of
            logits and labels; of a dict the output, or its `loss`.
        blocks: of a module: the path of its layers; default: the longest `ModuleList`.
        mesh: sizes of axes, with the names of `fs.Parallelism`: {"data": 4, "model": 2}.
        layout: sizes and options at first. Of a mesh too: its options.
        devices: their number; default: that of the mesh or the layout, or 8.
        cluster: a name of `fs.plan.cluster`.
        optimizer: a name of `fshard.laboratory.state.OPTIMIZERS`.
        state: all other arguments as one value, from `lab.state` or a link. A module of the user's
            own is given beside it, with its batch.

    >>> import fshard as fs
    >>> small = fs.lab(mesh={"data": 4, "model": 2}, layout=fs.Parallelism(zero_stage=3))
    >>> small.plan
    Parallelism(data=4, tensor=2, zero_stage=3)
    >>> "fs.make_mesh({"  in small.code
    True
    """
    subject = Subject()
    if isinstance(model, nn.Module):
        subject = Subject(model, batch, loss, blocks)
    if state is not None:
        begin = state if isinstance(state, LabState) else LabState.from_json(state)
        if subject.module is not None:
            begin = replace(begin, model=None)
        elif isinstance(model, Transformer):
            begin = replace(begin, model=model)
        return _checked(Lab(subject, begin))

    parallelism = layout or Parallelism()
    if mesh is not None:
        sizes = mesh.shape if isinstance(mesh, Mesh) else mesh
        # Options that follow from sizes, such as the number of microbatches, follow from the new.
        options = {**given_fields(parallelism), **sizes_by_field(sizes)}
        parallelism = Parallelism(**options)
    if devices is None:
        devices = parallelism.devices if parallelism.data is not None else 8
    sizes_of_model: dict[str, Any] = {}
    if model is not None:
        sizes_of_model["model"] = model if isinstance(model, Transformer) else None
    begin = LabState(
        **sizes_of_model,
        devices=devices,
        plan=parallelism,
        cluster=cluster,
        optimizer=optimizer,
    )
    return _checked(Lab(subject, begin))


def _checked(lab: Lab) -> Lab:
    """Return a lab whose model can be called with its batch, and its loss with both; else raise."""
    layered = lab.subject.layered(lab.state)
    if lab.subject.module is None:
        return lab
    tracer = lab.subject.tracer(lab.state)
    try:
        tracer.cost(Parallelism())
    except FshardError:
        raise
    except Exception as error:  # of the module and the loss: all kinds are expected
        default = "" if layered.loss is not None else " Without loss= it is the cross-entropy."
        raise PlanError(
            f"lab: the model and the loss must run on the batch; got {type(error).__name__}: "
            f"{error}.{default}"
        ) from error
    return lab


_FIELD_OF_AXIS = {
    "data": "data",
    "pipe": "pipeline",
    "replica": "replicas",
    "expert": "experts",
    "seq": "sequence",
    "model": "tensor",
}


def sizes_by_field(sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of a parallelism that make a mesh of some axes.

    >>> sizes_by_field({"pipe": 2, "data": 4})
    {'data': 4, 'pipeline': 2}
    """
    unknown = [axis for axis in sizes if axis not in _FIELD_OF_AXIS]
    if unknown:
        raise PlanError(
            f"lab: the axes of mesh must be among {', '.join(_FIELD_OF_AXIS)}; "
            f"got {', '.join(unknown)}. Other modes of layers: layout=fs.Parallelism(...)."
        )
    fields = {"data": 1}
    for axis, size in sizes.items():
        fields[_FIELD_OF_AXIS[axis]] = size
    return fields
