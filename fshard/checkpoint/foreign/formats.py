"""Open folders and files of any format: fshard's, safetensors, Hugging Face, torch.save, torch.distributed.checkpoint, peft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fshard.checkpoint.foreign.dcp import METADATA, dcp_folder
from fshard.checkpoint.foreign.mapped import (
    ForeignFiles,
    Found,
    read_bytes,
    read_object,
    refuse_outside,
    safetensors_file,
    torch_file,
)
from fshard.checkpoint.index import INDEX
from fshard.checkpoint.names import name_of
from fshard.checkpoint.source import OwnFolder, Source, what_is_there
from fshard.errors import CheckpointError

SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
PEFT, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def open_source(path: Path) -> Source:
    """Return the arrays of a folder or file of any format."""
    if path.is_file():
        is_zip = read_bytes(path, 0, 4) == b"PK\3\4"
        return ForeignFiles(*torch_file(path)) if is_zip else ForeignFiles(safetensors_file(path))
    readers: Mapping[str, Callable[[Path], Source]] = {
        INDEX: lambda _: OwnFolder(path),
        METADATA: lambda _: dcp_folder(path),
        SAFETENSORS: lambda file: ForeignFiles(safetensors_file(file)),
        f"{SAFETENSORS}.index.json": lambda file: ForeignFiles(_indexed(file, safetensors_file)),
        TORCH: lambda file: ForeignFiles(*torch_file(file)),
        f"{TORCH}.index.json": lambda file: ForeignFiles(_indexed(file, lambda one: torch_file(one)[0])),
        PEFT: lambda _: _peft_folder(path),
    }
    for name, read in readers.items():
        if (path / name).is_file():
            return read(path / name)
    raise CheckpointError(f"{path} is no checkpoint: {what_is_there(path)}.")


def _indexed(index: Path, read: Callable[[Path], Sequence[Found]]) -> list[Found]:
    """Return the arrays of all files that an index of Hugging Face names."""
    where = read_object(index, read_bytes(index), "weight_map")["weight_map"]
    if not isinstance(where, dict):
        raise CheckpointError(f"{index}: weight_map must have the file of each name; got {str(where)[:80]}.")
    refuse_outside(index, where.values())
    files = dict.fromkeys(where.values())
    lost = [file for file in files if not (index.parent / file).is_file()]
    found = {(file, name_of(one.stored.path)): one for file in files if not lost for one in read(index.parent / file)}
    lost = lost or [f"{name} in {file}" for name, file in where.items() if (file, name) not in found]
    if lost:
        raise CheckpointError(f"{index} names what is not there: {', '.join(lost[:20])}.")
    return [found[file, name] for name, file in where.items()]


def _peft_folder(folder: Path) -> ForeignFiles:
    """Return the LoRA weights of an adapter of peft, by the names that `fs.nn.lora` gives them."""
    config = read_object(folder / PEFT_CONFIG, read_bytes(folder / PEFT_CONFIG), "peft_type")
    others = ("use_rslora", "use_dora", "alpha_pattern", "rank_pattern")
    unfit = [f"{key}={config[key]!r}" for key in others if config.get(key)]
    if config["peft_type"] != "LORA" or unfit:
        text = ", ".join([str(config["peft_type"]), *unfit])
        raise CheckpointError(f"{folder} must be a LoRA adapter of one rank, with alpha / r as its scale; got {text}.")
    stored = [(_of_peft(name_of(one.stored.path)), one) for one in safetensors_file(folder / PEFT)]
    found = [one._replace(stored=one.stored._replace(path=(name,))) for name, one in stored]
    return ForeignFiles(found, partial=["**.lora_A", "**.lora_B", *(name for name, _ in stored)])


def _of_peft(name: str) -> str:
    """Return the name in a model of `fs.nn.lora`.

    >>> _of_peft("base_model.model.h.0.q.lora_A.weight"), _of_peft("base_model.model.wte.lora_embedding_B")
    ('h.0.q.lora_A', 'wte.lora_B')
    """
    name = name.removeprefix("base_model.model.").replace(".lora_embedding_", ".lora_")
    return name.removesuffix(".weight") if name.endswith((".lora_A.weight", ".lora_B.weight")) else name
