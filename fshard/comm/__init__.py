"""Communication algorithms for slow links: compressed reductions, as pure functions on trees.

top_k, random_k, sign, quantized, power_sgd                       compressors: an approximate psum
error_feedback, ef21, momentum_corrected, delayed, chain          combinators: compressors of compressors
"""

from fshard.comm.combinators import delayed, ef21, error_feedback, momentum_corrected
from fshard.comm.compressor import Compressor, Reduced
from fshard.comm.power_sgd import power_sgd
from fshard.comm.sparse import chain, quantized, random_k, sign, top_k

__all__ = [
    "Compressor",
    "Reduced",
    "chain",
    "delayed",
    "ef21",
    "error_feedback",
    "momentum_corrected",
    "power_sgd",
    "quantized",
    "random_k",
    "sign",
    "top_k",
]
