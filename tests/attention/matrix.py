"""Every combination of strategy, layout, mask, packing, heads and dtype that attention is held to.

`python tests/attention/matrix.py` writes the table of docs/attention.md from it.
"""

import dataclasses
import itertools
import pathlib
import sys

from plait import (
    Causal,
    Chunked,
    Contiguous,
    Full,
    HalfSwap,
    Placed,
    PrefixLM,
    SlidingWindow,
    Striped,
    Zigzag,
)

RANKS = 4
STRATEGIES = ("all_gather", "ring", "ulysses", "usp")
LAYOUTS = {
    "contiguous": Contiguous(RANKS),
    "zigzag": Zigzag(RANKS),
    "half swap": HalfSwap(RANKS),
    "striped": Striped(RANKS, 3),
    "placed": Placed((0, 1, 2, 3, 3, 0, 1, 2, 2, 0, 1, 3)),
    "per batch": Placed((2, 1, 0, 3, 3, 0, 2, 1, 1, 0, 2, 3)),  # its positions given as data
}
MASKS = {
    "causal": Causal(),
    "full": Full(),
    "window": SlidingWindow(20),
    "both ways": SlidingWindow(9, 14),
    "chunked": Causal() & Chunked(24),
    "prefix": PrefixLM(17),
    "joined": SlidingWindow(11) | (Causal() & PrefixLM(5)),
}
HEADS = {  # heads, kv_heads, head_dim, v_head_dim
    "MHA": (4, 4, 8, 8),
    "GQA": (8, 2, 8, 8),
    "MQA": (4, 1, 8, 8),
    "MLA": (4, 4, 12, 8),
    "6 over 12": (12, 6, 8, 8),
}
PACKED = (False, True)
DTYPES = ("float32", "bfloat16")
EXTRAS = ("", "softcap", "sinks")


@dataclasses.dataclass(frozen=True)
class Cell:
    strategy: str
    layout: str
    mask: str
    heads: str
    packed: bool
    dtype: str
    extra: str

    def __str__(self):
        packed = "packed" if self.packed else "whole"
        words = (self.strategy, self.layout, self.mask, self.heads, packed, self.dtype, self.extra)
        return "-".join(word for word in words if word)


FACTORS = (STRATEGIES, tuple(LAYOUTS), tuple(MASKS), tuple(HEADS), PACKED, DTYPES, EXTRAS)


def covering(strength):
    """Cells in which every combination of `strength` factors' values stands: greedy, repeatable."""
    columns = list(itertools.combinations(range(len(FACTORS)), strength))
    missing = {
        (chosen, values)
        for chosen in columns
        for values in itertools.product(*(range(len(FACTORS[c])) for c in chosen))
    }
    cells = []
    while missing:
        chosen, values = min(missing)
        row = dict(zip(chosen, values, strict=True))
        for factor in range(len(FACTORS)):
            if factor not in row:
                row[factor] = max(
                    range(len(FACTORS[factor])),
                    key=lambda v: (_gain(row | {factor: v}, columns, missing), -v),
                )
        missing -= _covered(row, columns)
        cells.append(Cell(*(FACTORS[f][row[f]] for f in range(len(FACTORS)))))
    return cells


def _covered(row, columns):
    return {(c, tuple(row[f] for f in c)) for c in columns if all(f in row for f in c)}


def _gain(row, columns, missing):
    return len(_covered(row, columns) & missing)


PAIRS = covering(2)


def table():
    """Markdown: each strategy by layout, with how many cells the whole test holds to the oracle."""
    cells = covering(3)
    lines = [
        "| | " + " | ".join(LAYOUTS) + " |",
        "| --- |" + " --- |" * len(LAYOUTS),
    ]
    for strategy in STRATEGIES:
        counts = [
            sum(cell.strategy == strategy and cell.layout == layout for cell in cells)
            for layout in LAYOUTS
        ]
        lines.append(f"| `{strategy}` | " + " | ".join(f"exact, {n}" for n in counts) + " |")
    return "\n".join(lines)


def main():
    page = pathlib.Path(__file__).parents[2] / "docs" / "attention.md"
    text = page.read_text()
    start, end = "<!-- attention matrix -->\n", "<!-- end of attention matrix -->"
    before, rest = text.split(start)
    page.write_text(before + start + table() + "\n" + end + rest.split(end)[1])


if __name__ == "__main__":
    sys.exit(main())
