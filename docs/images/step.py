"""Draw `step.svg`: one step of ZeRO-3 on four devices, as it happened.

    python docs/images/step.py        writes the picture

A step runs on virtual devices. Moments of it are recorded on each device: a unit starts to be
gathered, is complete, is freed; a gradient is reduced. Each moment is a frame, and the bytes below
it are those of a ledger. The picture moves by CSS alone; who prefers reduced motion sees one frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import fshard as fs
import torch
from fshard import P
from fshard.mesh.spmd import moments
from fshard.mesh.spmd.scope import here
from fshard.transforms.fsdp.reductions import Reducer
from fshard.transforms.fsdp.units import Unit
from torch import Tensor

FILE = Path(__file__).with_name("step.svg")
LAYERS, WIDTH, DEVICES = 4, 32, 4


# -- the step, recorded ------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """A moment of a step on one device.

    `kind` is a phase of the step, or "gather", "gathered", "freed", "reduce" of a layer; `calls`
    and `sent` are the collectives and bytes of the device until then.
    """

    kind: str
    layer: int
    calls: int
    sent: int


def record_step() -> list[Moment]:
    """Run a step; return its moments, which are the same on each device."""
    mesh = fs.make_mesh({"data": DEVICES})
    generator = torch.Generator().manual_seed(0)
    layers: Any = [
        torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(LAYERS)
    ]
    params = fs.shard_params(layers, fs.fsdp("data", unit="[*]"), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(1e-2), mesh=mesh, axis="data", stage=3)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), live_units=1)
    batch = torch.randn(4 * DEVICES, WIDTH, generator=generator)
    params, state, _ = step(params, opt.init(params), batch)  # records the order of units

    recorded: dict[int, list[Moment]] = {device: [] for device in range(DEVICES)}
    with fs.ledger() as ledger:

        def add(device: int, kind: str, paths: Sequence[str] = ()) -> None:
            layer = int(paths[0].strip("[]")) if paths else -1
            calls, sent = ledger.calls(device), int(ledger.bytes(device))
            recorded[device].append(Moment(kind, layer, calls, sent))

        with recording(add):
            step(params, state, batch)
        for device in recorded:
            add(device, "end")
    assert all(recorded[device] == recorded[0] for device in recorded)
    return recorded[0]


def loss_fn(layers: Sequence[Tensor], x: Tensor) -> Tensor:
    """Return the loss of one device: four layers."""
    for weight in layers:
        x = torch.tanh(x @ weight)
    return x.square().mean()


class recording:
    """A context in which `add(device, kind, paths)` gets the moments of all devices."""

    def __init__(self, add: Any) -> None:
        unshard, wait = Unit.unshard, Unit.wait_for_unshard
        reshard, send = Unit.reshard, Reducer.send

        def paths_of(unit: Unit) -> list[str]:
            return [param.path for param in unit.plan.params]

        def gather(unit: Unit) -> None:
            is_sharded = not unit.is_unsharded
            unshard(unit)
            if is_sharded:
                add(unit.context.scope.number, "gather", paths_of(unit))

        def gathered(unit: Unit, *into: Any) -> list[Tensor]:
            is_pending = unit.pending is not None
            values = wait(unit, *into)
            if is_pending:
                add(unit.context.scope.number, "gathered", paths_of(unit))
            return values

        def free(unit: Unit) -> None:
            if unit.is_unsharded:
                add(unit.context.scope.number, "freed", paths_of(unit))
            reshard(unit)

        def reduce(reducer: Reducer) -> None:
            paths = [reducer.leaves[index].path for index, _ in reducer._bucket]
            send(reducer)
            if paths:
                scope = here()
                assert scope is not None
                add(scope.number, "reduce", paths)

        self.patches = [
            mock.patch.object(Unit, "unshard", gather),
            mock.patch.object(Unit, "wait_for_unshard", gathered),
            mock.patch.object(Unit, "reshard", free),
            mock.patch.object(Reducer, "send", reduce),
        ]
        self.listener = lambda phase, device, _: (
            add(device, phase) if phase in ("forward", "backward", "update") else None
        )

    def __enter__(self) -> None:
        for patch in self.patches:
            patch.start()
        moments.listeners.append(self.listener)

    def __exit__(self, *_: object) -> None:
        moments.listeners.remove(self.listener)
        for patch in self.patches:
            patch.stop()


# -- frames: what a device stores after each moment --------------------------------------


@dataclass
class Frame:
    """What a device stores, by layer, and the words below."""

    phase: str
    words: str
    sent: str
    gathering: set[int]
    full: set[int]
    gradients: set[int]
    reduced: set[int]


def frames_of(step: Sequence[Moment]) -> list[Frame]:
    """Return a frame for each moment."""
    frames: list[Frame] = []
    phase = "forward"
    gathering, full, reduced = set[int](), set[int](), set[int]()
    words = {
        "forward": "Each device has a quarter of each layer, and of the batch.",
        "backward": "The loss is there: autograd runs from the last layer to the first.",
        "gather": "All-gather: each device sends its quarter of layer {} to the others.",
        "gathered": "Layer {} is complete on each device, and computes.",
        "freed": "Layer {} is freed, but for the quarter of the device.",
        "reduce": "Reduce-scatter: gradients of layer {} are summed, a quarter on each device.",
        "update": "The optimizer updates each device's quarter. Its state is sharded alike.",
        "end": "The step ends as it began: with a quarter on each device.",
    }
    for moment in step:
        layer = moment.layer
        gradients = set[int]()
        match moment.kind:
            case "gather":
                gathering = gathering | {layer}
            case "gathered":
                gathering, full = gathering - {layer}, full | {layer}
            case "freed":
                full = full - {layer}
            case "reduce":
                gradients = {layer}
            case "end":
                reduced = set()
            case _:
                phase = moment.kind
        sent = f"sent by each device: {moment.sent:,} bytes in {moment.calls} collectives"
        frames.append(
            Frame(
                phase,
                words[moment.kind].format(layer),
                sent,
                gathering,
                full,
                gradients,
                reduced,
            )
        )
        reduced = reduced | gradients
    return frames


# -- the picture -------------------------------------------------------------------------

SECONDS = 0.8  # of a frame
COLORS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
)  # of Okabe and Ito: all eyes tell them apart
LEFT, PANEL, QUARTER, ROW = 74, 170, 36, 46
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 12px; fill: #59636e; }
.number { font-size: 11px; fill: #fff; text-anchor: middle; }
.page { fill: #fff; stroke: #d1d9e0; }
.empty { fill: none; stroke: #d1d9e0; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .small { fill: #9198a1; }
  .page { fill: #0d1117; stroke: #3d444d; }
  .empty { stroke: #3d444d; }
}
@media (prefers-reduced-motion: reduce) { * { animation: none !important; } }
"""


