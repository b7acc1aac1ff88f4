"""The models of `examples` train on two devices as on one: equal losses."""

from contextlib import nullcontext

import pytest

from tests.helpers.examples import losses, printed
from tests.transforms.module.third_party import reachable

SMALL = ("--steps", "4", "--batch", "16")


def test_diffusion_on_two_devices_has_the_bits_of_one():
    one = printed("diffusion.py", *SMALL, "--devices", "1")
    two = printed("diffusion.py", *SMALL, "--devices", "2")
    assert losses(two) == losses(one)
    assert one.count("#") == two.count("#") > 0  # what it draws


def test_clip_has_the_negatives_of_all_devices():
    one = [*map(float, losses(printed("clip.py", *SMALL, "--devices", "1")))]
    two = [*map(float, losses(printed("clip.py", *SMALL, "--devices", "2")))]
    assert two == pytest.approx(one, abs=2e-5)
    # Of 16 samples each finds one: chance is log 16, not the log 8 of a device's own.
    assert 2.6 < one[0] < 3.2


@pytest.mark.filterwarnings("ignore")  # of transformers' own
@pytest.mark.parametrize("adapter", ["own", "peft"])
def test_lora_on_two_devices_learns_as_on_one(adapter, tmp_path):
    pytest.importorskip("transformers")
    options = ("--adapter", adapter, *SMALL)
    with reachable("peft") if adapter == "peft" else nullcontext():
        one = printed("lora.py", *options, "--devices", "1")
        two = printed("lora.py", *options, "--devices", "2", "--folder", str(tmp_path / "adapter"))

    assert [*map(float, losses(two))] == pytest.approx([*map(float, losses(one))], abs=2e-4)
    assert "3,328 of 80,448 parameters are trained" in two
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_stages_that_are_unlike_have_the_losses_of_one_device():
    options = ("vision_language.py", *SMALL)
    one = printed(*options, "--stages", "1", "--data", "1")
    two = printed(*options, "--stages", "2", "--data", "1", "--balance", "4,7")
    assert [*map(float, losses(two))] == pytest.approx([*map(float, losses(one))], abs=2e-5)
    assert "layers of the stages: [4, 7]" in two
