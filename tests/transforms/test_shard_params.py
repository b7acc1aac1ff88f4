"""`shard_params` gives layouts and units by rules of every kind; `init_params` shards values.

The oracle of `init_params` is the plain function from the same seed.
"""

import pytest
import torch
from torch import nn
from torch.nn import init

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten


def layouts_of(params, rules):
    """Return the type and the unit of each leaf."""
    mesh = fs.make_mesh({"data": 2})
    leaves, _ = flatten(fs.shard_params(params, rules, mesh=mesh))
    return [(str(fs.typeof(x)), x.layout.unit) for x in leaves]


def blocks(n):
    return [{"w": torch.ones(4, 4)} for _ in range(n)]


W = "f32[4, 4]"
FLAT = f"{W}{{flat:data}}"
TREE = {"blocks": blocks(2), "head": torch.ones(4, 4)}
MERGED = [(FLAT, "blocks[0]"), (FLAT, "blocks[0]"), (W, "head")]


@pytest.mark.parametrize(
    "rules",
    [
        {"blocks": fs.fsdp("data"), "head": P()},
        {"blocks[*].w": fs.fsdp("data"), "**": P()},
        lambda path, leaf: P() if path == "head" else fs.fsdp("data"),
    ],
    ids=["tree", "patterns", "function"],
)
def test_fsdp_combines_with_other_rules(rules):
    assert layouts_of(TREE, rules) == MERGED


def test_units_by_size_of_two_rules_differ():
    rules = {"blocks": fs.fsdp("data", unit=1), "head": fs.fsdp("data", unit=2)}
    assert layouts_of(TREE, rules) == [
        (FLAT, "unit 0"),
        (FLAT, "unit 1"),
        (FLAT, "unit 0 of rule 1"),
    ]


SMALL_BLOCK = {"w": torch.ones(4, 4), "b": torch.ones(4)}
SMALL = {
    "emb": torch.ones(4, 4),
    "blocks": [SMALL_BLOCK, {name: x.clone() for name, x in SMALL_BLOCK.items()}],
}
MESH = fs.make_mesh({"data": 2, "model": 2})


def specs(rules, tree=SMALL):
    params = fs.shard_params(tree, rules, mesh=MESH)
    return fs.mesh.layout.map_leaves(lambda x: x.spec, params)


def spec_by_name(path, x):
    name = path.rsplit(".")[-1]
    return {"emb": P("model"), "w": P(None, "model")}.get(name, P())


