"""The names of torch in docs/migrating.md are those of the installed torch; the oracle is the import."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/migrating.md").read_text(encoding="utf-8")
TITLE = "## Torch's DDP, FSDP, ZeroRedundancyOptimizer, pipelining"

NAMES = {
    "ColwiseParallel": "torch.distributed.tensor.parallel",
    "CPUOffload": "torch.distributed.fsdp",
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "DTensor": "torch.distributed.tensor",
    "DistributedDataParallel": "torch.nn.parallel",
    "DistributedSampler": "torch.utils.data",
    "FullyShardedDataParallel": "torch.distributed.fsdp",
    "MixedPrecision": "torch.distributed.fsdp",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "Partial": "torch.distributed.tensor",
    "PrepareModuleInput": "torch.distributed.tensor.parallel",
    "Replicate": "torch.distributed.tensor",
    "RowwiseParallel": "torch.distributed.tensor.parallel",
    "Schedule1F1B": "torch.distributed.pipelining",
    "SequenceParallel": "torch.distributed.tensor.parallel",
    "Shard": "torch.distributed.tensor",
    "ShardingStrategy": "torch.distributed.fsdp",
    "ZeroRedundancyOptimizer": "torch.distributed.optim",
    "clip_grad_norm_": "torch.nn.utils",
    "context_parallel": "torch.distributed.tensor.experimental",
    "distribute_module": "torch.distributed.tensor",
    "distribute_tensor": "torch.distributed.tensor",
    "fully_shard": "torch.distributed.fsdp",
    "get_state_dict": "torch.distributed.checkpoint.state_dict",
    "init_device_mesh": "torch.distributed.device_mesh",
    "loss_parallel": "torch.distributed.tensor.parallel",
    "max_memory_allocated": "torch.cuda",
    "parallelize_module": "torch.distributed.tensor.parallel",
    "set_model_state_dict": "torch.distributed.checkpoint.state_dict",
}
"""The module that each name is imported from."""

MODULES = {"dcp": "torch.distributed.checkpoint", "dist": "torch.distributed", "torch": "torch"}
"""Modules by the name that the page gives them."""

METHODS = {
    "SHARD_GRAD_OP": "ShardingStrategy",
    "redistribute": "DTensor",
    "no_sync": "DistributedDataParallel",
}
"""Attributes of a name above."""

OTHERS = {"loader", "loss", "to_empty", "reset_parameters", "len", "with", "model"}
"""The words of torch's loops, which are no names of its distributed package."""

ARGUMENTS = {
    "DistributedDataParallel": "bucket_cap_mb find_unused_parameters gradient_as_bucket_view "
    "static_graph broadcast_buffers",
    "FullyShardedDataParallel": "sharding_strategy auto_wrap_policy backward_prefetch "
    "forward_prefetch mixed_precision use_orig_params sync_module_states limit_all_gathers "
    "device_id device_mesh param_init_fn",
    "fully_shard": "mp_policy reshard_after_forward offload_policy",
    "MixedPrecisionPolicy": "param_dtype reduce_dtype",
    "CPUOffload": "offload_params",
    "Schedule1F1B": "n_microbatches",
    "context_parallel": "buffers buffer_seq_dims",
    "init_device_mesh": "mesh_dim_names",
    "clip_grad_norm_": "norm_type error_if_nonfinite",
}
"""The arguments that the page names, by what takes them."""

ELSEWHERE = {"mixed_precision_policy", "checkpoint_id", "nprocs"}
"""Arguments of accelerate, and of functions that a test below looks up."""


def codes_of_torch() -> list[str]:
    """Return the code on the left of the table of torch, without other libraries' rows."""
    section = PAGE.partition(TITLE)[2].partition("\n## ")[0]
    others = ("Megatron", "DeepSpeed", "JAX", "spmd_types")
    codes: list[str] = []
    for row in section.splitlines():
        left = row.removeprefix("| ").partition(" | ")[0]
        if left.startswith(others):
            continue
        for part in left.split("; "):
            if not part.startswith(others):
                codes += re.findall(r"`([^`]+)`", part)
    return codes


def found(name: str) -> object:
    return getattr(importlib.import_module(NAMES[name]), name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules
@pytest.mark.parametrize("name", NAMES)
def test_name_of_the_page_is_in_the_installed_torch(name):
    assert re.search(rf"\b{name}\b", PAGE)
    assert found(name) is not None


def test_attributes_of_the_page_are_in_the_installed_torch():
    for attribute, owner in METHODS.items():
        assert hasattr(found(owner), attribute)
    assert hasattr(torch.cuda.memory, "_record_memory_history")
    assert "nprocs" in inspect.signature(torch.multiprocessing.spawn).parameters
    save = importlib.import_module(MODULES["dcp"]).save
    assert "checkpoint_id" in inspect.signature(save).parameters


@pytest.mark.parametrize("owner", ARGUMENTS)
def test_arguments_of_the_page_are_in_the_installed_torch(owner):
    assert {*ARGUMENTS[owner].split()} <= {*inspect.signature(found(owner)).parameters}


def test_code_of_the_table_of_torch_is_among_what_is_looked_up():
    arguments = {name for names in ARGUMENTS.values() for name in names.split()} | ELSEWHERE
    unknown = []
    for code in codes_of_torch():
        words = re.match(r"[\w.]+", code)[0].split(".")
        is_looked_up = words[0] in {*NAMES, *METHODS, *OTHERS} or words[0] in arguments
        if words[0] in MODULES:
            module = importlib.import_module(MODULES[words[0]])
            for word in words[1:]:
                module = getattr(module, word)
            is_looked_up = True
        keywords = {*re.findall(r"(\w+)=", code)}
        if not is_looked_up or not keywords <= {*arguments, "model"}:
            unknown.append(code)
    assert codes_of_torch()
    assert unknown == []


def test_versions_of_the_page_are_those_that_fshard_is_tested_with():
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    section = PAGE.partition("## Versions")[2].partition("\n## ")[0]
    for row in ("torch", "accelerate, transformers, spmd_types"):
        versions = [re.search(rf"^{name}==(.*)$", constraints, re.M)[1] for name in row.split(", ")]
        assert f"| {row} | {', '.join(versions)} |" in section
