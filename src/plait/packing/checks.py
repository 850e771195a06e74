"""Document lengths, segment ids and weights, checked: errors name the record that is wrong."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from plait.tree import as_int32

_LARGEST = np.iinfo(np.int32).max


def as_lengths(document_lengths: Sequence[int] | np.ndarray, *, least: int) -> np.ndarray:
    """The lengths as int64 [documents]; errors name the first document that is wrong.

    Raises:
      TypeError: a length that is no integer.
      ValueError: none at all, a length below `least` or beyond int32, and lengths that are not a
        list.
    """
    if np.ndim(document_lengths) != 1:
        raise ValueError(
            f"document_lengths has {np.ndim(document_lengths)} dimensions; it needs to be a list "
            "of one length a document, such as [5, 3]"
        )
    lengths = np.empty(len(document_lengths), np.int64)
    for index, length in enumerate(document_lengths):
        lengths[index] = _length(index, length, least)
    if not lengths.size:
        raise ValueError("document_lengths is empty; at least one document is needed")
    return lengths


def as_ids(segment_ids: Any) -> np.ndarray:
    """Segment ids as int32 [sequence] or [batch, sequence]."""
    ids = np.asarray(as_int32(segment_ids, "segment_ids"))
    if ids.ndim not in (1, 2) or ids.size == 0:
        raise ValueError(
            f"segment_ids has shape {ids.shape}; it needs to be (sequence,) or (batch, sequence), "
            "of at least one token"
        )
    return ids


def as_weight(name: str, value: Any, shape: tuple[int, ...] = ()) -> np.ndarray:
    """A weight as int64 or float64: a number, or numbers of the given shape."""
    given = np.asarray(value)
    if given.dtype.kind not in "iuf":
        raise TypeError(f"{name} has dtype {given.dtype}; it needs numbers")
    if given.ndim and given.shape != shape:
        raise ValueError(
            f"{name} has shape {given.shape}; it needs to be a number"
            + (f", or an array of the shape of the tokens, {shape}" if shape else "")
        )
    wrong = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
    if wrong.size:
        where = f" at token {wrong[0]}" if given.ndim else ""
        raise ValueError(
            f"{name} is {given.reshape(-1)[wrong[0]]}{where}; it needs to be finite and at least 0"
        )
    return given.astype(np.float64 if given.dtype.kind == "f" else np.int64)


def _length(index: int, value: Any, least: int) -> int:
    try:
        length = operator.index(value)
    except TypeError:
        raise TypeError(
            f"document {index} has length {value!r}; it needs to be an integer of tokens"
        ) from None
    if not least <= length <= _LARGEST:
        why = "; leave empty documents out" if least and not length else ""
        raise ValueError(
            f"document {index} has length {length}; it needs to be {least} to {_LARGEST}, such as "
            f"{min(max(length, least), _LARGEST)}{why}"
        )
    return length
