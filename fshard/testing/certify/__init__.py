"""`certify`, `certify_module`: does a program train sharded as on one device?

Three kinds of runs are made: sharded; serial, twice; and serial in float64, which measures the effect of rounding alone.
Gradients and parameters are compared after every step, on every device, leaf by leaf:

    EXACT          the bits of the serial run
    BOUNDED        as near to float64 as four times the serial run is (see `bounds`)
    DIVERGENT      neither; the row states by which factor, or at which element of which device, the first leaf differs
    INCONCLUSIVE   the bound is so large that it would allow anything

In reproducible mode bits are promised: nothing is BOUNDED, and the serial run is one on a mesh of one device.

    losses, modules ─> runs ─> bounds ─> certificate       shards: comparisons of shards with full tensors
                                                           elementwise: optimizers alone
"""

from fshard.testing.certify.certificate import Certificate, CertificateRow
from fshard.testing.certify.elementwise import check_elementwise
from fshard.testing.certify.losses import certify, dyadic_like
from fshard.testing.certify.modules import certify_module

__all__ = ["Certificate", "CertificateRow", "certify", "certify_module", "check_elementwise", "dyadic_like"]
