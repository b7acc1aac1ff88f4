"""`MoE`: a layer of experts as a torch module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fshard.experts.dispatch import moe, of_this_mesh
from fshard.experts.routing import balance_loss, route, z_loss
from fshard.mesh.layout import Axes


class MoE(nn.Module):
    """A feed-forward layer of experts, with a router.

    If `shared` is not 0, it also has a network that all tokens pass through.

    Args:
        width: of the tokens.
        hidden: width of the inner layer of an expert.
        experts: their number.
        top_k: experts of a token.
        shared: inner width of the shared network.
        axis: along which a step shards the experts: see `moe`. Outside of a mesh all are here.
        batch: the axes that shard the batch; default: `axis`.
        replicated: see `moe`; `tensor_parallel` sets it.
        capacity: see `moe`.
        options: of `route`.

    After a forward, `balance` and `z` are the losses of `balance_loss` and `z_loss`, and `stats`
    is that of `moe`. They are private to each device, as attributes are. Before, the losses are 0.

    >>> layer = MoE(4, 8, experts=3, top_k=2)
    >>> layer(torch.ones(5, 4)).shape, layer.stats.load.sum()
    (torch.Size([5, 4]), tensor(10))
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        experts: int,
        top_k: int,
        shared: int = 0,
        axis: str | None = None,
        batch: Axes = (),
        replicated: Axes = (),
        capacity: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.axis = axis
        self.batch = batch
        self.replicated = replicated
        self.capacity = capacity
        self.options = options
        # A plan follows the model without a forward of this layer: its losses add no dims.
        self.balance = torch.zeros(())
        self.z = torch.zeros(())

        self.router = nn.Linear(width, experts, bias=False)
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        weights: dict[str, nn.Parameter] = {}
        for name, (inputs, outputs) in shapes.items():
            # Outputs have the variance of inputs that are independent.
            weight = torch.randn(experts, inputs, outputs) / inputs**0.5
            weights[name] = nn.Parameter(weight)
        self.experts = nn.ParameterDict(weights)
        self.shared = None
        if shared:
            self.shared = nn.Sequential(
                nn.Linear(width, shared), nn.SiLU(), nn.Linear(shared, width)
            )

    def forward(self, x: Tensor) -> Tensor:
        # Outside of a mesh there are none: then all experts are here.
        axes = of_this_mesh(self.axis or ())
        axis = axes[0] if axes else None
        batch = of_this_mesh(self.batch) or axes

        logits = functional.linear(x.reshape(-1, x.shape[-1]), self.router.weight)
        routing = route(logits, self.top_k, **self.options)
        y, self.stats = moe(
            x,
            routing,
            dict(self.experts.items()),
            axis=axis,
            batch=batch,
            replicated=of_this_mesh(self.replicated),
            capacity=self.capacity,
        )
        self.balance = balance_loss(routing, batch)
        self.z = z_loss(logits)
        if self.shared is None:
            return y
        return y + self.shared(x)
