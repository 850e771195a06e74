"""plait under the names that MaxText users know, without MaxText or TransformerEngine installed.

The names, signatures and results are those of MaxText's `max_utils` and `multi_token_prediction`
(AI-Hypercomputer/maxtext, 2026); the moves are plait's. `docs/maxtext.md` says what to call where.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from plait.context import ContextParallel
from plait.exchange import move_array
from plait.layout import Contiguous, Layout, Striped, Zigzag
from plait.mesh import AnyMesh, Axes, as_names, explicit_axes, typed_spec
from plait.permute import Relayout, permute
from plait.tree import check_unmasked, map_axis

REORDERED_KEYS = frozenset(
    {
        "inputs",
        "inputs_position",
        "inputs_segmentation",
        "targets",
        "targets_position",
        "targets_segmentation",
        "targets_loss_mask",
        "corruption_mask",
    }
)
"""The keys of a batch that MaxText reorders, along axis 1; every other key keeps its order."""


class ReorderStrategy(enum.Enum):
    """The two orders that MaxText deals a batch out in, under its names and values.

    `ReorderStrategy(...)` also takes the members of MaxText's enum and of TransformerEngine's
    (`DualChunkSwap`, `Striped`), and the names of either as strings. MaxText's AUTO is refused: its
    trainer replaces it before it reorders, by STRIPED for packed rows under the ring strategy and
    by DUAL_CHUNK_SWAP otherwise.

    >>> ReorderStrategy("DualChunkSwap").layout(4)
    Zigzag(4)
    """

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    STRIPED = "striped"

    @classmethod
    def _missing_(cls, value: object) -> ReorderStrategy:
        name = value.name if isinstance(value, enum.Enum) else value
        plain = name.replace("_", "").lower() if isinstance(name, str) else name
        for member in cls:
            if plain == member.value.replace("_", ""):
                return member
        raise ValueError(
            f"reorder_strategy is {value!r}; it needs to be 'dual_chunk_swap' or 'striped'"
            + (", by which MaxText's trainer replaces it" if plain == "auto" else "")
        )

    def layout(self, cp_size: int) -> Layout:
        """The plait layout of this order: `Zigzag(cp_size)`, or `Striped(cp_size)` by one token."""
        if self is ReorderStrategy.STRIPED:
            return Striped(_ranks(cp_size, "an integer of at least 1", 1))
        return _zigzag(cp_size)


def reorder_sequence(
    tensor: Any, cp_size: int, seq_dim: int = 1, to_contiguous: bool = False
) -> Any:
    """The tensor with one axis carried from source order to zigzag order, or back.

    Bit for bit what MaxText's function of this name gives, without its gather.

    Args:
      tensor: an array of any dtype; NumPy gives NumPy. None is returned as it is.
      cp_size: the number of ranks, even. An array holds the whole sequence, inside `shard_map` too.
      seq_dim: the sequence axis; negative counts from the end.
      to_contiguous: from zigzag order back to source order.

    All but `tensor` are static under `jax.jit`. An array whose sharding is known to lay the
    sequence out over `cp_size` devices (outside `jax.jit`, and in it by an Explicit axis type)
    moves by two permutes of half a shard. Inside `jax.jit` on Auto axes the sharding cannot be
    known, so the compiler partitions the move of the whole: right, but dearer than
    `ContextParallel.reorder`, which is told the axis.

    Raises:
      TypeError: what is no array, a masked array, a to_contiguous that is no bool.
      ValueError: an odd cp_size (1 too), a length of 0 or no multiple of `2 * cp_size`, an axis
        that does not exist, a sequence sharded by Explicit type over other than cp_size devices.

    >>> import numpy as np
    >>> reorder_sequence(np.arange(8), 2, seq_dim=0)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if tensor is None:
        return None
    layout = _zigzag(cp_size)
    if not isinstance(to_contiguous, bool | np.bool_):
        raise TypeError(f"to_contiguous is {to_contiguous!r}; it needs to be True or False")

    def move(x: Any, axis: int, name: str) -> Any:
        return _move(x, layout, axis, name, bool(to_contiguous))

    axis = _integer("seq_dim", seq_dim)
    return map_axis(move, {"tensor": tensor}, axis, may_pass=False)["tensor"]


