"""Arguments whose errors are one line, with the value that was given and one that works."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from plait import (
    Causal,
    Chunked,
    Contiguous,
    HalfSwap,
    Mask,
    PrefixLM,
    SlidingWindow,
    Striped,
    Zigzag,
)

LAYOUTS: dict[str, type[Contiguous | Zigzag | HalfSwap | Striped]] = {
    "contiguous": Contiguous,
    "zigzag": Zigzag,
    "half-swap": HalfSwap,
    "striped": Striped,
}


class UserError(Exception):
    """What the user is to be told, in one line."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError` where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}")


def integer(flag: str, least: int, most: int, works: int) -> Callable[[str], int]:
    """The `type` of an argument that is an integer from `least` to `most`.

    >>> integer("--ranks", 2, 16, works=8)("0")
    Traceback (most recent call last):
    argparse.ArgumentError: --ranks is 0; it needs to be an integer from 2 to 16: 8 works
    """

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            shown = repr(text) if value is None else value
            # An ArgumentTypeError would be printed behind "argument --ranks:".
            raise argparse.ArgumentError(
                None,
                f"{flag} is {shown}; it needs to be an integer from {least} to {most}: "
                f"{works} works",
            )
        return value

    return parse


def number(flag: str, works: float) -> Callable[[str], float]:
    """The `type` of an argument that is a number above 0.

    >>> number("--memory", works=4)("-1")
    Traceback (most recent call last):
    argparse.ArgumentError: --memory is -1; it needs to be a number above 0: 4 works
    """

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            shown = repr(text) if math.isnan(value) else text
            raise argparse.ArgumentError(
                None, f"{flag} is {shown}; it needs to be a number above 0: {works:g} works"
            )
        return value

    return parse


def names(flag: str, known: Iterable[str], works: str) -> Callable[[str], list[str]]:
    """The `type` of an argument that is one or more known names, with commas between.

    >>> names("--layout", ["zigzag", "striped"], works="zigzag")("zigzag,stripe")
    Traceback (most recent call last):
    argparse.ArgumentError: --layout is 'stripe'; it needs to be one or more of zigzag, striped: \
zigzag works
    """
    known = tuple(known)

    def parse(given: str) -> list[str]:
        found = [name.strip() for name in given.split(",")]
        for name in found:
            if name not in known:
                raise argparse.ArgumentError(
                    None,
                    f"{flag} is {name!r}; it needs to be one or more of {', '.join(known)}: "
                    f"{works} works",
                )
        return found

    return parse


MASKS: dict[str, Callable[[int], Mask]] = {
    "window": SlidingWindow,
    "chunked": lambda size: Causal() & Chunked(size),
    "prefix": PrefixLM,
}


def mask(flag: str) -> Callable[[str], Mask]:
    """The `type` of an argument that is a mask.

    >>> mask("--mask")("window:127")
    SlidingWindow(left=127, right=0)
    >>> mask("--mask")("window")
    Traceback (most recent call last):
    argparse.ArgumentError: --mask is 'window'; it needs to be causal, window:TOKENS, \
chunked:TOKENS or prefix:TOKENS: window:512 works
    """

    def parse(text: str) -> Mask:
        name, _, tokens = text.partition(":")
        if text == "causal":
            return Causal()
        if name in MASKS and tokens.isdecimal() and int(tokens) > 0:
            return MASKS[name](int(tokens))
        works = f"{name}:512" if name in MASKS else "causal"
        raise argparse.ArgumentError(
            None,
            f"{flag} is {text!r}; it needs to be causal, window:TOKENS, chunked:TOKENS or "
            f"prefix:TOKENS: {works} works",
        )

    return parse


def require_extra(command: str, extra: str, packages: Sequence[str]) -> None:
    """UserError, naming the extra, where not all of its packages are installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"{command}: {' and '.join(missing)} {verb} not installed: pip install 'plait[{extra}]'"
        )


def writable(command: str, flag: str, given: str, works: str) -> Path:
    """The file to write, its folder made if needed; UserError where none can be written."""
    path = Path(given)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(
            f"{command}: {flag} is {given!r}; it can't be written ({error.strerror}): "
            f"{works} works where the current folder can be written to"
        ) from None
    return path
