"""Checks for your own tests and runs: is a model invariant to the layout, is a batch in its order.

`assert_layout_invariant` runs your function at one rank and at several, in every layout.
`check_order` looks at the source positions that travelled with a batch; `in_order` does so inside
a compiled function.
"""

from plait.testing.invariance import assert_layout_invariant
from plait.testing.order import check_order, in_order

__all__ = ["assert_layout_invariant", "check_order", "in_order"]
