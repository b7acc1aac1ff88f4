"""`prove`: does the program of a state train as one device does? On virtual devices, by `certify`.

Small models only: the proof trains two steps with values, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fshard.booster.hybrid import HybridParallelPlugin
from fshard.copying import copied
from fshard.laboratory.answer import Answer
from fshard.laboratory.leaves import pattern_of
from fshard.mesh.layout import P, PyTree, flatten, map_leaves
from fshard.mesh.layout.make import make_mesh
from fshard.parallelism.build import param_rules, rules_with, split_model, step_options
from fshard.randomness import keyed_random
from fshard.tensor.plan import Plan
from fshard.transforms.module.functionalize import functionalize

if TYPE_CHECKING:  # slow to import, as it imports DTensor
    from fshard.testing.certificate import Certificate, CertificateRow

MOST_PARAMETERS = 4_000_000
"""The parameters of a model that is trained for a proof."""

MOST_DEVICES = 16
"""The virtual devices of a proof."""

MOST_FLOPS = 400_000_000_000
"""The operations of a step in a proof: those of all parameters, each on 16,384 tokens."""

STEPS = 2

_WORDS = {
    "EXACT": "equal",
    "BOUNDED": "rounding",
    "DIVERGENT": "differs",
    "INCONCLUSIVE": "differs",
}
"""The words for the verdicts of a certificate."""

_ORDER = ("equal", "rounding", "differs")
"""From the best to the worst."""


class AbandonedError(Exception):
    """A newer state has made a proof useless."""


def why_not_proven(answer: Answer) -> str:
    """Return why a state has no proof; "" if it has one."""
    return _too_large(answer) or _without_values(answer) or _not_comparable(answer)


def _too_large(answer: Answer) -> str:
    """Return which number of a state is too large for a proof; "" if none is."""
    counts = {
        "virtual devices": (answer.plan.devices, MOST_DEVICES),
        "parameters": (answer.model.parameters, MOST_PARAMETERS),
        "operations in a step": (answer.base_estimate.model_flops, MOST_FLOPS),
    }
    for name, (count, most) in counts.items():
        if count > most:
            return f"A proof has at most {most:,} {name}; these are {count:,}."
    return ""


def _without_values(answer: Answer) -> str:
    """Return why a module of the user's own has no values to train; "" if it has."""
    if answer.state.model is not None:
        return ""
    module = answer.subject.module
    assert module is not None
    leaves, _ = flatten([answer.subject.batch, [*module.parameters(), *module.buffers()]])
    if any([x.is_meta for x in leaves]):
        return "A proof trains with values; the module or its batch is on the meta device."
    return ""


def _not_comparable(answer: Answer) -> str:
    """Return which choice `certify` cannot compare with one device; "" if none is."""
    is_one_replicated = any([not spec.axes for spec in answer.model.layouts.values()])
    if answer.plan.zero_stage == 3 and is_one_replicated:
        return "A proof shards all parameters with ZeRO-3; an override replicates one."
    if answer.state.model is not None:
        has_dropout = bool(answer.state.model.dropout)
    else:
        changed = _changed_buffer(answer)
        if changed:
            return (
                "A proof compares with one device, where buffers follow all samples; "
                f"{changed} changes in each forward."
            )
        has_dropout = _draws(answer)
    if has_dropout:
        return "A proof compares with one device, which draws other numbers for dropout."
    return ""


def _changed_buffer(answer: Answer) -> str:
    """Return the name of a buffer that a forward of the user's module changes; "" without one."""
    _, before, after = _forward(answer, seed=0)
    for name, x in before.items():
        if not torch.equal(x, after[name]):
            return name
    return ""


def _draws(answer: Answer) -> bool:
    """Return True if a forward of the user's module draws random numbers."""
    first, _, _ = _forward(answer, seed=0)
    second, _, _ = _forward(answer, seed=1)
    return not torch.equal(first, second)


def _forward(answer: Answer, seed: int) -> tuple[Tensor, PyTree, PyTree]:
    """Return the loss of the user's module on two samples, and its buffers before and after."""
    function, params, buffers = functionalize(training_module(answer))
    batch = training_batch(answer, rows=2)  # BatchNorm takes no single sample
    with keyed_random(seed), torch.no_grad():
        output, after = answer.model.call(function, batch, params, buffers)
        return answer.model.loss_of(output, batch), buffers, after


def prove(answer: Answer, is_abandoned: Callable[[], bool]) -> dict[str, Any] | None:
    """Return the verdict of a state: see `certify`; None if it is abandoned.

    Args:
        answer: of the state.
        is_abandoned: returns True once the proof is of no use.
    """
    try:
        certificate = certificate_of_answer(answer, is_abandoned)
    except AbandonedError:
        return None
    return verdict_of(certificate, answer.model.blocks)


def certificate_of_answer(answer: Answer, is_abandoned: Callable[[], bool]) -> Certificate:
    """Return the certificate of a state; raise `AbandonedError` once it is of no use."""

    def loss(output: Any, batch: PyTree, layer_plan: Plan | None = None) -> Tensor:
        if is_abandoned():
            raise AbandonedError
        return answer.model.loss_of(output, batch, layer_plan)

    run = _certify_stages if answer.plan.in_stages else _certify_full
    return run(answer, loss)


# -- what is trained -------------------------------------------------------------------------------


def training_module(answer: Answer) -> nn.Module:
    """Return the model with values, the same each time: those of a module of the user's own."""
    model = answer.model
    if answer.state.model is None:
        assert answer.subject.module is not None
        return copied(answer.subject.module, {}).cpu().train()
    module = model.build(model.layers).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in module.parameters():
            if x.dim() > 1:
                x.normal_(0.0, 0.1, generator=generator)
            else:
                x.fill_(1.0)
    return module


