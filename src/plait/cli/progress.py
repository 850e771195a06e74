"""How far a slow command has come, for whoever watches."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TextIO


def tell(stream: TextIO, line: str) -> None:
    """Show one line, over the last one; nothing where nobody watches."""
    if stream.isatty():
        stream.write(f"\r\x1b[K{line}")
        stream.flush()


@dataclasses.dataclass
class Progress:
    """Says on stderr how far something is, once it has taken `patience` seconds.

    On a terminal one line, drawn over; elsewhere, as in the log of a job, a line now and then.
    """

    patience: float = 1.0
    often: float = 0.2
    seldom: float = 10.0
    _last: float = dataclasses.field(default_factory=lambda: time.monotonic())
    _has_told: bool = False

    def __call__(self, line: str) -> None:
        is_live = sys.stderr.isatty()
        wait = (self.often if is_live else self.seldom) if self._has_told else self.patience
        if time.monotonic() - self._last < wait:
            return
        if is_live:
            tell(sys.stderr, line)
        else:
            print(line, file=sys.stderr)
        self._last, self._has_told = time.monotonic(), True

    def done(self) -> None:
        """Clear the line."""
        if self._has_told:
            tell(sys.stderr, "")
