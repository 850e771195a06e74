"""What a plan says, as text and as JSON types."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import plait
from plait.attention.cost import Prices
from plait.cli.figures import Column, megabytes, table
from plait.cli.plan.compare import Compared, Plan
from plait.cli.plan.estimates import Option

TRAINING = 3
"""FLOPs of forward and backward over those of forward: two products of matrices, and four more."""

WIDTH = 100

LEGEND = (
    "Busiest / mean: visible pairs that all ranks wait for, of the busiest rank, in a ring of the "
    "busiest of each step, over the mean rank's; worst, of the worst row. Tiles / pairs: what the "
    "kernel computes over what is visible. Sends and holds: keys, values, queries and outputs of "
    "a layer and row, forward. The estimate is a stated model's, of a layer's forward pass, from "
    "tiles and bytes; nothing was run."
)


def as_text(plan: Plan) -> str:
    """Tables and sentences for the terminal."""
    prices, taken = plan.prices, plan.recommended.option
    memory = prices.machine.memory_bytes

    def verdict(option: Option) -> str:
        if option is taken:
            return "recommended"
        return "" if option.held_bytes <= memory else "does not fit"

    columns = (
        Column("busiest\n/ mean", lambda x: f"{x[1].waits:.3f}"),
        Column("worst", lambda x: f"{x[1].worst_waits:.3f}"),
        Column("tiles\n/ pairs", lambda x: f"{x[1].tiles_over_pairs:.2f}"),
        Column("TFLOPs of\nbusiest", lambda x: f"{prices.flops(x[1].busiest_pairs) / 1e12:,.4g}"),
        Column("sends,\nMB", lambda x: megabytes(x[1].sent_bytes)),
        Column("holds,\nMB", lambda x: megabytes(x[1].held_bytes)),
        Column("padding", lambda x: f"{x[0].padding:.2%}"),
        Column("estimate,\nms", lambda x: f"{1e3 * x[1].seconds:,.3f}"),
        Column("", lambda x: verdict(x[1]), is_text=True),
    )
    rows = {option.name: (one, option) for one in plan.layouts for option in one.options}
    forward = prices.flops(plan.mean_pairs)
    advice = plan.recommended.reason
    if taken:
        advice = f"Recommended: {taken.name}. {advice}"
    sentences = [
        LEGEND,
        f"Attention FLOPs of the mean rank, exact, of a layer and row: {_tera(forward)} forward, "
        f"{_tera(TRAINING * forward)} in training, {TRAINING} times that.",
        *(f"{name} cannot be had: {why_not}." for name, why_not in plan.refused.items() if why_not),
        advice,
    ]
    return "\n\n".join(
        [
            *(textwrap.fill(part, WIDTH) for part in (_asked(plan), plan.source)),
            table(columns, rows, "layout, strategy"),
            *(textwrap.fill(part, WIDTH) for part in sentences),
            *([textwrap.indent(plan.program.rstrip(), "    ")] if plan.program else []),
        ]
    )


def _asked(plan: Plan) -> str:
    """The question in a line or two."""
    prices, shapes, machine = plan.prices, plan.prices.shapes, plan.prices.machine
    return (
        f"{prices.ranks} ranks, rows of {prices.length:,} tokens, causal; {shapes.heads} heads and "
        f"{shapes.kv_heads} of keys, head_dim {shapes.head_dim}, of values {shapes.v_head_dim}, "
        f"{shapes.itemsize} bytes a number; {machine.flops_per_second / 1e12:g} TFLOP/s, "
        f"{machine.network_bytes_per_second / 1e9:g} GB/s, {machine.memory_bytes / 2**30:g} GiB "
        f"for keys; tiles of {plan.kernel.q_block} by {plan.kernel.k_block}."
    )


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.4g} TFLOPs"


def as_json(plan: Plan) -> dict[str, Any]:
    """What was found as JSON types; lists are by row, or by row and rank."""
    prices, taken = plan.prices, plan.recommended.option
    forward = prices.flops(plan.mean_pairs)
    return {
        "plait": plait.__version__,
        "ranks": prices.ranks,
        "sequence_length": prices.length,
        "axes": list(plan.axes) if plan.axes else None,
        "tile": [plan.kernel.q_block, plan.kernel.k_block],
        "shapes": dataclasses.asdict(prices.shapes),
        "machine": dataclasses.asdict(prices.machine),
        "documents": {
            "source": plan.source,
            "packed": plan.packed.documents,
            "cut": plan.packed.cut,
            "lengths": [row.tolist() for row in plan.packed.rows],
        },
        "mean_rank_flops": {"forward": forward, "training": TRAINING * forward},
        "refused": {name: why_not for name, why_not in plan.refused.items() if why_not},
        "layouts": {one.candidate.name: _of_layout(one, prices) for one in plan.layouts},
        "recommended": {
            "layout": taken.layout if taken else None,
            "strategy": taken.strategy if taken else None,
            "reason": plan.recommended.reason,
            "code": plan.program,
        },
    }


def _of_layout(one: Compared, prices: Prices) -> dict[str, Any]:
    return {
        "per_batch": one.candidate.per_batch,
        "padding": one.padding,
        "visible_pairs": one.pairs.tolist(),
        "forward_flops": [[prices.flops(pairs) for pairs in row] for row in one.pairs.tolist()],
        "strategies": {
            option.strategy: {
                "busiest_over_mean": option.waits,
                "worst_busiest_over_mean": option.worst_waits,
                "tiles_over_pairs": option.tiles_over_pairs,
                "busiest_rank_forward_flops": prices.flops(option.busiest_pairs),
                "sent_bytes": option.sent_bytes,
                "held_bytes": option.held_bytes,
                "fits": option.held_bytes <= prices.machine.memory_bytes,
                "estimated_seconds": option.seconds,
            }
            for option in one.options
        },
    }