def training_batch(answer: Answer, rows: int | None = None) -> PyTree:
    """Return a batch of one step: token ids and others as labels, or like that of the user.

    Args:
        answer: of a state.
        rows: instead of those of a step.
    """
    if rows is None:
        rows = answer.plan.rows_of_step
    generator = torch.Generator().manual_seed(1)
    sizes = answer.state.model
    if sizes is None:
        return map_leaves(partial(_drawn_like, rows, generator), answer.subject.batch)
    ids = torch.randint(sizes.vocab, (rows, sizes.sequence), generator=generator)
    labels = torch.randint(sizes.vocab, (rows, sizes.sequence), generator=generator)
    return ids, labels


def _drawn_like(rows: int, generator: torch.Generator, x: Tensor) -> Tensor:
    """Return rows with values within the bounds of some given ones, which are repeated.

    If all samples were equal, so were the gradients of all devices: a sum that a step leaves out
    would change nothing. So floats are multiplied by a number from 0.5 to 1, which keeps zeros,
    signs and infinities, and the integers of a row change places. Booleans, of masks, stay.
    """
    repeated = x.detach().cpu()[torch.arange(rows) % len(x)]
    if x.is_floating_point():
        return repeated * (1 - torch.rand(repeated.shape, generator=generator) / 2).to(x.dtype)
    if x.dtype == torch.bool or x.dim() == 1:
        return repeated
    flat = repeated.flatten(1)
    order = torch.rand(flat.shape, generator=generator).argsort(1)
    return flat.gather(1, order).reshape(repeated.shape)


# -- the runs --------------------------------------------------------------------------------------


def _certify_full(answer: Answer, loss: Callable[..., Tensor]) -> Certificate:
    """Certify the step of a full model."""
    from fshard.testing.certify import certify  # slow to import: the page is there before

    model = answer.model
    plan = answer.plan
    batch = training_batch(answer)
    program = model.recomputed(training_module(answer), plan.recompute)
    ((_, layer_plan),) = split_model(
        program,
        plan,
        sample=map_leaves(lambda x: x[:1], model.arguments(batch)),
        blocks=model.blocks,
        check=False,
        styles=model.styles,
    )
    functionalized = functionalize if layer_plan is None else layer_plan.functionalize
    function, params, buffers = functionalized(program)
    within = None if layer_plan is None else layer_plan.rules
    # In stage 3 all that these rules leave is flattened along the axes of ZeRO by `certify`.
    rules = param_rules(replace(plan, zero_stage=0), plan.zero_axes, within)
    if model.layouts:
        rules = rules_with(model.layouts, rules, params)

    options = step_options(plan)
    replica_axis = ("replica",) if plan.replicas > 1 else ()
    return certify(
        model.loss_function(function, layer_plan, loss),
        params,
        batch,
        answer.state.new_optimizer(),
        make_mesh(plan.axes, runtime="virtual"),
        axis=plan.zero_axes,
        unit=f"{model.blocks}.*",
        within=rules,
        batch_spec=P((*replica_axis, *plan.zero_axes)),
        buffers=buffers or None,
        stages=[plan.zero_stage],
        steps=STEPS,
        **options,
    )


def _certify_stages(answer: Answer, loss: Callable[..., Tensor]) -> Certificate:
    """Certify the step of stages, by the plugin that runs them."""
    from fshard.testing.certify import certify_module  # slow to import: the page is there before

    model = answer.model
    plan = answer.plan
    batch = training_batch(answer)
    arguments = model.arguments(batch)
    plugin = HybridParallelPlugin(
        # The layers recompute by themselves, and stages not again.
        replace(plan, recompute="never"),
        blocks=model.blocks,
        sample=map_leaves(lambda x: x[:1], arguments),
        tensor_rules=model.styles,
    )
    if not isinstance(batch, Mapping):
        # Of a pair a loss gets the second: here the full batch.
        batch = (arguments[0], batch)
    return certify_module(
        lambda: model.recomputed(training_module(answer), plan.recompute),
        [batch] * STEPS,
        make_mesh(plan.axes, runtime="virtual"),
        loss=loss,
        plugin=plugin,
    )


def verdict_of(certificate: Certificate, blocks: str) -> dict[str, Any]:
    """Return the verdict of all leaves, a sentence, and a row for each leaf of all layers."""
    worst: dict[str, CertificateRow] = {}
    for row in certificate.rows:
        pattern = pattern_of(row.leaf.replace("[", ".").replace("]", ""), blocks)
        known = worst.get(pattern)
        if known is None or _rank(row) > _rank(known):
            worst[pattern] = row
    rows = list[dict[str, str]]()
    for pattern, row in worst.items():
        text = row.reason or f"relative difference {row.error:.1e}"
        rows.append({"leaf": pattern, "verdict": _WORDS[row.verdict], "text": text})
    verdict = max([row["verdict"] for row in rows], key=_ORDER.index)
    return {"verdict": verdict, "text": _sentence(verdict, certificate, rows), "rows": rows}


def _rank(row: CertificateRow) -> tuple[int, float]:
    return _ORDER.index(_WORDS[row.verdict]), row.error


def _sentence(verdict: str, certificate: Certificate, rows: list[dict[str, str]]) -> str:
    steps = f"{certificate.steps} steps on virtual devices and on one, in float64"
    if verdict == "equal":
        return f"All {len(rows)} leaves are equal in bits: {steps}."
    if verdict == "rounding":
        largest = max([row.error for row in certificate.rows])
        return f"All {len(rows)} leaves agree within rounding, {largest:.0e}: {steps}."
    first = certificate.first
    assert first is not None
    return f"{first.leaf} differs: {first.reason or first.subject}."
