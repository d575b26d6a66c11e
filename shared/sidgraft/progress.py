"""Progress for people: a bar on a terminal, plain lines with rate and remaining time elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 5.0
SPEAKS = os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Print one line for the user, to standard error, at once; a bar being drawn stays whole.

    Of several processes that train together the first one speaks for all.
    """
    if not SPEAKS:
        return
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


class Progress:
    """Count work done and show it; use as a context manager.

    On a terminal this is a tqdm bar. Where standard error is not a terminal it prints at most one line every
    five seconds, and one at the end: ``embed  320/1200 items  27%  64.0 items/s  0:14 left  loss=2.31``.
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = 0
        self.figures: dict[str, str] = {}
        self.started = self.printed = time.monotonic()
        self.bar = tqdm(total=total, desc=what, unit=f" {unit}") if SPEAKS and sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
        elif time.monotonic() - self.started > SECONDS_BETWEEN_LINES:
            self._print()

    def update(self, n: int = 1, **figures: float | str) -> None:
        """Add ``n`` units of work; ``figures`` are shown beside (numbers to four significant digits)."""
        self.done += n
        self.figures.update({k: v if isinstance(v, str) else f"{v:.4g}" for k, v in figures.items()})
        if self.bar is not None:
            self.bar.set_postfix(self.figures, refresh=False)
            self.bar.update(n)
        elif time.monotonic() - self.printed > SECONDS_BETWEEN_LINES:
            self._print()

    def _print(self) -> None:
        self.printed = time.monotonic()
        rate = self.done / max(self.printed - self.started, 1e-9)
        left = (self.total - self.done) / rate if rate > 0 else 0.0
        share = 100 * self.done / max(self.total, 1)
        figures = "".join(f"  {k}={v}" for k, v in self.figures.items())
        say(
            f"{self.what}  {self.done}/{self.total} {self.unit}  {share:.0f}%  {rate:.1f} {self.unit}/s"
            f"  {int(left) // 60}:{int(left) % 60:02d} left{figures}"
        )


def track(items: Iterable[T], what: str, total: int, unit: str) -> Iterator[T]:
    """Yield ``items`` while showing how many of ``total`` are done."""
    with Progress(what, total, unit) as progress:
        for item in items:
            yield item
            progress.update()
