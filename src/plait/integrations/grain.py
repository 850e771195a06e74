"""Steps of a grain pipeline: from documents to packed, labelled, balanced rows.

Each step is a transform of grain's own kind, or a dataset of grain's, without state of its own:
iterators checkpoint and resume as grain's do, in worker processes too, and nothing before `Reorder`
knows how many ranks there are.

Both conventions for the names of an array's segment ids and positions are understood: grain's
`inputs_segment_ids` and `inputs_positions`, and MaxText's `inputs_segmentation` and
`inputs_position`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from plait.layout import Contiguous, Layout, at_least_one
from plait.lookahead import IGNORED_LABEL, lookahead
from plait.packing import balance_segments

try:
    import grain
except ImportError as error:
    raise ImportError("plait.integrations.grain needs grain: pip install 'plait[grain]'") from error

Element = dict[str, Any]
Convention = Literal["grain", "maxtext"]

_SUFFIXES: dict[Convention, tuple[str, str]] = {
    "grain": ("_segment_ids", "_positions"),
    "maxtext": ("_segmentation", "_position"),
}
LAYOUT_POSITIONS = "layout_positions"
"""What `Balance` adds: the source position of each slot, for `Reorder` to carry out."""
SOURCE_POSITIONS = "source_positions"
"""What `Reorder` leaves: the source position of each slot, as attention takes it."""


def pack(
    dataset: grain.MapDataset,
    lengths: Mapping[str, int],
    *,
    bins: int = 64,
    long: Literal["error", "cut"] = "error",
    seed: int = 0,
    shuffle_bins: bool = True,
) -> grain.IterDataset:
    """Documents packed into rows by grain's best-fit packer, after each of them is checked.

    Args:
      dataset: of dictionaries of arrays, [tokens, ...]; all records have the dtypes and features of
        the first.
      lengths: for each array the length of its rows; an array that is not named is refused, as it
        would be lost.
      bins: rows that are filled at a time: more pack tighter.
      long: what becomes of a document that is longer than a row: an error that names the record,
        or "cut" into pieces, which become documents of their own, no token lost.
      seed, shuffle_bins: in which order full rows leave, as grain has it.

    Returns:
      Rows with `{name}_segment_ids` (from 1, 0 is padding) and `{name}_positions`.

    Raises, while it is iterated:
      ValueError: for a document that is empty, too long, of another dtype or shape than the first,
        with arrays of different lengths or one too many; a KeyError for one without an array. They
        name the record by its index in `dataset`.

    >>> documents = [{"inputs": np.arange(1, n + 1)} for n in (5, 3, 4)]
    >>> rows = list(pack(grain.MapDataset.source(documents), {"inputs": 8}, shuffle_bins=False))
    >>> [row["inputs_segment_ids"].tolist() for row in rows]
    [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0, 0, 0]]
    """
    if long not in ("error", "cut"):
        raise ValueError(f"long is {long!r}; it needs to be 'error' or 'cut'")
    if not isinstance(dataset, grain.MapDataset):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}; it needs to be a grain.MapDataset, such as "
            "grain.MapDataset.source(documents), whose records have an index"
        )
    if not isinstance(lengths, Mapping) or not lengths:
        raise ValueError(f"lengths is {lengths!r}; it needs names, such as {{'inputs': 8192}}")
    sizes = {name: at_least_one(f"lengths[{name!r}]", size) for name, size in lengths.items()}
    bins = at_least_one("bins", bins)
    records: Any = map(dataset.__getitem__, range(len(dataset)))
    first: Element = next((x for x in records if x is not None), {})
    kinds = {name: _kind(first[name]) for name in sizes if isinstance(first.get(name), np.ndarray)}
    check = _CheckDocument(tuple(sizes.items()), tuple(kinds.items()), long == "error")
    checked = dataset.map_with_index(check)
    documents = checked.to_iter_dataset()
    if long == "cut":
        documents = grain.experimental.FlatMapIterDataset(documents, _Cut(tuple(sizes.items())))
    return grain.experimental.BestFitPackIterDataset(
        documents, length_struct=sizes, num_packing_bins=bins, seed=seed, shuffle_bins=shuffle_bins
    )


def _kind(x: np.ndarray) -> tuple[str, tuple[int, ...]]:
    """The dtype, and the shape of one token."""
    return x.dtype.name, x.shape[1:]


@dataclasses.dataclass(frozen=True)
class _CheckDocument(grain.transforms.MapWithIndex):
    lengths: tuple[tuple[str, int], ...]
    kinds: tuple[tuple[str, tuple[str, tuple[int, ...]]], ...]
    refuses_long: bool

    def map_with_index(self, index: int, element: Element | None) -> Element | None:
        if element is None:  # filtered out
            return None
        sizes, kinds = {}, dict(self.kinds)
        for name, length in self.lengths:
            if name not in element:
                raise KeyError(f"record {index} has no {name!r}; it has {sorted(element)}")
            x = element[name]
            if not isinstance(x, np.ndarray) or not x.ndim or x.dtype.kind not in "biuf":
                raise TypeError(
                    f"record {index}: {name!r} is {x!r:.60}; it needs to be a NumPy array of "
                    "numbers, [tokens, ...]"
                )
            if _kind(x) != kinds.get(name, _kind(x)):
                raise ValueError(
                    f"record {index}: a token of {name!r} is {_kind(x)}, and of the first record "
                    f"{kinds[name]}; all need the same dtype and shape"
                )
            sizes[name] = len(x)
            if not sizes[name]:
                raise ValueError(f"record {index}: {name!r} is empty; it needs at least 1 token")
            if self.refuses_long and sizes[name] > length:
                raise ValueError(
                    f"record {index}: {name!r} has {sizes[name]} tokens and a row {length}; cut "
                    f"it to {length}, or pass long='cut'"
                )
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"record {index} has arrays of different lengths, {sizes}; all need the same"
            )
        if set(element) - set(sizes):
            raise ValueError(
                f"record {index} also has {sorted(set(element) - set(sizes))}, which packing would "
                "lose: name a length for each, or drop them before"
            )
        return element


class _Cut(grain.experimental.FlatMapTransform):
    """A document as pieces no longer than a row; fewer than 2^31 tokens are fewer pieces."""

    max_fan_out = 2**31 - 1

    def __init__(self, lengths: tuple[tuple[str, int], ...]) -> None:
        self.step = min(length for _, length in lengths)

    def flat_map(self, element: Element) -> list[Element]:
        length = len(next(iter(element.values())))
        return [
            {name: x[start : start + self.step] for name, x in element.items()}
            for start in range(0, length, self.step)
        ]


@dataclasses.dataclass(frozen=True)
class Labels(grain.transforms.Map):
    """Adds the labels of an array of tokens, and the mask of the loss.

    Adds `name`, the token `by` places on within the document, `ignored` where there is none;
    `{name}_loss_mask`, int32, 0 just there (a token whose id is 0 is a token); and the segment ids
    and positions of the labels, by the names that those of the tokens have. The ids are 0 where
    there is no label, so that a loss that counts `targets_segmentation != 0`, as MaxText's does,
    counts labels.

    Attributes:
      tokens: the array of token ids, [sequence] or [batch, sequence] in source order.
      name: of the labels.
      by: how many tokens to look ahead.
      ignored: the label where there is none; it must not be a token id.
    """

    tokens: str = "inputs"
    name: str = "targets"
    by: int = 1
    ignored: int = IGNORED_LABEL

    def map(self, element: Element) -> Element:
        _check_source_order(element, "labels are taken")
        if self.name in element:
            raise ValueError(f"there is a {self.name!r} already; labels need another name")
        x, ids = _array(element, self.tokens), segment_ids_of(element, self.tokens)
        if x.shape != ids.shape:
            raise ValueError(
                f"{self.tokens!r} has shape {x.shape} and its segment ids {ids.shape}; labels need "
                "token ids, [sequence] or [batch, sequence]"
            )
        labels, there = (
            lookahead(
                np.atleast_2d(y), Contiguous(1), self.by, segment_ids=np.atleast_2d(ids), fill=fill
            ).reshape(x.shape)
            for y, fill in ((x, self.ignored), (np.ones_like(ids), 0))
        )
        if (labels[there == 1] == self.ignored).any():
            raise ValueError(
                f"{self.tokens!r} holds the token id {self.ignored}, which marks what has no "
                f"label: another `ignored`, such as {IGNORED_LABEL}, is needed"
            )
        added = {self.name: labels, f"{self.name}_loss_mask": there.astype(np.int32)}
        for ids_suffix, positions_suffix in _SUFFIXES.values():
            if f"{self.tokens}{ids_suffix}" in element:
                added[f"{self.name}{ids_suffix}"] = ids * there
            if f"{self.tokens}{positions_suffix}" in element:
                positions = np.asarray(element[f"{self.tokens}{positions_suffix}"])
                added[f"{self.name}{positions_suffix}"] = positions
        return {**element, **added}


@dataclasses.dataclass(frozen=True)
class Balance(grain.transforms.Map):
    """Adds to every row the order in which the ranks' attention work is equal.

    `Reorder` then carries it out, and attention takes it as `source_positions`. Every row has an
    order of its own; shapes do not change, so nothing is compiled anew.

    Attributes:
      ranks: of the context axis.
      chunks_per_rank: into how many chunks a rank's tokens are dealt.
      tokens: the array whose segment ids say where documents are.
    """

    ranks: int
    chunks_per_rank: int = 16
    tokens: str = "inputs"

    def __post_init__(self) -> None:
        at_least_one("ranks", self.ranks)
        at_least_one("chunks_per_rank", self.chunks_per_rank)

    def map(self, element: Element) -> Element:
        _check_source_order(element, "rows are balanced")
        ids = np.asarray(segment_ids_of(element, self.tokens))
        length = ids.shape[-1]
        chunks = self.ranks * self.chunks_per_rank
        if length % chunks:
            raise ValueError(
                f"rows have {length} tokens; {self.ranks} ranks of {self.chunks_per_rank} chunks "
                f"need a multiple of {chunks}: {-(-length // chunks) * chunks} works"
            )
        orders = [
            balance_segments(row, self.ranks, chunk=length // chunks).layout.positions(length)
            for row in np.atleast_2d(ids)
        ]
        return {**element, LAYOUT_POSITIONS: np.stack(orders).reshape(ids.shape)}


@dataclasses.dataclass(frozen=True)
class Reorder(grain.transforms.Map):
    """Carries every array of the sequence into the order of the layout, or of `Balance`.

    The sequence is the last axis of `tokens`: axis 0 of rows, axis 1 of batches of rows. Arrays
    that are as long there are carried along that axis, those in dictionaries within too; others
    stay. Adds `source_positions`, shaped as the tokens: attention takes it where rows differ, and
    `plait.testing.check_order` where someone doubts.

    Attributes:
      layout: the layout; None: the order that `Balance` found for each row.
      tokens: the array of token ids.
      skip: names of arrays that are as long and stay all the same.
    """

    layout: Layout | None = None
    tokens: str = "inputs"
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout | None):
            raise TypeError(
                f"layout is {self.layout!r:.60}; it needs to be a layout, such as Zigzag(8), or "
                "None after Balance"
            )

    def map(self, element: Element) -> Element:
        _check_source_order(element, "rows are reordered")
        element, tokens = dict(element), _array(element, self.tokens)
        order = element.pop(LAYOUT_POSITIONS, None)
        if (order is None) == (self.layout is None):
            raise ValueError(
                "Reorder needs a layout, such as Reorder(Zigzag(8)), or Balance before it"
                if order is None
                else "Reorder has a layout and Balance came before it: drop one of the two"
            )
        if tokens.ndim not in (1, 2):
            raise ValueError(
                f"{self.tokens!r} has shape {tokens.shape}; it needs to be [sequence] or "
                "[batch, sequence]"
            )
        if self.layout is not None:
            order = np.broadcast_to(self.layout.positions(tokens.shape[-1]), tokens.shape)
        order = np.array(order, np.int32)
        if order.shape != tokens.shape:
            raise ValueError(
                f"Balance saw rows of shape {order.shape} and Reorder sees {tokens.shape}: nothing "
                "between the two may cut or join rows"
            )
        return {**self._carried(element, order), SOURCE_POSITIONS: order}

    def _carried(self, element: Element, order: np.ndarray) -> Element:
        axis, length = order.ndim - 1, order.shape[-1]
        carried: Element = {}
        for name, x in element.items():
            if isinstance(x, dict):
                carried[name] = self._carried(x, order)
                continue
            shape = np.shape(x)
            fits = shape[: axis + 1] == order.shape
            if not fits and any(f"{name}{suffix}" in element for suffix, _ in _SUFFIXES.values()):
                raise ValueError(
                    f"{name!r} has shape {shape} and segment ids of its own, and {self.tokens!r} "
                    f"rows of {length} tokens: an order for one does not fit the other"
                )
            carried[name] = _carried(x, order, axis) if fits and name not in self.skip else x
        return carried


@dataclasses.dataclass(frozen=True)
class Rename(grain.transforms.Map):
    """Gives segment ids and positions the names of a convention.

    >>> Rename("maxtext").map({"inputs": 1, "inputs_segment_ids": 2, "inputs_positions": 3})
    {'inputs': 1, 'inputs_segmentation': 2, 'inputs_position': 3}
    """

    convention: Convention

    def __post_init__(self) -> None:
        if self.convention not in _SUFFIXES:
            raise ValueError(f"convention is {self.convention!r}; it needs to be one of "
                             f"{', '.join(map(repr, _SUFFIXES))}")  # fmt: skip

    def map(self, element: Element) -> Element:
        renamed = {}
        for name, x in element.items():
            for suffixes in _SUFFIXES.values():
                for suffix, wanted in zip(suffixes, _SUFFIXES[self.convention], strict=True):
                    base = name.removesuffix(suffix)
                    if base != name and base in element:
                        name = base + wanted
            renamed[name] = x
        return renamed


def segment_ids_of(element: Mapping[str, Any], name: str) -> Any:
    """The segment ids of an array, under the name of either convention; checked to be in order.

    >>> segment_ids_of({"inputs_segmentation": np.array([1, 1, 2, 0])}, "inputs")
    array([1, 1, 2, 0])
    """
    found = [f"{name}{suffix}" for suffix, _ in _SUFFIXES.values() if f"{name}{suffix}" in element]
    if len(found) > 1:
        raise ValueError(f"there are both {found[0]!r} and {found[1]!r}; drop one of the two")
    if found:
        ids = np.asarray(element[found[0]])
        _check_grouped(ids, found[0])
        return ids
    wanted = " or ".join(repr(f"{name}{suffix}") for suffix, _ in _SUFFIXES.values())
    raise KeyError(f"there is no {wanted}; the element has {sorted(element)}")


def _check_grouped(ids: np.ndarray, name: str) -> None:
    """ValueError where the tokens of a document do not lie together."""
    if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu" or (ids < 0).any():
        raise ValueError(
            f"{name!r} is {ids.dtype}{list(ids.shape)} with least {ids.min(initial=0)}; it needs "
            "integers from 1, and 0 for padding, [sequence] or [batch, sequence]"
        )
    for number, row in enumerate(np.atleast_2d(ids)):
        starts = row[np.flatnonzero(np.diff(row, prepend=row[:1] - 1))]
        found, counts = np.unique(starts[starts != 0], return_counts=True)
        if (counts > 1).any():
            raise ValueError(
                f"row {number} of {name!r}: document {found[counts > 1][0]} comes back after "
                "another; the tokens of each need to lie together, in source order"
            )


def _array(element: Mapping[str, Any], name: str) -> np.ndarray:
    if name not in element:
        raise KeyError(f"there is no {name!r}; the element has {sorted(element)}")
    return np.asarray(element[name])


def _check_source_order(element: Mapping[str, Any], what: str) -> None:
    positions = element.get(SOURCE_POSITIONS)
    if positions is not None and (np.diff(positions, axis=-1) != 1).any():
        raise ValueError(f"{what} in source order, and Reorder came before: put it last")


def _carried(x: Any, order: np.ndarray, axis: int) -> np.ndarray:
    x = np.asarray(x)
    return np.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - order.ndim)), axis)
