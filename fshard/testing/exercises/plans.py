"""Exercises of the notebook "Plan a run on thousands of devices"."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import fshard as fs
from fshard.testing.grading import Exercise, WrongAnswer, as_function, grade_cases


def _layer(hidden: int, ffn: int, heads: int, kv_heads: int) -> int:
    """Count the parameters that one more layer adds to a decoder."""
    sizes = {"hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads}
    sizes |= {"vocab": 10, "sequence": 8}
    one, two = (fs.plan.Transformer(layers=layers, **sizes).parameters for layers in (1, 2))
    return two - one


PARAMETERS = Exercise(
    "plans.parameters",
    "How many parameters has a layer of Llama? q and the output are (hidden, hidden); k and v have"
    " `kv_heads` of `heads` heads; the MLP is gated: three matrices of hidden x `ffn`; and there"
    " are"
    " two norms of `hidden` weights.",
    "answer(hidden, ffn, heads, kv_heads)",
    (
        "Attention: q and output hidden * hidden each; k and v fewer columns.",
        "k and v have hidden * kv_heads / heads columns each.",
        "MLP: 3 * hidden * ffn. Norms: 2 * hidden.",
    ),
    "With 126 of them, 16384 wide, and two tables of words these are the 405 billion of Llama 3.",
    lambda answer: grade_cases(
        answer,
        "answer(hidden, ffn, heads, kv_heads)",
        [(64, 160, 8, 2), (48, 100, 4, 4), (32, 96, 8, 1)],
        _layer,
        {
            "k and v have fewer heads: hidden * kv_heads / heads columns each.": (
                lambda hidden, ffn, heads, kv_heads: (
                    4 * hidden * hidden + 3 * hidden * ffn + 2 * hidden
                )
            ),
            "The MLP is gated, so it has three matrices.": (
                lambda hidden, ffn, heads, kv_heads: (
                    _layer(hidden, ffn, heads, kv_heads) - hidden * ffn
                )
            ),
            "The norms are missing, 2 * hidden.": (
                lambda hidden, ffn, heads, kv_heads: (
                    _layer(hidden, ffn, heads, kv_heads) - 2 * hidden
                )
            ),
            "The output of attention is missing: it is (hidden, hidden), as q is.": (
                lambda hidden, ffn, heads, kv_heads: (
                    _layer(hidden, ffn, heads, kv_heads) - hidden * hidden
                )
            ),
        },
    ),
)


def _rows(plan: Any) -> int:
    return plan.rows_of_step


def _plans() -> list[tuple[fs.Parallelism]]:
    return [
        (fs.Parallelism(data=4, pipeline=2, tensor=2, microbatches=8, rows=2),),
        (fs.Parallelism(data=2, tensor=4, rows=3),),
        (fs.Parallelism(data=3, pipeline=4, microbatches=5),),
    ]


BATCH = Exercise(
    "plans.batch",
    "How many rows has the global batch of a step by the `plan`, an `fs.Parallelism`?"
    " `plan.rows` is"
    " the number in a microbatch of one device, `plan.microbatches` their number.",
    "answer(plan)",
    (
        "Which devices have other rows: those of data, of pipeline, of tensor parallelism?",
        "Devices that share a layer or are stages have the same rows.",
        "data * microbatches * rows.",
    ),
    "A cluster that grows tenfold has ten times the batch, or fewer microbatches and a bubble.",
    lambda answer: grade_cases(
        answer,
        "answer(plan)",
        _plans(),
        _rows,
        {
            "Stages and the devices of a layer have the same rows: `plan.data` counts, not all"
            " devices.": lambda plan: plan.devices * plan.microbatches * plan.rows,
            "Each device takes several microbatches in a step.": lambda plan: plan.data * plan.rows,
            "A microbatch has `plan.rows` rows.": (lambda plan: plan.data * plan.microbatches),
            "That is one device's part of the batch.": (lambda plan: plan.microbatches * plan.rows),
        },
    ),
)


def _grade_layout(answer: Any) -> None:
    function = as_function(answer, "answer(devices, node)")
    for devices, node in ((64, 8), (48, 4)):
        plan = function(devices, node)
        if not isinstance(plan, fs.Parallelism):
            raise WrongAnswer("The answer must return an `fs.Parallelism(...)`.")
        if plan.tensor != node:
            raise WrongAnswer(
                f"A layer must be shared by the {node} devices of a node; it is by {plan.tensor}."
            )
        if plan.pipeline != 4:
            raise WrongAnswer(f"The model has four stages; the plan has {plan.pipeline}.")
        plan = plan if plan.data is not None else plan.on(devices)
        if plan.devices != devices:
            raise WrongAnswer(
                f"The plan is of {plan.devices} devices, not of {devices}: data * pipeline * tensor"
                " must be all of them."
            )
        if plan.schedule != "1f1b":
            raise WrongAnswer(f'The schedule must be "1f1b"; it is "{plan.schedule}".')
        if plan.zero_stage < 1:
            raise WrongAnswer(
                "Each device stores the state of its layers in full: `zero_stage=1` divides it"
                " along"
                " data, at no more bytes on the wire."
            )
        if plan.zero_stage > 1:
            raise WrongAnswer(
                "With stages, ZeRO 2 and 3 reduce or gather for each microbatch. Stage 1 is enough"
                " here."
            )
        bubble = plan.pipeline_schedule().simulate().bubble
        if bubble > Fraction(1, 5):
            raise WrongAnswer(
                f"The bubble is {float(bubble):.0%}, and must be at most 20 %. Four stages need"
                " more microbatches than that."
            )


LAYOUT = Exercise(
    "plans.layout",
    "Return a plan for `devices` GPUs in nodes of `node`: each layer is shared by the devices of a"
    " node; the model has 4 stages; the rest is data parallelism, with the optimizer state sharded"
    " and nothing else; and the bubble of 1F1B is at most 20 %.",
    "answer(devices, node)",
    (
        "`fs.Parallelism(tensor=..., pipeline=4, data=..., zero_stage=..., microbatches=...)`.",
        "data is what is left: devices // (4 * node).",
        "The bubble is 3 / (M + 3): at most a fifth from M = 12 on.",
    ),
    "Layers within nodes, stages across, data around: most large runs are of this form.",
    _grade_layout,
)

EXERCISES = (PARAMETERS, BATCH, LAYOUT)
