"""Programs with a parameter server."""

import torch

import fshard as fs
from fshard import comm

OPTIMIZERS = {
    "sgd": fs.optim.sgd(0.25),
    "momentum": fs.optim.sgd(0.25, momentum=0.9),
    "adam": fs.optim.adam(0.1),
}


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def params():
    return {
        "w": drawn(6, 3, seed=0),
        "b": drawn(3, seed=1).bfloat16(),
        "scale": drawn(seed=2),
        "empty": torch.zeros(0, 2),
    }


def gradient(params, x):
    def loss_fn(w, b, scale, empty):
        return (torch.tanh(x @ w + b.float()) * scale - 0.5).square().mean() + empty.sum()

    grads, loss = torch.func.grad_and_value(lambda params: loss_fn(**params))(params)
    return loss, grads


CODES = {  # of 18 numbers: the compressor, and the bytes of its formula on 2 devices
    "dense": (None, 4 * 18),
    "top_k": (comm.top_k(0.25), 8 * 5),
    "random_k": (comm.random_k(0.25), 4 * 5),
    "sign": (comm.sign(block=8), 24 * (1 / 8 + 4 / 8)),
    "quantized": (comm.quantized(4, block=16, stochastic=True), 32 * (4 / 8 + 4 / 16)),
    "chain": (comm.chain(comm.top_k(0.4), comm.quantized(8, block=8)), 8 * (4 + 8 / 8 + 4 / 8)),
}


def server_of(arrivals, opt="adam", n=4, gradient=gradient, code="dense", **options):
    mesh = fs.make_mesh({"node": n})
    options = {"compress": CODES[code][0], **options}
    return comm.parameter_server(
        gradient, OPTIMIZERS[opt], arrivals, mesh=mesh, axis="node", **options
    )


LIVE = comm.Arrivals(
    [(0, 0), (1, 0), (2, 0), (0, 1), (1, 2), (2, 3), (0, 4), *[(0, push) for push in range(7, 12)]],
    6,
)
