"""Let processes find each other: a store, and the variables that have its address."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def serve_store() -> TCPStore:
    """Serve a store on a free port, for this machine only, until it is deleted."""
    # The socket is given to the store, not its port alone: another program could take that first.
    server = socket.create_server(("127.0.0.1", 0))
    host, port = server.getsockname()
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
    )


def variables_of_all(n: int, backend: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all of `n` processes have, as torchrun sets them.

    The port is not among them: a pool changes its store.
    """
    # Defaults, which the caller may replace.
    variables = {"OMP_NUM_THREADS": "1"}
    if backend == "gloo":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    variables.update(environment)
    variables.update(
        WORLD_SIZE=str(n),
        LOCAL_WORLD_SIZE=str(n),
        MASTER_ADDR="127.0.0.1",
        # The store is there already: process 0 must not open another.
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    return variables


def variables_of(rank: int) -> dict[str, str]:
    """Return the variables with the rank of one process, all of which are on this machine."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}