BLOCK = {"w": P(None, "model"), "b": P()}
EXPECTED = {"emb": P("model"), "blocks": [BLOCK] * 2}
BLOCKS_ONLY = {"emb": P(), "blocks": [BLOCK] * 2}
REPLICATED = {"emb": P(), "blocks": [{"w": P(), "b": P()}] * 2}
FLAT_SPEC = P.flat("data", "model")
ALL_FLAT = {"emb": FLAT_SPEC, "blocks": [{"w": FLAT_SPEC, "b": FLAT_SPEC}] * 2}
IN_TURNS = {"blocks[*].w": P(None, "model"), "blocks.**": P(), "**": P("model")}
RULES = {
    "a tree": (EXPECTED, EXPECTED),
    "patterns": ({"emb": P("model"), "blocks[*].w": P(None, "model"), "**.b": P()}, EXPECTED),
    "the rest": ({"emb": P("model"), "blocks[*].w": P(None, "model"), "**": P()}, EXPECTED),
    "a function": (spec_by_name, EXPECTED),
    "one": (P(), REPLICATED),
    "fsdp": (fs.fsdp(("data", "model")), ALL_FLAT),
    "two stars first": ({"**": P(), "**.w": P(None, "model")}, BLOCKS_ONLY),
    "two stars in turns": (IN_TURNS, EXPECTED),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_every_kind_give_layouts(name):
    rules, expected = RULES[name]
    assert specs(rules) == expected


def test_units_may_be_blocks_sizes_or_patterns():
    def units(unit):
        return [unit for _, unit in layouts_of(SMALL, fs.fsdp("data", unit=unit))]

    # Of blocks[0].b, blocks[0].w, blocks[1].b, blocks[1].w, emb
    assert units(None) == ["blocks[0]"] * 5
    assert units("blocks[*]") == ["blocks[0]", "blocks[0]", "blocks[1]", "blocks[1]", "emb"]
    assert units(80) == ["unit 0", "unit 0", "unit 1", "unit 1", "unit 2"]
    assert units("blocks") == ["blocks"] * 4 + ["emb"]
    several = ["blocks", "blocks[1]", "*[*].b"]
    assert units(several) == ["blocks[0].b", "blocks", "blocks[1].b", "blocks[1]", "emb"]


ODD = {"a": torch.ones(3, 2), **dict.fromkeys("bcef", torch.ones(2)), "d": object()}
DISAGREEING = {"emb": P("model"), "blocks[*].w": P(), "blocks[0].w": P("model"), "head.*": P()}
UNSUITED = {
    "a": P(None, None, "data"),
    "b": P("foo"),
    "d": P(),
    "e": P(unreduced="data"),
    "**": P(),
}


def frozen_of_no_leaf():
    fs.shard_params({"a": torch.ones(2)}, P(), mesh=MESH, frozen="g")


def init_params_without_a_rule():
    def init_fn():
        return {"a": torch.ones(2), "b": torch.ones(2)}

    fs.nn.init_params(init_fn, {"a": P()}, mesh=MESH)


def unit_of_no_leaf():
    layouts_of(SMALL, fs.fsdp("data", unit=["block", "emb", "w"]))


def unit_of_a_rule_of_no_leaf():
    layouts_of(TREE, {"blocks": P(), "head": fs.fsdp("data", unit="zz")})


def axis_of_a_rule_that_does_not_exist():
    layouts_of(TREE, {"blocks": fs.fsdp("nope"), "head": P()})


MISUSE = {
    "incomplete rules": (
        lambda: specs(DISAGREEING),
        r'no leaf is for the rule "head.\*"; no rule is for blocks\[0\].b; '
        r'"blocks\[\*\].w" \(P\(\)\) and "blocks\[0\].w" \(P\("model"\)\) disagree about '
        r"blocks\[0\].w; no rule is for blocks\[1\].b. The leaves are blocks\[0\].b, .*, emb; "
        r'"\*\*": P\(\) replicates what no other rule is for.',
    ),
    "axes": (
        lambda: specs({"emb": P("foo"), "blocks": P("bar")}),
        r"(?s)blocks\[0\].b, blocks\[0\].w, blocks\[1\].b, blocks\[1\].w: "
        r'.*has no axis "bar".*emb: .*has no axis "foo"',
    ),
    "leaves": (
        lambda: specs(UNSUITED, ODD),
        r"(?s)shard_params: \n *a: .*\n *b: .*\n *d: .*\n *e: ",
    ),
    "two stars": (
        lambda: specs({"**.w": P("model"), "blocks.**": P(), "**": P()}),
        "disagree about",
    ),
    "unreduced": (
        lambda: specs(P(unreduced="data")),
        r'P\(unreduced="data"\) is a sum that is not made yet',
    ),
    "frozen": (frozen_of_no_leaf, 'frozen: no leaf is for "g"'),
    "no rule": (init_params_without_a_rule, "no rule is for b"),
    "units": (
        unit_of_no_leaf,
        r'no leaf is in a unit "block" or "w"\. The leaves are blocks\[0\]\.b, ',
    ),
    "a unit of a rule": (
        unit_of_a_rule_of_no_leaf,
        'fsdp: no leaf is in a unit "zz". The leaves are head; a pattern begins where',
    ),
    "an axis of a rule": (
        axis_of_a_rule_that_does_not_exist,
        r"shard_params: blocks\[0\].w, blocks\[1\].w: "
        r'Layout with P.flat\("nope"\): Mesh.* has no axis "nope".',
    ),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_of_rules_raises_all(name):
    call, words = MISUSE[name]
    with pytest.raises((fs.errors.FshardError, ValueError), match=words):
        call()


def test_default_unit_is_a_repeated_block(monkeypatch):
    monkeypatch.setattr("fshard.transforms.shard_params.MERGED_BYTES", 0)

    def units(params):
        return [unit for _, unit in layouts_of(params, fs.fsdp("data"))]

    emb = torch.ones(4, 4)
    head = torch.ones(4)
    of_three = ["blocks[0]", "blocks[1]", "blocks[2]", "emb", "head"]
    assert units({"emb": emb, "blocks": blocks(3), "head": head}) == of_three
    assert units((emb, blocks(3), head)) == ["0", "1[0]", "1[1]", "1[2]", "2"]
    assert units((blocks(2), blocks(3))) == ["0[0]", "0[1]", "1[0]", "1[1]", "1[2]"]
    assert units({"blocks": blocks(1)}) == ["blocks[0]"]

    # Blocks within blocks are no units.
    nested = {"blocks": [{"mlp": blocks(2)}, {"mlp": blocks(2)}]}
    assert units(nested) == ["blocks[0]"] * 2 + ["blocks[1]"] * 2

    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    _, params, _ = fs.functionalize(nn.Sequential(nn.Embedding(4, 4), layers))
    assert units(params) == ["0", "1[0]", "1[0]", "1[1]", "1[1]"]


def test_small_default_units_are_merged_with_the_next_ones():
    """Up to 1 MiB; a larger unit stays apart, and so do small ones on its two sides."""
    kib = 256  # elements
    sizes = {"a": 600, "b": 400, "c": 24, "d": 1, "e": 2000, "f": 1}
    params = {name: torch.empty(size * kib, device="meta") for name, size in sizes.items()}
    mesh = fs.make_mesh({"data": 2}, runtime="abstract")

    merged = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    apart = fs.shard_params(params, fs.fsdp("data", unit=["*"]), mesh=mesh)

    units = {name: x.layout.unit for name, x in merged.items()}
    assert units == {"a": "a", "b": "a", "c": "a", "d": "d", "e": "e", "f": "f"}
    assert all(x.layout.unit == name for name, x in apart.items())


# -- init_params -----------------------------------------------------------------------------------

MODULES = {
    "Linear": lambda: nn.Linear(5, 3),
    "Embedding": lambda: nn.Embedding(5, 3, padding_idx=0),
    "Transformer": lambda: nn.Transformer(8, 2, 1, 2, 16, batch_first=True),
    "LSTM": lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
}


def initialised(make):
    """Make a module and overwrite its weights, as models do."""
    params = dict(make().named_parameters())
    for w in params.values():
        if w.ndim > 1:
            init.trunc_normal_(w, std=0.02)
    return params


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("kind", MODULES)
def test_init_params_equals_the_plain_function(kind):
    def init_fn():
        return initialised(MODULES[kind])

    mesh = fs.make_mesh({"data": 2})
    params = fs.nn.init_params(init_fn, fs.fsdp("data"), mesh=mesh, seed=3)

    torch.manual_seed(3)
    expected = init_fn()
    assert params.keys() == expected.keys()
    for name, w in expected.items():
        assert torch.equal(fs.unshard(params[name]), w)


def test_init_params_with_seed_restores_the_generator():
    mesh = fs.make_mesh({"data": 2})
    before = torch.get_rng_state()
    with_seed = fs.nn.init_params(lambda: torch.randn(4), P(), mesh=mesh, seed=3)
    assert torch.equal(torch.get_rng_state(), before)

    torch.manual_seed(3)
    without_seed = fs.nn.init_params(lambda: torch.randn(4), P(), mesh=mesh)
    assert torch.equal(fs.unshard(with_seed), fs.unshard(without_seed))
    assert not torch.equal(torch.get_rng_state(), before)


def test_init_params_keeps_ties_and_frozen_leaves():
    def init_fn():
        w = torch.randn(3, 3)
        return {"first": w, "last": w, "fixed": torch.randn(2)}

    mesh = fs.make_mesh({"data": 2})
    params = fs.nn.init_params(init_fn, fs.fsdp("data"), mesh=mesh, frozen="fixed")

    assert params["first"] is params["last"]
    assert params["fixed"].layout.frozen


def test_init_params_on_abstract_mesh_takes_no_memory():
    mesh = fs.make_mesh({"data": 1024}, runtime="abstract")
    own = fs.nn.init_params(lambda: torch.randn(1 << 20, 1 << 20), fs.fsdp("data"), mesh=mesh)
    assert own.shape == (1 << 20, 1 << 20) and own.shards[0].is_meta
