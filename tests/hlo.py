"""What a compiled program does, read from its HLO text."""

import collections
import math
import re

import jax

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
SEQUENTIAL = ("gather", "scatter", "while", "sort")
BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64}


def text(fn, *args):
    return jax.jit(fn).lower(*args).compile().as_text()


def operations(hlo):
    """How often each kind of operation stands in the program, fusions and loops included."""
    kinds = re.findall(r"^\s*(?:ROOT )?%\S+ = .*? ([a-z][a-z0-9-]*)\(", hlo, flags=re.MULTILINE)
    return collections.Counter(kind.removesuffix("-start") for kind in kinds)


def collectives(hlo):
    """(kind, bytes of the result on one device) of every collective, sorted."""
    found = []
    for line in hlo.splitlines():
        match = re.match(r"\s*(?:ROOT )?%\S+ = (.*?) ([a-z][a-z0-9-]*)\(", line)
        if match and match[2].removesuffix("-start") in COLLECTIVES:
            found.append((match[2].removesuffix("-start"), _bytes(match[1])))
    return sorted(found)


def sequential(hlo):
    """The operations that a move must not contain, with their counts."""
    counts = operations(hlo)
    return {kind: counts[kind] for kind in SEQUENTIAL if counts[kind]}


def _bytes(shapes):
    total = 0
    for dtype, dimensions in re.findall(r"([a-z][a-z0-9]*)\[([0-9,]*)\]", shapes):
        bits = BITS.get(dtype) or int(re.search(r"\d+", dtype)[0])
        total += bits * math.prod(int(d) for d in dimensions.split(",") if d) // 8
    return total
