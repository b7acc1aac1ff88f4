"""Parameters that are born sharded: equal bits to those of the plain function, and never all of them at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import init

import fshard as fs
from fshard import P
from fshard.transforms.history import Operation

SIDE = 24
LEAF = SIDE * SIDE * 4


def fitting(w):
    while (x := torch.randn(w.shape)).sum() < 0:
        pass
    return x


KINDS = {
    "uniform": init.uniform_,
    "normal": init.normal_,
    "trunc_normal": init.trunc_normal_,
    "small trunc_normal": lambda w: init.trunc_normal_(w, std=0.02),
    "tail of trunc_normal": lambda w: init.trunc_normal_(w, a=1.0, b=3.0),
    "constant": lambda w: init.constant_(w, 0.5),
    "ones": init.ones_,
    "zeros": init.zeros_,
    "eye": init.eye_,
    "dirac": lambda w: init.dirac_(w.unsqueeze(-1)),
    "xavier_uniform": init.xavier_uniform_,
    "xavier_normal": init.xavier_normal_,
    "kaiming_uniform": init.kaiming_uniform_,
    "kaiming_normal": init.kaiming_normal_,
    "orthogonal": init.orthogonal_,
    "sparse": lambda w: init.sparse_(w, 0.3),
}
FURTHER = {
    "nothing": lambda w: w,
    "scaled": lambda w: w.mul_(0.5),
    "padded": lambda w: w[3].zero_(),
    "its own mean": lambda w: w.sub_(w.mean().item()),
    "cut where it is large": lambda w: w[w > 1].clone() if len(w[w > 1]) else w,
    "drawn until it fits": lambda w: fitting(w) + w,
}


@pytest.mark.filterwarnings("ignore:mean is more than 2 std")
def test_every_function_of_torch_nn_init_is_here():
    functions = {name.removesuffix("_") for name in vars(init) if name.endswith("_") and not name.startswith("_")}
    assert functions == {name.rpartition(" ")[2] for name in KINDS}


def made_early(made):
    """Choose those of which others are made, once all are there."""
    return made[::3]


def making(kinds, again, generator):
    """Return a function that makes a leaf for each kind, and goes over all of them a second time, as modules do."""

    def init_fn():
        own = torch.Generator().manual_seed(5) if generator else None
        made = [KINDS[kind](torch.empty(SIDE, SIDE)) for kind, _ in kinds]
        early = [w * 2 for w in made_early(made)]
        if again is not None:
            for w in made:
                KINDS[again](w)
        made = [FURTHER[further](w) for w, (_, further) in zip(made, kinds, strict=True)]
        return [*made, *early, torch.randn(3, generator=own), torch.rand(2), made[0]]

    return init_fn


def plainly(init_fn, seed):
    torch.manual_seed(seed)
    made = init_fn()
    return made, torch.get_rng_state()


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.sampled_from([*KINDS]), st.sampled_from([*FURTHER])), min_size=1, max_size=22),
    again=st.sampled_from([None, "normal", "trunc_normal", "kaiming_uniform"]),
    generator=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_mix_of_functions_gives_the_bits_of_the_plain_run(kinds, again, generator, seed):
    init_fn, mesh, most = making(kinds, again, generator), fs.make_mesh({"data": 2}), 0
    expected, after = plainly(init_fn, seed)
    torch.manual_seed(seed)
    repeat = Operation.repeat

    def watched(self, real):
        nonlocal most
        out = repeat(self, real)
        most = max(most, sum(memory.nbytes() for memory in real.values()))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Operation, "repeat", watched)
        own = fs.init_params(init_fn, fs.fsdp("data"), mesh=mesh)
    assert torch.get_rng_state().equal(after)
    assert own[-1] is own[0]
    for found, w in zip(own, expected, strict=True):
        assert fs.unshard(found).equal(w)
    assert most <= (len(made_early(kinds)) + 6) * LEAF  # what others are made of, and what one function takes


MODULES = {
    "Linear": lambda: nn.Linear(5, 3),
    "Conv2d": lambda: nn.Conv2d(2, 3, 3),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(2, 3, 3),
    "Bilinear": lambda: nn.Bilinear(2, 3, 4),
    "Embedding": lambda: nn.Embedding(5, 3, padding_idx=0),
    "EmbeddingBag": lambda: nn.EmbeddingBag(5, 3),
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "Transformer": lambda: nn.Transformer(8, 2, 1, 2, 16, batch_first=True),
    "LSTM": lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
    "GRU": lambda: nn.GRU(3, 4),
    "LayerNorm": lambda: nn.LayerNorm(5),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "BatchNorm2d": lambda: nn.BatchNorm2d(4),
    "PReLU": lambda: nn.PReLU(3),
    "AdaptiveLogSoftmaxWithLoss": lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 10, [3, 5], div_value=2.0),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 4)),
}


def initialised(module):
    """Do what models do once they are built."""
    for name, w in module.named_parameters():
        if w.ndim > 1 and "original" not in name:
            init.trunc_normal_(w, std=0.02)
    return dict(module.named_parameters())


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("after", [lambda module: dict(module.named_parameters()), initialised], ids=["built", "again"])
def test_parameters_of_modules_are_those_of_the_plain_constructor(kind, after):
    own = fs.init_params(lambda: after(MODULES[kind]()), fs.fsdp("data"), mesh=fs.make_mesh({"data": 2}), seed=3)
    expected, _ = plainly(lambda: after(MODULES[kind]()), 3)
    assert own.keys() == expected.keys()
    assert all(fs.unshard(own[name]).equal(w.detach()) for name, w in expected.items())


def test_what_cannot_be_run_without_memory_and_what_comes_from_outside_is_refused():
    mesh, outside = fs.make_mesh({"data": 2}), torch.ones(2)
    with pytest.raises(fs.LayoutError, match="init_params: the function cannot be run without memory"):
        fs.init_params(lambda: torch.from_numpy(torch.ones(2).numpy()), P(), mesh=mesh)
    with pytest.raises(fs.LayoutError, match="init_params: a was not made by the function"):
        fs.init_params(lambda: {"a": outside}, P(), mesh=mesh)
    with pytest.raises(
        fs.LayoutError, match=r"changes a tensor that it has not made \(aten.mul_.Tensor\). Let it change a clone"
    ):
        fs.init_params(lambda: outside.mul_(2.0), P(), mesh=mesh)
    assert fs.unshard(fs.init_params(lambda: outside.clone().mul_(2.0), P(), mesh=mesh)).tolist() == [2.0, 2.0]
    assert outside.tolist() == [1.0, 1.0]
