"""Functions that tests run in processes, and those of several files."""

import ctypes
import functools
import re
import threading
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fshard as fs
from fshard import P


def save_dtensors(path):
    fs.make_mesh({"data": 2})  # joins the processes
    devices = init_device_mesh("cpu", (2,))
    x = torch.arange(35.0).reshape(5, 7)
    shards = {
        name: distribute_tensor(x, devices, [Shard(dim)])
        for dim, name in enumerate(["rows", "columns"])
    }
    dcp.save(shards, checkpoint_id=path)


def export_all(path):
    """Export in each format; return the errors of exports to a path that is taken, and of one that
    its writer cannot end.
    """
    mesh = fs.make_mesh({"data": 2})
    layouts = {"a.w": P("data"), "b.w": P.flat("data"), "c": P()}
    tensors = {
        "a.w": torch.arange(12.0).reshape(4, 3),
        "b.w": torch.arange(7.0),
        "c": torch.tensor(3),
    }
    params = {name: fs.device_put(x, fs.Layout(mesh, layouts[name])) for name, x in tensors.items()}
    for to in ("hf", "dcp", "torch", "safetensors"):
        fs.export(path / to, {**params, "d": torch.ones(2)}, to=to)
    errors = []
    for target, options in (
        (path, {}),
        (path, {"to": "torch"}),
        (path / "x", {"config": {"k": {1}}}),
    ):
        try:
            fs.export(target, params, timeout=30, **options)
        except (fs.errors.CheckpointError, TypeError) as error:
            errors.append(str(error))
    return errors


@functools.cache
def mesh():
    return fs.make_mesh({"data": 2, "model": 2})


def growth_of_memory(action, field="RssAnon"):
    """Return the bytes by which a field of /proc grows meanwhile; "VmRSS" counts the pages of
    mapped files too.
    """
    sizes = []
    is_done = threading.Event()

    def watch():
        while not is_done.wait(0.0005):
            sizes.append(
                int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10
            )

    ctypes.CDLL(None).malloc_trim(0)
    thread = threading.Thread(target=watch)
    thread.start()
    time.sleep(0.05)
    action()
    is_done.set()
    thread.join()
    return max(sizes) - sizes[0]
