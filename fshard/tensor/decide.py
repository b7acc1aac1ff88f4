"""Decide which weights of a followed model are sharded, and how.

`follow` has found which weights produce the dim that a linear layer sums over. Such layers are
pairs; here the row layer `down` sums over what the column layers `gate` and `up` produce:

    x ── gate ──┐
                * ── down ──    gate, up by columns: each device has some hidden units
    x ──  up  ──┘               down by rows: it sums over these, then devices add their sums

A weight is in one pair at most: what a row layer produces is a sum, not a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import pairwise
from math import gcd
from typing import cast, get_args

from fshard.tensor.follow import Product
from fshard.tensor.layer_plans import LayerPlan, Style

STYLES = (*get_args(Style), "replicated")
"""The styles that rules may name."""
_LOSSES = {"log_softmax"}
"""Operations that need all words, but send little where these are sharded."""

LayersAndReasons = tuple[dict[str, LayerPlan], dict[str, str]]
"""The plan of each sharded weight, and why others are replicated."""


def decide(
    products: Mapping[str, Product], shapes: Mapping[str, tuple[int, ...]], size: int | None
) -> LayersAndReasons:
    """Decide the plan of each weight, for `size` devices or, if None, for any number."""
    rows = _pair(products, size)
    row_of_column: dict[str, str] = {}
    for name, columns in rows.items():
        row_of_column.update(dict.fromkeys(columns, name))

    layers: dict[str, LayerPlan] = {}
    replicated: dict[str, str] = {}
    for name, product in products.items():
        weight = product.weight
        if name in rows:
            columns = rows[name]
            shared = gcd(*[products[column].length for column in columns])
            why = f"sums over what {', '.join(map(_short, columns))} produce"
            layers[weight] = LayerPlan("row", product.out, (), shared, why)
        elif name in row_of_column:
            parts = _parts(product, shapes[weight][product.out])
            why = f"{_short(row_of_column[name])} sums over what it produces"
            layers[weight] = LayerPlan("column", product.out, parts, product.length, why)
        elif product.kind == "linear":
            words = LayerPlan(
                "words", product.out, (), product.length, "the model returns what it produces"
            )
            if _scores_words(product) and words.fits(size or 1):
                layers[weight] = words
            else:
                replicated[weight] = _why_replicated(product, size)

    _shard_tables(layers, products, shapes)
    return layers, replicated


def _pair(products: Mapping[str, Product], size: int | None) -> dict[str, list[str]]:
    """Return the row layers, each with the column layers that produce what it sums over."""
    rows: dict[str, list[str]] = {}
    for name, product in products.items():
        sources: set[str] = set()
        for origin in product.inputs:
            sources.update([dim_range.weight for dim_range in origin])

        # In each use the layer sums over what weights produce, and no other operation needs all of
        # that. What a row layer produces is not sharded.
        is_always_fed = bool(sources) and all(product.inputs)
        are_columns = not any(source in rows or products[source].needed for source in sources)
        if not (is_always_fed and are_columns):
            continue

        columns = sorted(sources)
        if size is not None:
            columns = [column for column in columns if products[column].length % size == 0]
        if columns:
            rows[name] = columns
    return rows


def _scores_words(product: Product) -> bool:
    """Return True if the model returns what a layer produces, and needs it for the loss at most."""
    return product.is_output and set(product.needed) <= _LOSSES


def _why_replicated(product: Product, size: int | None) -> str:
    if product.length % (size or 1):
        return f"{size} devices do not divide {product.length}"
    if product.needed:
        return f"{product.needed[0]} needs all that it produces"
    return "no layer sums over what it produces"


def _shard_tables(
    layers: dict[str, LayerPlan],
    products: Mapping[str, Product],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Shard the tables of as many words as a layer scores, by words too."""
    scored: dict[int, LayerPlan] = {}
    for weight, layer in layers.items():
        if layer.style == "words":
            scored[shapes[weight][layer.out]] = layer

    for product in products.values():
        weight = product.weight
        if not product.is_looked_up or weight in layers:
            continue
        layer = scored.get(shapes[weight][product.summed])
        if layer is not None:
            layers[weight] = layer._replace(
                out=product.summed, why="a table of the words that the model scores"
            )


def override(
    layers: Mapping[str, LayerPlan],
    replicated: Mapping[str, str],
    products: Mapping[str, Product],
    rules: Mapping[str, str],
) -> LayersAndReasons:
    """Give the weights that patterns match the style that the rules name.

    Raises one error with all wrong rules.
    """
    by_weight: dict[str, Product] = {}
    for product in products.values():
        if product.kind == "linear" or product.weight not in by_weight:
            by_weight[product.weight] = product

    styles = _styles_by_weight(list(by_weight), rules)
    layers = dict(layers)
    replicated = dict(replicated)
    for name, style in styles.items():
        layers.pop(name, None)
        replicated.pop(name, None)
        if style == "replicated":
            replicated[name] = "named by rules"
            continue
        product = by_weight[name]
        is_table = style == "words" and product.kind == "embedding"
        out = product.summed if is_table else product.out
        layers[name] = LayerPlan(cast("Style", style), out, (), product.length, "named by rules")
    return layers, replicated


def _styles_by_weight(weights: list[str], rules: Mapping[str, str]) -> dict[str, str]:
    """Return the style that rules name for each weight that they match."""
    errors: list[str] = []
    styles: dict[str, set[str]] = {}
    for pattern, style in rules.items():
        matched = [name for name in weights if fnmatchcase(name, pattern)]
        if not matched:
            errors.append(f"{pattern!r} matches no weight of a layer")
        if style not in STYLES:
            errors.append(f"{pattern!r} must be one of {', '.join(STYLES)}; got {style!r}")
        for name in matched:
            styles.setdefault(name, set()).add(style)

    for name, names_of_styles in styles.items():
        if len(names_of_styles) > 1:
            errors.append(f"{name} is {' and '.join(sorted(names_of_styles))} by several")
    if errors:
        raise ValueError(
            f"tensor_parallel(rules=): {'; '.join(errors)}. The weights are {', '.join(weights)}."
        )
    return {name: style for name, (style,) in styles.items()}


def _short(name: str) -> str:
    """Return the last two modules of a path.

    >>> _short("model.layers.0.mlp.up.weight")
    'mlp.up'
    """
    return ".".join(name.split(".")[-3:-1]) or name


def _parts(product: Product, length: int) -> tuple[int, ...]:
    """Return the lengths of the parts of a fused weight; () of another one.

    The parts must cover the dim, of this length, without gaps and overlaps.
    """
    ranges = sorted(product.parts)
    if not ranges or ranges[0][0] != 0 or ranges[-1][1] != length:
        return ()
    if any(stop != start for (_, stop), (start, _) in pairwise(ranges)):
        return ()
    return tuple([stop - start for start, stop in ranges])
