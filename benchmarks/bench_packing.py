"""How evenly packs of documents of mixed lengths fall on ranks: plait's balance beside others.

Packs of documents with a long tail, drawn with fixed seeds; exact causal attention work within
documents. Nothing is run but the solver, on one core.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np

import pages
from plait import Contiguous, Layout, Placed, Zigzag
from plait.cli.arguments import UserError
from plait.packing import assign, chunk_work, keys_needed, lower_bound

COMMAND = "plait bench packing"
CHUNKS = (16, 8)
REPEATS = 3

# Of all documents, the share between each two lengths, log-uniform there; 0.3% above 64K.
LENGTHS = (16, 1024, 4096, 16384, 65536, 1048576)
SHARES = (0.71, 0.23, 0.047, 0.010, 0.003)


def document_lengths(tokens: int, seed: int) -> np.ndarray:
    """Documents that fill a pack, int64 [documents]: cut at a quarter of it, the last at its end.

    >>> document_lengths(4096, seed=0).sum(), document_lengths(4096, seed=0).max() <= 1024
    (np.int64(4096), np.True_)
    """
    generator = np.random.default_rng(seed)
    ends = np.log2(LENGTHS)
    lengths = np.zeros(0, np.int64)
    while lengths.sum() < tokens:
        band = generator.choice(len(SHARES), size=256, p=SHARES)
        drawn = ends[band] + (ends[band + 1] - ends[band]) * generator.random(256)
        # Rounded up, so that a band begins above the length at which the last one ends.
        drawn = np.ceil(2**drawn).astype(np.int64)
        lengths = np.concatenate([lengths, np.minimum(drawn, tokens // 4)])
    stops = np.minimum(np.cumsum(lengths), tokens)
    lengths = np.diff(stops, prepend=0)
    return lengths[lengths > 0]


def measure(ranks: int, tokens_per_rank: int, seed: int) -> dict[str, Any]:
    """Figures of one pack, as plain data."""
    tokens = ranks * tokens_per_rank
    lengths = document_lengths(tokens, seed)
    ids = np.repeat(np.arange(1, lengths.size + 1, dtype=np.int32), lengths)
    finest = chunk_work(ids, tokens_per_rank // max(CHUNKS))

    def over_mean(layout: Layout) -> float:
        """The heaviest rank over the mean, from the work of the finest chunks."""
        of_chunks = finest[layout.positions(finest.size)].reshape(ranks, -1).sum(axis=1)
        return float(of_chunks.max() / of_chunks.mean())

    figures: dict[str, Any] = {
        "documents": lengths.size,
        "contiguous": over_mean(Contiguous(ranks)),
        "zigzag": over_mean(Zigzag(ranks)),
        "moved": tokens - tokens_per_rank,
        "needed": {"zigzag": keys_needed(Zigzag(ranks), ids).tolist()},
    }
    for chunks in CHUNKS:
        works = finest.reshape(ranks * chunks, -1).sum(axis=1)
        seconds = []
        for _ in range(REPEATS):
            start = time.process_time()
            of = assign(works, ranks)
            seconds.append(time.process_time() - start)
        heaviest = np.bincount(of, works).max()
        figures[str(chunks)] = {
            "over_mean": float(heaviest / works.sum() * ranks),
            "over_bound": float(heaviest / lower_bound(works, ranks)),
            "seconds": min(seconds),
        }
        if chunks == CHUNKS[0]:
            figures["needed"]["balance"] = keys_needed(Placed(of.tolist()), ids).tolist()
    return figures


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    packs = len(next(iter(results["cases"].values())))
    lines = [
        f"{packs} packs of each size; the busiest rank's causal attention work over the mean, mean "
        "and worst over packs. With 8 chunks a rank one chunk can be more than a rank's share: "
        "there over the lower bound. The solver's CPU time, median and worst over packs, each "
        f"the best of {REPEATS}; NumPy {results['numpy']}.",
        "",
        "| ranks x tokens | contiguous | zigzag | balance, 16 chunks a rank | 8 chunks, over the "
        "bound | solver, ms: 16 chunks | 8 chunks |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, figures in results["cases"].items():
        over = " | ".join(
            f"{statistics.mean(one[layout] for one in figures):.2f}"
            for layout in ("contiguous", "zigzag")
        )
        even = " | ".join(
            f"{statistics.mean(values):.5f}, {max(values):.5f}"
            for values in (
                [one["16"]["over_mean"] for one in figures],
                [one["8"]["over_bound"] for one in figures],
            )
        )
        times = " | ".join(
            f"{statistics.median(values):.1f}, {max(values):.1f}"
            for values in (
                [1e3 * one[str(chunks)]["seconds"] for one in figures] for chunks in CHUNKS
            )
        )
        lines.append(f"| {name} | {over} | {even} | {times} |")
    lines += [
        "",
        "The tokens of other ranks whose keys a rank's queries see, over those that an all-gather "
        "or a ring brings it: the mean over ranks, and the rank that needs most, each the mean "
        "over packs.",
        "",
        "| ranks x tokens | zigzag | balance, 16 chunks a rank |",
        "| --- | --- | --- |",
    ]
    for name, figures in results["cases"].items():
        needed = " | ".join(
            ", ".join(f"{statistics.mean(shares):.1%}" for shares in _needed(figures, layout))
            for layout in ("zigzag", "balance")
        )
        lines.append(f"| {name} | {needed} |")
    return "\n".join(lines)


def _needed(figures: list[dict[str, Any]], layout: str) -> list[list[float]]:
    """Needed over moved, of the mean rank and of the one that needs most: a number a pack."""
    return [
        [of(one["needed"][layout]) / one["moved"] for one in figures]
        for of in (statistics.mean, max)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256], help="context ranks"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[8192, 16384], help="tokens of each rank"
    )
    parser.add_argument("--packs", type=int, default=20, help="packs of each size")
    pages.add_outputs(parser, "packing.md")


def run(arguments: argparse.Namespace) -> int:
    pages.present(arguments, COMMAND, "packing.md", "cases", _measured, table)
    return 0


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    _check(arguments)
    cases: dict[str, Any] = {}
    for ranks in arguments.ranks:
        for tokens in arguments.tokens:
            start = time.perf_counter()
            name = f"{ranks} x {tokens:,}"
            cases[name] = [measure(ranks, tokens, seed) for seed in range(arguments.packs)]
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return {"numpy": np.__version__, "cases": cases}


def _check(arguments: argparse.Namespace) -> None:
    """UserError, before the slow part, for numbers that make no pack."""
    multiple = max(CHUNKS)
    for ranks in arguments.ranks:
        if ranks < 2:
            raise UserError(f"{COMMAND}: --ranks is {ranks}; it needs to be at least 2: 8 works")
    for tokens in arguments.tokens:
        if tokens < 1 or tokens % multiple:
            nearest = max(-(-tokens // multiple), 1) * multiple
            raise UserError(
                f"{COMMAND}: --tokens is {tokens}; each rank holds {multiple} chunks, so it needs "
                f"a multiple of {multiple}: {nearest} works"
            )
    if arguments.packs < 1:
        raise UserError(f"{COMMAND}: --packs is {arguments.packs}; it needs to be at least 1")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))
