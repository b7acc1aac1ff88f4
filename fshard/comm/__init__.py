"""Communication algorithms for slow links: compressed reductions, as pure functions on trees.

top_k, random_k, sign, quantized, power_sgd                 compressors: an approximate psum
error_feedback, ef21, momentum_corrected, delayed, chain    combinators: compressors around others
ring, exponential, one_peer, hypercube, random_pairs,
complete, from_matrix                                       graphs of devices that `mix`: average
local_sgd, diloco, streaming_diloco, gossip, push_sum       training steps of replicas that differ
arrivals, parameter_server                                  asynchronous training
"""

from fshard.comm.arrivals import Arrivals, arrivals
from fshard.comm.combinators import delayed, ef21, error_feedback, momentum_corrected
from fshard.comm.compressor import Compressor, Reduced
from fshard.comm.graph import (
    Graph,
    complete,
    exponential,
    from_matrix,
    hypercube,
    mix,
    one_peer,
    random_pairs,
    ring,
)
from fshard.comm.parameter_server import ParameterServer, parameter_server
from fshard.comm.power_sgd import power_sgd
from fshard.comm.replicas import diloco, gossip, local_sgd, mean, push_sum, streaming_diloco
from fshard.comm.sparse import chain, quantized, random_k, sign, top_k

__all__ = [
    "Arrivals",
    "Compressor",
    "Graph",
    "ParameterServer",
    "Reduced",
    "arrivals",
    "chain",
    "complete",
    "diloco",
    "delayed",
    "ef21",
    "error_feedback",
    "exponential",
    "from_matrix",
    "gossip",
    "hypercube",
    "local_sgd",
    "mean",
    "mix",
    "momentum_corrected",
    "one_peer",
    "parameter_server",
    "power_sgd",
    "push_sum",
    "quantized",
    "random_k",
    "random_pairs",
    "ring",
    "sign",
    "streaming_diloco",
    "top_k",
]
