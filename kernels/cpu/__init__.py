"""CPU implementations: torch GEMMs on padded rows, and Numba loops in strict IEEE arithmetic.

Invariant: every Numba kernel fixes the order of its operations in the source (``fastmath`` off, fused
multiply-adds written out), so its bits do not depend on vector width, thread count or the other rows.
"""