def reorder_causal_load_balanced(
    batch: Mapping[str, Any],
    cp_size: int,
    reorder_strategy: Any = ReorderStrategy.DUAL_CHUNK_SWAP,
    hardware: str | None = None,
) -> dict[str, Any]:
    """The batch with axis 1 of the entries named in `REORDERED_KEYS` dealt out to the ranks.

    This is MaxText's convention: what stands under another key passes through in its old order,
    per-token or not. `ContextParallel.reorder(batch, axis={...})` says the axis of every entry.

    Args:
      batch: arrays [batch, sequence, ...] or None by name; NumPy gives NumPy.
      cp_size: the number of ranks; even for DUAL_CHUNK_SWAP.
      reorder_strategy: a `ReorderStrategy` or what it takes. STRIPED gives rank r every cp_size-th
        token from r on, as TransformerEngine's stripes of one token.
      hardware: taken for the sake of MaxText's callers; both orders work on every platform.

    Raises:
      TypeError: a batch that is no mapping, or under a reordered key what is no array.
      ValueError: as `reorder_sequence`, by key; for STRIPED the length needs to be a multiple of
        cp_size, which may be odd.

    >>> import numpy as np
    >>> batch = {"inputs": np.arange(8)[None], "step": np.array(3)}
    >>> reorder_causal_load_balanced(batch, 2, "striped")["inputs"]
    array([[0, 2, 4, 6, 1, 3, 5, 7]])
    """
    layout = ReorderStrategy(reorder_strategy).layout(cp_size)
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"batch is a {type(batch).__name__}; it needs to be a mapping of arrays by name, such "
            "as {'inputs': tokens}"
        )

    def move(x: Any, axis: int, name: str) -> Any:
        return _move(x, layout, axis, name)

    # One by one, as the other keys may be of kinds that no pytree sorts.
    return {
        key: map_axis(move, {key: value}, 1, may_pass=False)[key]
        if key in REORDERED_KEYS
        else value
        for key, value in batch.items()
    }


def reorder_mask_load_balancing(tensor: Any, cp_size: int, seq_dim: int) -> np.ndarray:
    """The NumPy array with one axis in zigzag order, computed on the host.

    For attention masks that a kernel needs when the program is traced: the rows of a mask, or the
    positions of the queries. The keys stay in source order.

    Raises:
      TypeError: an array that is traced, a masked array, None.
      ValueError: as `reorder_sequence`.

    >>> import numpy as np
    >>> reorder_mask_load_balancing(np.tri(4, dtype=int), 2, 0)
    array([[1, 0, 0, 0],
           [1, 1, 1, 1],
           [1, 1, 0, 0],
           [1, 1, 1, 0]])
    """
    if isinstance(tensor, jax.core.Tracer):
        raise TypeError(
            f"tensor is {tensor}, a traced array; it needs to be known on the host: make the mask "
            "with NumPy, or use reorder_sequence"
        )
    if tensor is None:
        raise TypeError("tensor is None; an array is needed, such as the mask of a kernel")
    check_unmasked(tensor, "'tensor'")
    return reorder_sequence(np.asarray(tensor), cp_size, seq_dim)


