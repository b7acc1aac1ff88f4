"""DeepSpeed's configuration becomes a plugin; what no plugin expresses is named.

The oracle is a table of plugins.
"""

import json
import warnings

import pytest

import fshard as fs

ZERO = {
    "no ZeRO": ({}, fs.DDPPlugin()),
    "stage 0": ({"stage": 0}, fs.DDPPlugin()),
    "stage 1": ({"stage": 1}, fs.ZeroPlugin(stage=1)),
    "stage 2": ({"stage": 2, "overlap_comm": True}, fs.ZeroPlugin(stage=2)),
    "stage 3": ({"stage": 3, "stage3_max_live_parameters": 1e9}, fs.FSDPPlugin()),
    "stage 2, old name of offload": (
        {"stage": 2, "cpu_offload": True},
        fs.ZeroPlugin(stage=2, offload="host"),
    ),
    "stage 2, offload": (
        {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        fs.ZeroPlugin(stage=2, offload="host"),
    ),
    "stage 3, offload": (
        {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
        fs.FSDPPlugin(offload="disk"),
    ),
    "bucket, in elements": (
        {"stage": 2, "reduce_bucket_size": 5e8},
        fs.ZeroPlugin(stage=2, options={"bucket": 2_000_000_000}),
    ),
    "values that a trainer fills in": (
        {"stage": 2, "reduce_bucket_size": "auto"},
        fs.ZeroPlugin(stage=2),
    ),
}


@pytest.mark.parametrize(("zero", "plugin"), ZERO.values(), ids=ZERO)
def test_section_of_zero_is_a_plugin(zero, plugin):
    assert fs.parallel({"zero_optimization": zero, "steps_per_print": 10}) == plugin


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_section_of_a_dtype_is_the_precision(name):
    assert fs.parallel({name: {"enabled": True}}) == fs.DDPPlugin(precision=name)
    assert fs.parallel({name: {"enabled": False}}) == fs.DDPPlugin()
    assert fs.parallel({name: {"enabled": "auto"}}) == fs.DDPPlugin()


def test_configuration_is_read_from_a_file(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    plugin = fs.parallel(path, reshard_after_forward=False)
    assert plugin == fs.FSDPPlugin(precision="bf16", reshard_after_forward=False)


ELSEWHERE = {
    "train_batch_size": (64, "batch_size=64 of the loader"),
    "train_micro_batch_size_per_gpu": (4, "4 times the number of devices"),
    "gradient_accumulation_steps": (8, r"booster.no_sync\(\) around all of 8 backwards"),
    "gradient_clipping": (1.0, r"booster.clip_grad_norm\(optimizer, 1.0\)"),
    "optimizer": ({"type": "AdamW", "params": {"lr": 1e-3}}, "an optimizer of torch.optim"),
    "scheduler": ({"type": "WarmupLR"}, "a scheduler of torch"),
    "activation_checkpointing": ({"partition_activations": True}, "fs.remat"),
    "fp16": ({"enabled": True, "initial_scale_power": 8}, "fs.optim.loss_scaled"),
}


@pytest.mark.parametrize("key", ELSEWHERE)
def test_what_no_plugin_expresses_is_named_in_a_warning(key):
    value, text = ELSEWHERE[key]
    with pytest.warns(UserWarning, match=text):
        fs.parallel({"zero_optimization": {"stage": 2}, key: value})


def test_values_that_ask_for_nothing_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.parallel({"gradient_accumulation_steps": 1, "gradient_clipping": 0.0})


INVALID = {
    "unknown section": ({"fp16": {}, "compression_training": {}}, "has no 'compression_training'"),
    "unknown key of ZeRO": (
        {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}},
        "zero_optimization has no 'zero_quantized_gradients'",
    ),
    "stage": ({"zero_optimization": {"stage": 4}}, "stage of zero_optimization must be"),
    "device": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "tpu"}}},
        "device of offload_optimizer must be",
    ),
    "parameters of stage 2": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "offload_param must have stage 3",
    ),
    "both dtypes": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "not both"),
}


@pytest.mark.parametrize(("config", "text"), INVALID.values(), ids=INVALID)
def test_what_has_no_counterpart_raises(config, text):
    with pytest.raises(ValueError, match=text):
        fs.parallel(config)


def test_unknown_field_of_a_plugin_names_the_fields():
    with pytest.raises(TypeError, match=r"FSDPPlugin has no 'verbose'; legal: mesh, axis, .*"):
        fs.FSDPPlugin(verbose=True)
    with pytest.raises(TypeError, match=r"'mixed_precision' \(use precision=\"bf16\"\)"):
        fs.DDPPlugin(mixed_precision="bf16")
