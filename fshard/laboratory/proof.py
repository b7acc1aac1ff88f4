"""`prove`: does the program of a state train as one device does? On virtual devices, by `certify`.

Small models only: the proof trains two steps with values, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fshard.booster.hybrid import HybridParallelPlugin
from fshard.laboratory.answer import Answer
from fshard.laboratory.leaves import pattern_of
from fshard.mesh.layout import P
from fshard.mesh.layout.make import make_mesh
from fshard.parallelism.build import param_rules, rules_with, split_model, step_options
from fshard.plan.program import LayeredModel
from fshard.testing.certificate import Certificate, CertificateRow
from fshard.testing.certify import certify, certify_module
from fshard.transforms.module.functionalize import functionalize

MOST_PARAMETERS = 4_000_000
"""The parameters of a model that is trained for a proof."""

MOST_DEVICES = 16
"""The virtual devices of a proof."""

MOST_TOKENS = 16_384
"""The tokens of a step in a proof."""

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
    if answer.state.model is None:
        return "Certify a module of your own by fs.testing.certify_module."
    return _too_large(answer) or _not_comparable(answer)


def _too_large(answer: Answer) -> str:
    """Return which number of a state is too large for a proof; "" if none is."""
    counts = {
        "virtual devices": (answer.plan.devices, MOST_DEVICES),
        "parameters": (answer.model.parameters, MOST_PARAMETERS),
        "tokens in a step": ((answer.model.tokens or 0) * answer.plan.rows_of_step, MOST_TOKENS),
    }
    for name, (count, most) in counts.items():
        if count > most:
            return f"A proof has at most {most:,} {name}; these are {count:,}."
    return ""


def _not_comparable(answer: Answer) -> str:
    """Return which choice `certify` cannot compare with one device; "" if none is."""
    assert answer.state.model is not None
    if answer.state.model.dropout:
        return "A proof compares with one device, which draws other numbers for dropout."
    is_one_replicated = any([not spec.axes for spec in answer.model.layouts.values()])
    if answer.plan.zero_stage == 3 and is_one_replicated:
        return "A proof shards all parameters with ZeRO-3; an override replicates one."
    return ""


def prove(answer: Answer, is_abandoned: Callable[[], bool]) -> dict[str, Any] | None:
    """Return the verdict of a state: see `certify`; None if it is abandoned.

    Args:
        answer: of the state.
        is_abandoned: returns True once the proof is of no use.
    """

    def continue_proof() -> None:
        if is_abandoned():
            raise AbandonedError

    run = _certify_stages if answer.plan.in_stages else _certify_full
    try:
        certificate = run(answer, continue_proof)
    except AbandonedError:
        return None
    return verdict_of(certificate, answer.model.blocks)


def module_with_values(model: LayeredModel) -> nn.Module:
    """Return a model with values, the same each time."""
    module = model.build(model.layers).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in module.parameters():
            if x.dim() > 1:
                x.normal_(0.0, 0.1, generator=generator)
            else:
                x.fill_(1.0)
    return module


def random_batch(answer: Answer) -> tuple[Tensor, Tensor]:
    """Return token ids, and others as labels."""
    sizes = answer.state.model
    assert sizes is not None
    shape = (answer.plan.rows_of_step, sizes.sequence)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(sizes.vocab, shape, generator=generator)
    labels = torch.randint(sizes.vocab, shape, generator=generator)
    return ids, labels


def _certify_full(answer: Answer, continue_proof: Callable[[], None]) -> Certificate:
    """Certify the step of a full model."""
    model = answer.model
    plan = answer.plan
    module = module_with_values(model)
    sample = torch.zeros(1, *model.batch[0].shape[1:], dtype=torch.int64)
    program = model.recomputed(module, plan.recompute)
    ((_, layer_plan),) = split_model(
        program, plan, sample=(sample,), blocks=model.blocks, check=False, styles=model.styles
    )
    if layer_plan is None:
        function, params, _ = functionalize(program)
    else:
        function, params, _ = layer_plan.functionalize(program)
    within = None if layer_plan is None else layer_plan.rules
    # In stage 3 all that these rules leave is flattened along the axes of ZeRO by `certify`.
    rules = param_rules(replace(plan, zero_stage=0), plan.zero_axes, within)
    if model.layouts:
        rules = rules_with(model.layouts, rules, params)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        continue_proof()
        output, _ = model.call(function, batch, params, {})
        return model.loss_of(output, batch, layer_plan)

    options = step_options(plan)
    replica_axis = ("replica",) if plan.replicas > 1 else ()
    return certify(
        loss_fn,
        params,
        random_batch(answer),
        answer.state.new_optimizer(),
        make_mesh(plan.axes, runtime="virtual"),
        axis=plan.zero_axes,
        unit=f"{model.blocks}.*",
        within=rules,
        batch_spec=P((*replica_axis, *plan.zero_axes)),
        stages=[plan.zero_stage],
        steps=STEPS,
        **options,
    )


def _certify_stages(answer: Answer, continue_proof: Callable[[], None]) -> Certificate:
    """Certify the step of stages, by the plugin that runs them."""
    model = answer.model
    sample = torch.zeros(1, *model.batch[0].shape[1:], dtype=torch.int64)
    plugin = HybridParallelPlugin(answer.plan, blocks=model.blocks, sample=sample)

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        continue_proof()
        return nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten())

    batch = random_batch(answer)
    return certify_module(
        partial(module_with_values, model),
        [batch] * STEPS,
        make_mesh(answer.plan.axes, runtime="virtual"),
        loss=loss,
        plugin=plugin,
    )


def verdict_of(certificate: Certificate, blocks: str) -> dict[str, Any]:
    """Return the verdict of all leaves, a sentence, and a row for each leaf of all layers."""
    worst = dict[str, CertificateRow]()
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
