"""What `make test` leaves to `make sweep`: more of the same cases."""

import pytest


def slow(*values, id=None):
    """A case of a parametrized test that only the sweep runs."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def every(number, cases):
    """The cases, of which all but every `number`-th are slow."""
    return [case if i % number == 0 else slow(case) for i, case in enumerate(cases)]
