"""Boosted models of transformers and diffusers, by their labels alone, equal those of one device
after two steps.
"""

from functools import partial

import pytest
import torch

import fshard as fs
from tests.transforms.module.third_party import reachable

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own
IDS = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(1))
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DECODER = {"vocab_size": 64, "hidden_size": 32, "hidden_dropout": 0.0, "attention_dropout": 0.0}
BOTH = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "dropout": 0.0,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "decoder_start_token_id": 2,
}  # fmt: skip
SOUND = {"num_mel_bins": 3, "max_source_positions": 8, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "Falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {**DECODER, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "BLOOM": ("BloomForCausalLM", "BloomConfig", {**DECODER, "n_layer": 2, "n_head": 4}),
    "BART": ("BartForConditionalGeneration", "BartConfig", BOTH),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {**BOTH, **SOUND}),
}
LEFT = (torch.arange(8) >= torch.tensor([[2], [0], [0], [4]])).long()
MASKS = {"left": LEFT, "right": LEFT.flip(1), "ones": torch.ones_like(LEFT)}
BLOCKS = {"UNet2D": ["down_blocks", "up_blocks"]}


def model_of(name):
    torch.manual_seed(0)
    if name == "UNet2D":
        with reachable("diffusers"):
            from diffusers import UNet2DModel

            sizes = {
                "sample_size": 8,
                "layers_per_block": 1,
                "block_out_channels": (8, 16),
                "norm_num_groups": 4,
            }
            kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
            return UNet2DModel(**sizes, **kinds).double().eval()
    transformers = pytest.importorskip("transformers")
    model, config, sizes = MODELS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**sizes)).double().eval()


def batch_of(name, mask=None):
    if name == "UNet2D":
        return {"sample": X, "timestep": torch.arange(4)}
    inputs = (
        {"input_features": X[:, :, 0].repeat(1, 1, 2)} if name == "Whisper" else {"input_ids": IDS}
    )
    inputs |= {} if mask is None else {"attention_mask": MASKS[mask]}
    return {**inputs, "labels": IDS, "use_cache": False}


def loss_of(output, _):
    return output.loss if hasattr(output, "loss") else output.sample.square().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_serial(name, mask=None):
    model = model_of(name)
    batch = batch_of(name, mask)
    optimizer = sgd(model)
    for _ in range(2):
        loss_of(model(**batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: x.detach() for key, x in model.named_parameters()}


def train(name, make=model_of, mask=None, **options):
    model = make(name)
    batch = batch_of(name, mask)
    booster = fs.Booster(fs.HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(model, sgd(model))
    for _ in range(2):
        if "pipeline" in options:
            booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)
        else:
            booster.backward(loss_of(model(**batch), batch), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return {key: x.detach() for key, x in model.unwrap().named_parameters()}


def assert_equal(devices, name, mask=None):
    expected = train_serial(name, mask)
    for actual in devices:
        torch.testing.assert_close(
            actual, {key: expected[key] for key in actual}, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    "name", ["BART", "UNet2D"]
)  # the others are in the tests below, and in those of plans
def test_models_in_sharded_layers_equal_one_device(name):
    mesh = fs.make_mesh({"data": 1, "model": 2})
    assert_equal(fs.run(lambda: train(name, tensor=2, sample=batch_of(name)), mesh=mesh), name)


@pytest.mark.parametrize(
    ("name", "mask"), [("Falcon", "left"), ("BLOOM", "right"), ("BLOOM", "ones")]
)
def test_lazy_models_are_planned_with_the_values_of_masks(name, mask):
    options = {
        "make": partial(fs.lazy, model_of),
        "mask": mask,
        "tensor": 2,
        "sample": batch_of(name, mask),
    }
    devices = fs.run(lambda: train(name, **options), mesh=fs.make_mesh({"data": 1, "model": 2}))
    assert_equal(devices, name, mask)


@pytest.mark.parametrize("name", ["Whisper", "UNet2D"])
def test_models_in_stages_equal_one_device(name):
    blocks = BLOCKS.get(name, ["model.encoder.layers", "model.decoder.layers"])
    sample = {key: x[:2] if isinstance(x, torch.Tensor) else x for key, x in batch_of(name).items()}
    options = {"pipeline": 2, "microbatches": 2, "blocks": blocks, "sample": sample}
    assert_equal(
        fs.run(lambda: train(name, **options), mesh=fs.make_mesh({"pipe": 2, "data": 1})), name
    )
