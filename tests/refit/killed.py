"""A process of two that train and two that serve, for `test_kills`: it sends versions until one fails.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment. It writes FOLDER/ready-RANK after the second version, and FOLDER/result-RANK when a send has raised:
its version, whether the engine has exactly that one, and when; then whether its own mesh still works.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

import fshard as fs
from fshard import P
from tests.refit.engine import MergedColumnParallel, Rank


def full_values(version):
    """Return the full weights of a version."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, 400, generator=generator) + version for name in ("gate", "up")}


def loaded_engine(rank, version):
    """Return the engine of a rank with a version, by its own loader."""
    engine = MergedColumnParallel(rank, [8, 8], 400).bfloat16()
    load_into(engine)(full_values(version).items())
    return engine


def load_into(engine):
    def load_weights(weights):
        for name, x in weights:
            engine.load_shard(engine.weight, x, ("gate", "up").index(name))

    return load_weights


def arrays(mesh, version):
    return fs.device_put(full_values(version), fs.Layout(mesh, P.flat("data", shape=(8, 400))))


def send_until_one_fails(folder, *, delta):
    trainer = fs.make_mesh({"data": 2}, devices=range(2), timeout=30)
    served = fs.make_mesh({"model": 2}, devices=(3, 2))
    process = fs.mesh.process_index()
    params = arrays(trainer, 0)
    engine = traced = None
    if served.is_member:
        rank = Rank(served.devices.index(process), 2)
        engine = loaded_engine(rank, 0)
        traced = fs.refit.trace(load_into(engine), params, engine)
    refit = fs.refit.Refit(params, traced, mesh=served, into=engine, delta=delta)

    version = 0
    error = ""
    while not error:
        version += 1
        try:
            refit.send(version, arrays(trainer, version))
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        if version == 2:
            (folder / f"ready-{process}").touch()
    end = time.time()

    has_version = None
    if engine is not None:
        has_version = torch.equal(engine.weight, loaded_engine(rank, refit.version).weight)
    own = served if served.is_member else trainer
    try:
        totals = fs.run(lambda: fs.psum(torch.ones(3), own.axis_names), mesh=own)
        works = totals[0].tolist() == [2, 2, 2]
    except Exception as failure:
        works = f"{type(failure).__name__}: {failure}"
    result = {
        "works": works,
        "version": refit.version,
        "has_version": has_version,
        "end": end,
        "error": error,
    }
    partial = folder / f"partial-{process}"
    partial.write_text(json.dumps(result))
    partial.rename(folder / f"result-{process}")
    sys.stdout.flush()
    os._exit(0)  # the others of its groups have failed, too: nothing is waited for
