"""`fs.audit`: a step that repeats itself in another layout, and compares.

A flipped bit or a wrong layout changes numbers, and a loss still looks right. But the bits of a
reproducible step do not depend on the layout. So an audited step is computed twice:

    kept inputs ──> the step as always           ──> results, gradients ──╮
         └────────> the step in another layout   ──> results, gradients ──┴─> equal?

If they differ, both runs are repeated from the kept inputs. A run that differs from its own
repetition had a fault on some device; two runs that repeat themselves are two layouts that disagree.

    audit        `AuditedStep`: when to audit, and what to do about a difference
    layouts      the other layout: its step, and arrays moved there and back
    compare      are two trees equal, in bits or up to rounding?
    records      digests of what each device computes, sends and receives, in order of time
    diagnosis    from two records to the device, the leaf and the phase
    replicas     what several devices hold is equal on them: one number a step
    folder       the inputs of a step on disk
    replay       `fs.replay`: that step again
    meeting      collectives of an audit: flags and texts
"""

from fshard.auditing.audit import AuditedStep, audit
from fshard.auditing.replay import replay

__all__ = ["AuditedStep", "audit", "replay"]
