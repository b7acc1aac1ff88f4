"""`certify`, `certify_module`: does a program train sharded as on one device?

A program trains sharded, by fshard, and on one device, by plain torch: both in float64, where
rounding explains a relative difference of 1e-9 at most. Gradients and parameters are compared after
every step, on every device, leaf by leaf:

    EXACT          the bits of the serial run
    BOUNDED        the difference is rounding
    DIVERGENT      it is not; the row states by which factor, or at which element of which device,
                   the leaf differs
    INCONCLUSIVE   the serial run is not finite

In reproducible mode bits are promised: both runs are in the program's dtypes, and the serial one is
on a mesh of one device.

    losses, modules ─> runs ─> verdicts ─> certificate       elementwise: optimizers alone
"""

from fshard.testing.certificate import Certificate, CertificateRow
from fshard.testing.certify.elementwise import check_elementwise
from fshard.testing.certify.losses import certify, dyadic_like
from fshard.testing.certify.modules import certify_module

__all__ = [
    "Certificate",
    "CertificateRow",
    "certify",
    "certify_module",
    "check_elementwise",
    "dyadic_like",
]
