"""The code to write for a layout and a strategy: a program's own functions, ready to be run."""

from __future__ import annotations

from plait.cli.arguments import LAYOUTS
from plait.cli.plan.layouts import chunk_of

_MESH = """\
import jax
{imports}

mesh = jax.make_mesh({sizes}, {axes}, axis_types=({types}))
cp = ContextParallel({layout}, {axis_name})
"""

_FIXED = '''

def put(batch):
    """Arrays [rows, {length}] of the host, in source order, onto the mesh in the layout's."""
    return cp.device_put(batch, mesh)
'''

_BALANCED = '''

def put(batch):
    """Arrays [rows, {length}] of the host, "segment_ids" among them, each row in its own layout."""
    ids = batch["segment_ids"]
    layouts = [balance_segments(row, {ranks}, chunk={chunk}).layout for row in ids]
    positions = np.stack([layout.positions({length}) for layout in layouts])
    source = np.broadcast_to(np.arange({length}, dtype=np.int32), ids.shape)
    return cp.device_put({{**batch, "positions": source}}, mesh, source_positions=positions)
'''

_ZIGZAG_DOCUMENTS = '''

def put(documents):
    """Arrays of tokens of documents, packed into rows, each zigzag inside its documents."""
    padded = [np.pad(tokens, (0, -len(tokens) % {step})) for tokens in documents]
    real = [np.arange(len(p)) < len(d) for p, d in zip(padded, documents, strict=True)]
    record = pack([len(tokens) for tokens in padded], {length}, long="cut")
    rooms = [[piece.length for piece in row] for row in record.rows]
    layouts = [Placed.zigzag_documents([*r, {length} - sum(r)], {ranks}) for r in rooms]
    positions = np.stack([layout.positions({length}) for layout in layouts])
    batch = {{
        "tokens": record.apply(padded, fill=0),
        "segment_ids": record.segment_ids * record.apply(real, fill=False),
        "positions": np.broadcast_to(np.arange({length}, dtype=np.int32), record.shape),
    }}
    return cp.device_put(batch, mesh, source_positions=positions)
'''

_ATTEND = '''

def attend(q, k, v{parameters}):
    """A layer's attention, in the order of the layout, under jax.set_mesh(mesh)."""
    return cp.attention(q, k, v{arguments}, strategy="{strategy}")
'''


def code(
    layout: str,
    strategy: str,
    ranks: int,
    sequence_length: int,
    *,
    has_documents: bool,
    tile: tuple[int, int] = (256, 256),
    axis_sizes: tuple[int, int] | None = None,
) -> str:
    """Functions that put a batch on devices and attend to it.

    Args:
      layout, strategy: as the table names them.
      tile: blocks of the kernel, which chunks are a multiple of where they can.
      axis_sizes: of the two mesh axes of the sequence, where there are two.

    >>> print(code("zigzag", "ring", 8, 4096, has_documents=False))
    import jax
    from jax.sharding import AxisType
    <BLANKLINE>
    from plait import ContextParallel, Zigzag
    <BLANKLINE>
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    cp = ContextParallel(Zigzag(8), "context")
    <BLANKLINE>
    <BLANKLINE>
    def put(batch):
        \"""Arrays [rows, 4096] of the host, in source order, onto the mesh in the layout's.\"""
        return cp.device_put(batch, mesh)
    <BLANKLINE>
    <BLANKLINE>
    def attend(q, k, v):
        \"""A layer's attention, in the order of the layout, under jax.set_mesh(mesh).\"""
        return cp.attention(q, k, v, strategy="ring")
    <BLANKLINE>
    """
    per_batch = layout not in LAYOUTS
    fixed = "Contiguous" if per_batch else LAYOUTS[layout].__name__
    names = ["ContextParallel", fixed]
    body, packing = _FIXED, None
    if layout == "balanced":
        body, packing = _BALANCED, "balance_segments"
    elif layout == "zigzag documents":
        body, packing = _ZIGZAG_DOCUMENTS, "pack"
        names.append("Placed")
    imports = ["import numpy as np"] if per_batch else []
    imports += ["from jax.sharding import AxisType", "", f"from plait import {', '.join(names)}"]
    imports += [f"from plait.packing import {packing}"] if packing else []

    sizes = axis_sizes or (ranks,)
    axes = ("ring", "heads") if axis_sizes else ("context",)
    extra = ["segment_ids"] if has_documents else []
    arguments = [f"segment_ids={name}" for name in extra]
    if per_batch:
        extra.append("positions")
        arguments.append("source_positions=positions")
    return (_MESH + body + _ATTEND).format(
        imports="\n".join(imports),
        sizes=_tuple(sizes),
        axes=_tuple(axes),
        types=", ".join(["AxisType.Auto"] * len(axes)) + ("," if len(axes) == 1 else ""),
        axis_name=_tuple(axes) if axis_sizes else _quoted(axes[0]),
        layout=f"{fixed}({ranks})",
        ranks=ranks,
        length=sequence_length,
        chunk=chunk_of(ranks, sequence_length, tile),
        step=2 * ranks,
        parameters="".join(f", {name}" for name in extra),
        arguments="".join(f", {argument}" for argument in arguments),
        strategy=strategy,
    )


def _quoted(value: int | str) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _tuple(values: tuple[int, ...] | tuple[str, ...]) -> str:
    inside = ", ".join(map(_quoted, values))
    return f"({inside},)" if len(values) == 1 else f"({inside})"
