"""Models on sharded sequences train as on one device: tokens at the entry, means over tokens,
Megatron's collectives.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import fshard as fs
from fshard import P
from tests.tensor.attention_oracle import serial

VOCABULARY, WIDTH, HEADS, TOKENS = 11, 8, 4, 16


@given(st.integers(1, 8), st.integers(1, 3), st.integers(0, 2))
def test_zigzag_gives_each_device_an_early_and_a_late_chunk(n, chunk, dim):
    x = (
        torch.arange(2 * n * chunk)
        .reshape([-1 if place == dim else 1 for place in range(3)])
        .expand(2 * n * chunk, 2 * n * chunk, 2 * n * chunk)
    )
    chunks = x.chunk(2 * n, dim)
    actual = fs.tensor.zigzag(x, n, dim)
    for index, own in enumerate(actual.chunk(n, dim)):
        assert torch.equal(own, torch.cat([chunks[index], chunks[2 * n - 1 - index]], dim))
    assert torch.equal(fs.tensor.zigzag(actual, n, dim - 3, inverse=True), x)


@pytest.mark.parametrize("how", ["ring", "zigzag"])
def test_shard_sequence_gives_tokens_and_positions(how):
    batch = {
        "ids": torch.arange(24).reshape(2, 12),
        "mask": torch.arange(24).reshape(2, 12) % 5 > 0,
    }
    rows = fs.run(
        lambda: fs.tensor.shard_sequence(batch, "seq", how=how), mesh=fs.make_mesh({"seq": 3})
    )
    assert sorted(torch.cat([positions for _, positions in rows]).tolist()) == list(range(12))
    for local, positions in rows:
        assert all(torch.equal(local[name], batch[name][:, positions]) for name in batch)
    assert rows[0][1].tolist() == ([0, 1, 10, 11] if how == "zigzag" else [0, 1, 2, 3])


def test_shard_sequence_error_names_leaves_and_sizes():
    batch = {"ids": torch.zeros(2, 10), "mask": torch.zeros(2, 12)}
    with pytest.raises(
        ValueError, match=r"multiple of 6; got .*ids.* 10 \(use 6 or 12\), .*mask.* 12"
    ) as error:
        fs.run(
            lambda: fs.tensor.shard_sequence(batch, "seq", how="zigzag"),
            mesh=fs.make_mesh({"seq": 3}),
        )
    assert "equally many tokens" in str(error.value)
    with pytest.raises(ValueError, match="multiple of 4; got 3. Use 4"):
        fs.tensor.zigzag(torch.zeros(3), 2, 0)


def test_token_mean_divides_by_the_global_count():
    mesh = fs.make_mesh({"data": 2, "seq": 2})
    draw = torch.Generator().manual_seed(0)
    loss = torch.randn(4, 6, generator=draw, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=draw) > 0.6
    loss[~mask] = torch.nan  # the loss of padding need not be finite

    def run(local):
        f = fs.shard_map(local, mesh=mesh, in_specs=P("data", "seq"), out_specs=P())
        return torch.func.grad_and_value(lambda x: fs.unshard(f(x, mask)))(loss)

    gradient, value = run(lambda x, mask: fs.tensor.token_mean(x, mask, ("data", "seq")))
    torch.testing.assert_close(value, loss[mask].mean())
    torch.testing.assert_close(gradient, mask / mask.sum().double())
    mean_of_means = run(lambda x, mask: fs.pmean(x[mask].mean(), ("data", "seq")))[1]
    assert not torch.isclose(mean_of_means, value)
    assert run(lambda x, mask: fs.tensor.token_mean(x.bfloat16(), None, ("data", "seq")))[1].isnan()
    assert run(lambda x, mask: fs.tensor.token_mean(x, mask & False, ("data", "seq")))[1] == 0


def init():
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        "place": (TOKENS, WIDTH),
        "q": (WIDTH, WIDTH),
        "kv": (WIDTH, WIDTH),
    }
    shapes |= {"out": (WIDTH, WIDTH), "up": (WIDTH, 16), "down": (16, WIDTH)}
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64) / 3
        for name, shape in shapes.items()
    }


def losses(params, batch, positions, attend):
    """Return the loss of each token of a small GPT with two kv heads."""
    x = params["embed"][batch["ids"]] + params["place"][positions]
    q, kv = (
        (x @ params[name]).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        for name in ("q", "kv")
    )
    k, v = kv.chunk(2, 1)
    x = x + attend(q, k, v, batch["documents"]).transpose(1, 2).flatten(2) @ params["out"]
    x = x + F.gelu(x @ params["up"]) @ params["down"]
    logits = x @ params["embed"].T
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")


def alone(params, batch):
    attend = lambda q, k, v, ids: serial(q, k, v, causal=True, document_ids=ids)  # noqa: E731
    return losses(params, batch, torch.arange(TOKENS), attend)[batch["mask"]].mean()


def on_mesh(how):
    def loss_fn(params, batch):
        batch, positions = fs.tensor.shard_sequence(batch, "seq", how=how)

        def attend(q, k, v, ids):
            return fs.tensor.attention(q, k, v, "seq", how, causal=True, document_ids=ids)

        return fs.tensor.token_mean(
            losses(params, batch, positions, attend), batch["mask"], ("data", "seq")
        )

    return loss_fn


def batches(count):
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (4, TOKENS + 1), generator=draw)
        documents = torch.randint(3, (4, TOKENS), generator=draw).sort(1)[0]
        mask = torch.rand(4, TOKENS, generator=draw) > 0.4
        yield {"ids": ids[:, :-1], "labels": ids[:, 1:], "documents": documents, "mask": mask}


@pytest.mark.parametrize(
    ("how", "stage"), [("gather", 0), ("ulysses", 1), ("ring", 2), ("zigzag", 3), ("rsa", 3)]
)
def test_ten_steps_equal_those_of_one_device(how, stage):
    mesh = fs.make_mesh({"data": 2, "seq": 2})
    want = {name: x.requires_grad_() for name, x in init().items()}
    opt = fs.optim.adamw(1e-2)
    optimizer = torch.optim.AdamW(want.values(), lr=1e-2)
    params = fs.shard_params(init(), fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    sharded = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)
    state = sharded.init(params)
    step = fs.train_step(on_mesh(how), sharded, mesh=mesh, batch=P("data"))
    for batch in batches(10):
        optimizer.zero_grad()
        loss = alone(want, batch)
        loss.backward()
        optimizer.step()
        params, state, metrics = step(params, state, batch)
        torch.testing.assert_close(metrics["loss"].cpu(), loss.detach().to(metrics["loss"].dtype))
    for name, x in want.items():
        torch.testing.assert_close(fs.unshard(params[name]), x.detach(), rtol=1e-6, atol=1e-8)