def roll_and_mask(
    tree: Any,
    cp: ContextParallel,
    shift: int = -1,
    *,
    segment_ids: Any = None,
    mesh: AnyMesh | None = None,
    local: bool = False,
) -> Any:
    """Every leaf shifted left along the text, whatever the order of its slots; 0 where text ends.

    MaxText's `roll_and_mask` and `roll_and_mask_by_segment`, for multi-token prediction over a
    sequence that is sharded and reordered: the slot of source position p receives what position
    p - shift holds, from whichever rank. It is `ContextParallel.lookahead` filled with 0.

    Args:
      tree: arrays [batch, sequence, ...] in the layout of `cp`, of any dtype: ids, targets, masks,
        positions, embeddings. None passes through; NumPy gives NumPy.
      cp: the layout and the mesh axis of the sequence.
      shift: how far, as a number of at most 0; 0 returns the tree as it is.
      segment_ids: integers [batch, sequence] in the layout of `cp`; 0 is padding. Given, position
        p receives 0 unless p - shift lies in the same document. Pass the ids of the tokens as they
        are at every depth of prediction, never ids that were rolled along.
      mesh, local: as in `plait.relayout`.

    At depth k either roll k times by -1 or once, from the unrolled arrays, by -k: both are equal.
    Communicates what `plait.lookahead` does, for each leaf; its derivative is the shift back.

    Raises:
      ValueError: a shift to the right, and what `plait.lookahead` raises.

    >>> import numpy as np
    >>> cp = ContextParallel(Zigzag(2))
    >>> ids = cp.reorder(np.arange(1, 9)[None])
    >>> roll_and_mask(ids, cp)
    array([[2, 3, 8, 0, 4, 5, 6, 7]])
    """
    by = -_integer("shift", shift)
    if by < 0:
        raise ValueError(
            f"shift is {shift}, to the right; it needs to be at most 0, such as {-shift}"
        )
    if by == 0:
        return tree

    def roll(x: Any, axis: int, name: str) -> Any:
        return cp.lookahead(x, by, axis, segment_ids=segment_ids, fill=0, mesh=mesh, local=local)

    return map_axis(roll, tree, 1, may_pass=False)


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} is {value!r}; it needs to be an integer that is known when the program is "
            "traced, such as 1"
        ) from None


def _ranks(cp_size: Any, needed: str, multiple: int) -> int:
    """cp_size as an int of at least 1; errors say what is needed and the nearest that works."""
    number: Any = cp_size
    if isinstance(cp_size, str) and cp_size.isdecimal():
        number = int(cp_size)
    try:
        rounded = max(1, -(-int(number) // multiple)) * multiple
    except (TypeError, ValueError, OverflowError):
        rounded = multiple
    error = f"cp_size is {cp_size!r}; it needs to be {needed}, such as {rounded}"
    if isinstance(cp_size, bool) or not hasattr(cp_size, "__index__"):
        raise TypeError(error)
    ranks = operator.index(cp_size)
    if ranks < 1:
        raise ValueError(error)
    return ranks


def _zigzag(cp_size: Any) -> Zigzag:
    ranks = _ranks(cp_size, "an even number", 2)
    if ranks % 2:
        raise ValueError(
            f"cp_size is {ranks}; MaxText's zigzag order needs an even number of ranks, such as "
            f"{ranks + 1}: plait.Zigzag({ranks}) itself takes any number"
        )
    return Zigzag(ranks)


def _move(x: Any, layout: Layout, axis: int, name: str, back: bool = False) -> Any:
    ends: list[Layout] = [Contiguous(layout.ranks), layout]
    source, target = reversed(ends) if back else ends
    mesh, names = _sharded_over(x, axis)
    size = Axes.on(mesh, names).size if mesh is not None else 1
    if mesh is None or size == 1:
        return move_array(x, source, target, axis, name, names=(), mesh=None, local=True)
    if size == layout.ranks:
        return move_array(x, source, target, axis, name, names=names, mesh=mesh, local=False)
    if explicit_axes(mesh) & set(names):
        raise ValueError(
            f"axis {axis} of {name} is sharded over {size} devices by its type, {jax.typeof(x)}, "
            f"and cp_size is {layout.ranks}; they need to be equal: use cp_size={size}, or "
            "jax.sharding.reshard first"
        )
    layout.check_length(x.shape[axis], f"axis {axis} of {name}")
    return permute(x, Relayout(source, target, x.shape[axis]), axis)


def _sharded_over(x: Any, axis: int) -> tuple[AnyMesh | None, tuple[str, ...]]:
    """The mesh and its axes that an array's sharding, or its type, lays one axis out over."""
    if isinstance(x, np.ndarray | np.generic):
        return None, ()
    if not isinstance(x, jax.core.Tracer) and isinstance(x.sharding, NamedSharding):
        spec = x.sharding.spec
        return x.sharding.mesh, as_names(spec[axis] if axis < len(spec) else None)
    return jax.typeof(x).sharding.mesh, typed_spec(x)[axis]
