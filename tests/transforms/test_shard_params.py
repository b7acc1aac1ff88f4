"""`shard_params`: rules of every kind, rules among rules, and units. `init_params`: the values of the plain function, sharded."""

import pytest
import torch
from torch import nn
from torch.nn import init

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten


def lying(params, rules):
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
    assert lying(TREE, rules) == MERGED


def test_units_by_size_of_two_rules_differ():
    rules = {"blocks": fs.fsdp("data", unit=1), "head": fs.fsdp("data", unit=2)}
    assert lying(TREE, rules) == [(FLAT, "unit 0"), (FLAT, "unit 1"), (FLAT, "unit 0 of rule 1")]


SMALL = {
    "emb": torch.ones(4, 4),
    "blocks": [{"w": torch.ones(4, 4), "b": torch.ones(4)} for _ in range(2)],
}
MESH = fs.make_mesh({"data": 2, "model": 2})


def specs(rules, tree=SMALL):
    return fs.mesh.layout.map_leaves(lambda x: x.spec, fs.shard_params(tree, rules, mesh=MESH))


BLOCK = {"w": P(None, "model"), "b": P()}
EXPECTED = {"emb": P("model"), "blocks": [BLOCK] * 2}
RULES = {
    "a tree": (EXPECTED, EXPECTED),
    "patterns": ({"emb": P("model"), "blocks[*].w": P(None, "model"), "**.b": P()}, EXPECTED),
    "the rest": ({"emb": P("model"), "blocks[*].w": P(None, "model"), "**": P()}, EXPECTED),
    "a function": (
        lambda path, x: {"emb": P("model"), "w": P(None, "model")}.get(path.rsplit(".")[-1], P()),
        EXPECTED,
    ),
    "one": (P(), {"emb": P(), "blocks": [{"w": P(), "b": P()}] * 2}),
    "fsdp": (
        fs.fsdp(("data", "model")),
        {
            "emb": P.flat("data", "model"),
            "blocks": [dict.fromkeys("wb", P.flat("data", "model"))] * 2,
        },
    ),
    "two stars first": ({"**": P(), "**.w": P(None, "model")}, {"emb": P(), "blocks": [BLOCK] * 2}),
    "two stars in turns": (
        {"blocks[*].w": P(None, "model"), "blocks.**": P(), "**": P("model")},
        {"emb": P("model"), "blocks": [BLOCK] * 2},
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_every_kind_give_layouts(name):
    rules, expected = RULES[name]
    assert specs(rules) == expected


def test_units_may_be_blocks_sizes_or_patterns():
    def units(unit):
        return [unit for _, unit in lying(SMALL, fs.fsdp("data", unit=unit))]

    assert units(None) == ["blocks[0]"] * 5
    assert units("blocks[*]") == ["blocks[0]", "blocks[0]", "blocks[1]", "blocks[1]", "emb"]
    assert units(80) == ["unit 0", "unit 0", "unit 1", "unit 1", "unit 2"]
    assert units("blocks") == ["blocks"] * 4 + ["emb"]
    assert units(["blocks", "blocks[1]", "*[*].b"]) == [
        "blocks[0].b",
        "blocks",
        "blocks[1].b",
        "blocks[1]",
        "emb",
    ]


ODD = {"a": torch.ones(3, 2), **dict.fromkeys("bcef", torch.ones(2)), "d": object()}
MISUSE = {
    "incomplete rules": (
        lambda: specs(
            {"emb": P("model"), "blocks[*].w": P(), "blocks[0].w": P("model"), "head.*": P()}
        ),
        r'no leaf is for the rule "head.\*"; no rule is for blocks\[0\].b; "blocks\[\*\].w" \(P\(\)\) and '
        r'"blocks\[0\].w" \(P\("model"\)\) disagree about blocks\[0\].w; no rule is for blocks\[1\].b. The leaves are '
        r'blocks\[0\].b, .*, emb; "\*\*": P\(\) replicates what no other rule is for.',
    ),
    "axes": (
        lambda: specs({"emb": P("foo"), "blocks": P("bar")}),
        r'(?s)blocks\[0\].b, blocks\[0\].w, blocks\[1\].b, blocks\[1\].w: .*has no axis "bar".*emb: .*has no axis "foo"',
    ),
    "leaves": (
        lambda: specs(
            {
                "a": P(None, None, "data"),
                "b": P("foo"),
                "d": P(),
                "e": P(unreduced="data"),
                "**": P(),
            },
            ODD,
        ),
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
    "frozen": (
        lambda: fs.shard_params({"a": torch.ones(2)}, P(), mesh=MESH, frozen="g"),
        'frozen: no leaf is for "g"',
    ),
    "no rule": (
        lambda: fs.nn.init_params(
            lambda: {"a": torch.ones(2), "b": torch.ones(2)}, {"a": P()}, mesh=MESH
        ),
        "no rule is for b",
    ),
    "units": (
        lambda: lying(SMALL, fs.fsdp("data", unit=["block", "emb", "w"])),
        r'no leaf is in a unit "block" or "w"\. The leaves are blocks\[0\]\.b, ',
    ),
    "a unit of a rule": (
        lambda: lying(TREE, {"blocks": P(), "head": fs.fsdp("data", unit="zz")}),
        'fsdp: no leaf is in a unit "zz". The leaves are head; a pattern begins where',
    ),
    "an axis of a rule": (
        lambda: lying(TREE, {"blocks": fs.fsdp("nope"), "head": P()}),
        r'shard_params: blocks\[0\].w, blocks\[1\].w: Layout with P.flat\("nope"\): Mesh.* has no axis "nope".',
    ),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_of_rules_raises_all(name):
    call, words = MISUSE[name]
    with pytest.raises((fs.errors.FshardError, ValueError), match=words):
        call()


def test_default_unit_is_a_repeated_block(monkeypatch):
    def units(params):
        monkeypatch.setattr("fshard.transforms.shard_params.MERGED_BYTES", 0)
        return [unit for _, unit in lying(params, fs.fsdp("data"))]

    emb = torch.ones(4, 4)
    head = torch.ones(4)
    assert units({"emb": emb, "blocks": blocks(3), "head": head}) == [
        "blocks[0]",
        "blocks[1]",
        "blocks[2]",
        "emb",
        "head",
    ]
    assert units((emb, blocks(3), head)) == ["0", "1[0]", "1[1]", "1[2]", "2"]
    assert units((blocks(2), blocks(3))) == ["0[0]", "0[1]", "1[0]", "1[1]", "1[2]"]
    model = torch.nn.Sequential(
        torch.nn.Embedding(4, 4), torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(2)])
    )
    assert units(fs.functionalize(model)[1]) == ["0", "1[0]", "1[0]", "1[1]", "1[1]"]
    assert (
        units({"blocks": [{"mlp": blocks(2)}, {"mlp": blocks(2)}]})
        == ["blocks[0]"] * 2 + ["blocks[1]"] * 2
    )
    assert units({"blocks": blocks(1)}) == ["blocks[0]"]


def test_small_default_units_are_merged_with_the_next_ones():
    """Up to 1 MiB; a larger unit stays apart, and so do small ones on its two sides."""
    kib = 256  # elements
    sizes = {"a": 600, "b": 400, "c": 24, "d": 1, "e": 2000, "f": 1}
    params = {name: torch.empty(size * kib, device="meta") for name, size in sizes.items()}
    mesh = fs.make_mesh({"data": 2}, runtime="abstract")
    leaves = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    assert {name: x.layout.unit for name, x in leaves.items()} == {
        **dict.fromkeys("abc", "a"),
        "d": "d",
        "e": "e",
        "f": "f",
    }
    apart = fs.shard_params(params, fs.fsdp("data", unit=["*"]), mesh=mesh)
    assert all(x.layout.unit == name for name, x in apart.items())


# -- init_params ------------------------------------------------------------------------------------------------------

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

    own = fs.nn.init_params(init_fn, fs.fsdp("data"), mesh=fs.make_mesh({"data": 2}), seed=3)
    torch.manual_seed(3)
    expected = init_fn()
    assert own.keys() == expected.keys()
    assert all(torch.equal(fs.unshard(own[name]), w) for name, w in expected.items())


def test_init_params_with_seed_restores_the_generator():
    mesh = fs.make_mesh({"data": 2})
    before = torch.get_rng_state()
    own = fs.nn.init_params(lambda: torch.randn(4), P(), mesh=mesh, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    again = fs.nn.init_params(lambda: torch.randn(4), P(), mesh=mesh)
    assert torch.equal(fs.unshard(own), fs.unshard(again))
    assert not torch.equal(torch.get_rng_state(), before)


def test_init_params_keeps_ties_and_frozen_leaves():
    def init_fn():
        w = torch.randn(3, 3)
        return {"first": w, "last": w, "fixed": torch.randn(2)}

    own = fs.nn.init_params(
        init_fn, fs.fsdp("data"), mesh=fs.make_mesh({"data": 2}), frozen="fixed"
    )
    assert own["first"] is own["last"] and own["fixed"].layout.frozen


def test_init_params_on_abstract_mesh_takes_no_memory():
    mesh = fs.make_mesh({"data": 1024}, runtime="abstract")
    own = fs.nn.init_params(lambda: torch.randn(1 << 20, 1 << 20), fs.fsdp("data"), mesh=mesh)
    assert own.shape == (1 << 20, 1 << 20) and own.shards[0].is_meta