class Drawing:
    """An SVG whose elements are shown in some frames each."""

    def __init__(self, frames: Sequence[Frame], still: int) -> None:
        self.frames = frames
        self.still = still
        self.styles: dict[tuple[float, ...], str] = {}
        self.rules: list[str] = []
        self.elements: list[str] = []

    def add(self, element: str, opacities: Sequence[float] = (1,)) -> None:
        """Add an element, with its opacity in each frame."""
        if set(opacities) == {1}:
            self.elements.append(element)
            return
        name = self._class_of(tuple(opacities))
        self.elements.append(f'<g class="{name}">{element}</g>')

    def text(
        self, x: float, y: float, words: str, kind: str = "", shown: Any = (1,)
    ) -> None:
        """Add a line of text."""
        self.add(f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>', shown)

    def _class_of(self, opacities: tuple[float, ...]) -> str:
        """Return the class of elements with these opacities, with its animation."""
        if opacities in self.styles:
            return self.styles[opacities]
        name = f"a{len(self.styles)}"
        self.styles[opacities] = name
        count = len(opacities)
        stops = [f"0% {{ opacity: {opacities[0]:g} }}"]
        for index in range(1, count):
            before, after = opacities[index - 1], opacities[index]
            if before != after:
                start = 100 * index / count
                stops.append(f"{start:.2f}% {{ opacity: {before:g} }}")
                stops.append(f"{start + 6 / count:.2f}% {{ opacity: {after:g} }}")
        stops.append(f"100% {{ opacity: {opacities[-1]:g} }}")
        duration = f"{SECONDS * count:g}s"
        self.rules.append(
            f".{name} {{ opacity: {opacities[self.still]:g};"
            f" animation: {name} {duration} linear infinite; }}"
        )
        self.rules.append(f"@keyframes {name} {{ {' '.join(stops)} }}")
        return name

    def svg(self, width: int, height: int, title: str) -> str:
        """Return the document."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}" + "\n".join(self.rules) + "\n</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}"'
            ' rx="8"/>',
            *self.elements,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def picture() -> str:
    """Return the picture of a step that has just run."""
    frames = frames_of(record_step())
    still = [frame.full for frame in frames].index({2})
    drawing = Drawing(frames, still)
    phases = ["forward", "backward", "update"]
    for index, phase in enumerate(phases):
        shown = [1 if frame.phase == phase else 0.3 for frame in frames]
        drawing.text(LEFT + 90 * index, 26, phase, shown=shown)
    drawing.text(LEFT + 345, 26, "upper bars: parameters; lower bars: gradients", "small")

    for layer in range(LAYERS):
        drawing.text(14, 83 + ROW * layer, f"layer {layer}")
    for device in range(DEVICES):
        draw_device(drawing, device)

    bottom = 72 + ROW * LAYERS
    for row, field in enumerate(["words", "sent"]):
        texts = [getattr(frame, field) for frame in frames]
        for words in dict.fromkeys(texts):
            shown = [float(text == words) for text in texts]
            drawing.text(14, bottom + 20 * row, words, "small" if row else "", shown)
    title = "One step of ZeRO-3 on four devices: gathers, forward, backward, scatters"
    return drawing.svg(LEFT + PANEL * DEVICES, bottom + 36, title)


def draw_device(drawing: Drawing, device: int) -> None:
    """Draw a device: a bar of quarters for each layer, and one for its gradient."""
    frames = drawing.frames
    left = LEFT + PANEL * device
    drawing.text(left, 56, f"device {device}", "small")
    for layer in range(LAYERS):
        top = 68 + ROW * layer
        size = f'width="{4 * QUARTER}" height="20"'
        drawing.add(f'<rect class="empty" x="{left}" y="{top}" {size}/>')
        for owner in range(DEVICES):
            x = left + QUARTER * owner
            shown = [1.0]
            if owner != device:
                shown = [opacity_of(layer, frame) for frame in frames]
            box = f'<rect x="{x}" y="{top}" width="{QUARTER}" height="20" fill="{COLORS[owner]}"/>'
            number = f'<text class="number" x="{x + QUARTER / 2:g}" y="{top + 14}">{owner}</text>'
            drawing.add(box + number, shown)

            is_owner = owner == device
            gradient = [
                float(layer in frame.gradients or (is_owner and layer in frame.reduced))
                for frame in frames
            ]
            drawing.add(
                f'<rect x="{x}" y="{top + 24}" width="{QUARTER}" height="8"'
                f' fill="{COLORS[owner]}"/>',
                gradient,
            )


def opacity_of(layer: int, frame: Frame) -> float:
    """Return the opacity of the quarters of a layer that other devices store."""
    if layer in frame.full:
        return 1
    return 0.35 if layer in frame.gathering else 0


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
