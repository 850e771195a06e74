"""What differs between two arrays, in the words of a sequence."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from plait.layout import Layout

_LEAST_RTOL = 1e-4
_MOST_RUNS = 4


def difference(
    wanted: np.ndarray,
    found: np.ndarray,
    layout: Layout,
    axis: int | None,
    rtol: float | None,
    atol: float | None,
) -> str | None:
    """How what was found differs from what is wanted, both in source order; None if it does not.

    `axis` is the sequence axis, None where there is none.
    """
    for what in ("shape", "dtype"):
        here, there = getattr(found, what), getattr(wanted, what)
        if here != there:
            return f"has {what} {here}; at one rank it has {there}"
    if jnp.issubdtype(wanted.dtype, jnp.inexact):
        rtol, atol = _tolerances(wanted, rtol, atol)
        allowed = f" (rtol {rtol:.3g}, atol {atol:.3g})"
        differs = ~_agree(_wide(wanted), _wide(found), rtol, atol)
    else:
        allowed = ""
        differs = wanted != found
    if not differs.any():
        return None
    with np.errstate(invalid="ignore"):
        largest = np.abs(_wide(found) - _wide(wanted))[differs].max()
    where, positions = "", ""
    if axis is None:
        first = np.argwhere(differs)[0]
    else:
        first = np.argwhere(np.moveaxis(differs, axis, 0))[0]
        position, first = int(first[0]), np.insert(first[1:], axis, first[0])
        length = wanted.shape[axis]
        slot = int(layout.slots(length)[position])
        rank = slot // (length // layout.ranks)
        where = f"at source position {position} (slot {slot}, rank {rank}), "
        others = tuple(d for d in range(wanted.ndim) if d != axis)
        positions = f", at source positions {_in_words(np.flatnonzero(differs.any(axis=others)))}"
    at = tuple(first.tolist())
    index = f"index {list(at)}, " if at else ""
    verb = "differs" if differs.sum() == 1 else "differ"
    return (
        f"differs from one rank's: {where}{index}it is {found[at]} and should be {wanted[at]}; "
        f"{differs.sum()} of {differs.size} values {verb}, by up to {largest:.3g}"
        f"{positions}{allowed}"
    )


def _agree(wanted: np.ndarray, found: np.ndarray, rtol: float, atol: float) -> np.ndarray:
    finite = np.isfinite(wanted) & np.isfinite(found)
    with np.errstate(invalid="ignore"):
        near = np.abs(found - wanted) <= atol + rtol * np.abs(wanted)
    return (finite & near) | (wanted == found) | (np.isnan(wanted) & np.isnan(found))


_FAR_ABOVE = 1e3


def _tolerances(wanted: np.ndarray, rtol: float | None, atol: float | None) -> tuple[float, float]:
    if rtol is None:
        rtol = max(_LEAST_RTOL, 4 * float(jnp.finfo(wanted.dtype).eps))
    if atol is None:
        sizes = np.abs(_wide(wanted))
        sizes = sizes[np.isfinite(sizes)]
        if sizes.any():  # a few huge ones, such as the -1e9 of a mask, must not excuse the others
            sizes = np.minimum(sizes, _FAR_ABOVE * np.median(sizes[sizes > 0]))
        atol = rtol * float(np.sqrt(np.mean(sizes**2))) if sizes.size else 0.0
    return rtol, atol


def _wide(x: np.ndarray) -> Any:
    return x.astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64)


def _in_words(positions: np.ndarray) -> str:
    """Ascending positions as runs: "4-5, 8-9 and 12-13", the first few of them.

    >>> _in_words(np.array([4, 5, 8, 9, 12]))
    '4-5, 8-9 and 12'
    """
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    words = [str(run[0]) if run.size == 1 else f"{run[0]}-{run[-1]}" for run in runs[:_MOST_RUNS]]
    if len(runs) > _MOST_RUNS:
        words.append(f"{len(runs) - _MOST_RUNS} runs more")
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
