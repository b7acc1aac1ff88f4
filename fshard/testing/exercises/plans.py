"""Exercises of the notebook "Plan a run on thousands of devices"."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import fshard as fs
from fshard.testing.grading import Answer, Cases, Exercise, WrongAnswer, mistake

__all__ = ["EXERCISES"]


# -- the parameters of a layer --------------------------------------------------------------------


def parameters_of_layer(hidden: int, ffn: int, heads: int, kv_heads: int) -> int:
    """Count the parameters that one more layer adds to a decoder."""
    sizes = {"hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads}
    sizes |= {"vocab": 10, "sequence": 8}
    one_layer = fs.plan.Transformer(layers=1, **sizes)
    two_layers = fs.plan.Transformer(layers=2, **sizes)
    return two_layers.parameters - one_layer.parameters


@mistake("k and v have fewer heads: hidden * kv_heads / heads columns each.")
def with_all_heads(hidden: int, ffn: int, heads: int, kv_heads: int) -> int:
    return 4 * hidden * hidden + 3 * hidden * ffn + 2 * hidden


@mistake("The MLP is gated, so it has three matrices.")
def without_the_gate(hidden: int, ffn: int, heads: int, kv_heads: int) -> int:
    return parameters_of_layer(hidden, ffn, heads, kv_heads) - hidden * ffn


@mistake("The norms are missing, 2 * hidden.")
def without_norms(hidden: int, ffn: int, heads: int, kv_heads: int) -> int:
    return parameters_of_layer(hidden, ffn, heads, kv_heads) - 2 * hidden


@mistake("The output of attention is missing: it is (hidden, hidden), as q is.")
def without_output(hidden: int, ffn: int, heads: int, kv_heads: int) -> int:
    return parameters_of_layer(hidden, ffn, heads, kv_heads) - hidden * hidden


PARAMETERS = Exercise(
    name="plans.parameters",
    question=(
        "How many parameters has a layer of Llama? q and the output are (hidden, hidden); k and v"
        " have `kv_heads` of `heads` heads; the MLP is gated: three matrices of hidden x `ffn`; and"
        " there are two norms of `hidden` weights."
    ),
    form="answer(hidden, ffn, heads, kv_heads)",
    hints=(
        "Attention: q and output hidden * hidden each; k and v fewer columns.",
        "k and v have hidden * kv_heads / heads columns each.",
        "MLP: 3 * hidden * ffn. Norms: 2 * hidden.",
    ),
    why=(
        "With 126 of them, 16384 wide, and two tables of words these are the 405 billion of Llama"
        " 3."
    ),
    grade=Cases(
        cases=[(64, 160, 8, 2), (48, 100, 4, 4), (32, 96, 8, 1)],
        truth=parameters_of_layer,
        mistakes=(with_all_heads, without_the_gate, without_norms, without_output),
    ),
)


# -- the rows of a global batch -------------------------------------------------------------------


def rows_of_step(plan: Any) -> int:
    return plan.rows_of_step


@mistake(
    "Stages and the devices of a layer have the same rows: `plan.data` counts, not all devices."
)
def rows_of_all_devices(plan: Any) -> int:
    return plan.devices * plan.microbatches * plan.rows


@mistake("Each device takes several microbatches in a step.")
def rows_of_one_microbatch(plan: Any) -> int:
    return plan.data * plan.rows


@mistake("A microbatch has `plan.rows` rows.")
def number_of_microbatches(plan: Any) -> int:
    return plan.data * plan.microbatches


@mistake("That is one device's part of the batch.")
def rows_of_one_device(plan: Any) -> int:
    return plan.microbatches * plan.rows


BATCH = Exercise(
    name="plans.batch",
    question=(
        "How many rows has the global batch of a step by the `plan`, an `fs.Parallelism`?"
        " `plan.rows` is the number in a microbatch of one device, `plan.microbatches` their"
        " number."
    ),
    form="answer(plan)",
    hints=(
        "Which devices have other rows: those of data, of pipeline, of tensor parallelism?",
        "Devices that share a layer or are stages have the same rows.",
        "data * microbatches * rows.",
    ),
    why="A cluster that grows tenfold has ten times the batch, or fewer microbatches and a bubble.",
    grade=Cases(
        cases=[
            (fs.Parallelism(data=4, pipeline=2, tensor=2, microbatches=8, rows=2),),
            (fs.Parallelism(data=2, tensor=4, rows=3),),
            (fs.Parallelism(data=3, pipeline=4, microbatches=5),),
        ],
        truth=rows_of_step,
        mistakes=(
            rows_of_all_devices,
            rows_of_one_microbatch,
            number_of_microbatches,
            rows_of_one_device,
        ),
    ),
)


# -- a plan for a cluster -------------------------------------------------------------------------


def grade_layout(answer: Answer) -> None:
    for devices, node in ((64, 8), (48, 4)):
        plan = answer(devices, node)
        if not isinstance(plan, fs.Parallelism):
            raise WrongAnswer("The answer must return an `fs.Parallelism(...)`.")
        grade_model_axes(plan, node)

        if plan.data is None:
            plan = plan.on(devices)
        if plan.devices != devices:
            raise WrongAnswer(
                f"The plan is of {plan.devices} devices, not of {devices}: data * pipeline * tensor"
                " must be all of them."
            )
        grade_options(plan)


def grade_model_axes(plan: fs.Parallelism, node: int) -> None:
    if plan.tensor != node:
        raise WrongAnswer(
            f"A layer must be shared by the {node} devices of a node; it is by {plan.tensor}."
        )
    if plan.pipeline != 4:
        raise WrongAnswer(f"The model has four stages; the plan has {plan.pipeline}.")


def grade_options(plan: fs.Parallelism) -> None:
    if plan.schedule != "1f1b":
        raise WrongAnswer(f'The schedule must be "1f1b"; it is "{plan.schedule}".')
    if plan.zero_stage < 1:
        raise WrongAnswer(
            "Each device stores the state of its layers in full: `zero_stage=1` divides it along"
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
            f"The bubble is {float(bubble):.0%}, and must be at most 20 %. Four stages need more"
            " microbatches than that."
        )


LAYOUT = Exercise(
    name="plans.layout",
    question=(
        "Return a plan for `devices` GPUs in nodes of `node`: each layer is shared by the devices"
        " of a node; the model has 4 stages; the rest is data parallelism, with the optimizer state"
        " sharded and nothing else; and the bubble of 1F1B is at most 20 %."
    ),
    form="answer(devices, node)",
    hints=(
        "`fs.Parallelism(tensor=..., pipeline=4, data=..., zero_stage=..., microbatches=...)`.",
        "data is what is left: devices // (4 * node).",
        "The bubble is 3 / (M + 3): at most a fifth from M = 12 on.",
    ),
    why="Layers within nodes, stages across, data around: most large runs are of this form.",
    grade=grade_layout,
)

EXERCISES = (PARAMETERS, BATCH, LAYOUT)
