"""Checks of arguments, and of the figures of a training: what was found, what was expected, what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


def one_of(name: str, value: str, options: Iterable[str]) -> str:
    """Return ``value`` when it is one of ``options``; raise ValueError that suggests the nearest otherwise."""
    options = list(options)
    if value in options:
        return value
    near = difflib.get_close_matches(value, options, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"{name} is {value!r}, expected one of {', '.join(options)}.{hint}")


def positive(**values: float) -> None:
    """Raise ValueError that names every argument that is not greater than zero."""
    wrong = [f"{name}={value}" for name, value in values.items() if not value > 0]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: expected a number greater than zero.")


def not_negative(**values: float) -> None:
    """Raise ValueError that names every argument that is less than zero."""
    wrong = [f"{name}={value}" for name, value in values.items() if not value >= 0]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: expected zero or a number greater than zero.")


def finite(what: str, value: float, *, epoch: int, batch: int, batches: int, advice: str) -> None:
    """Raise ValueError where a figure of training is no number: at which step, epoch and batch, from 1."""
    if not math.isfinite(value):
        step = (epoch - 1) * batches + batch
        raise ValueError(f"{what} became {value} at step {step} (epoch {epoch}, batch {batch} of {batches}): {advice}.")


def widths(name: str, text: str) -> list[int]:
    """Return the whole numbers above zero of a comma-separated list, in its order, or raise ValueError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ValueError(f"{name} is {text!r}, expected whole numbers above zero separated by commas, such as 512,256.")
    return found


def whole_numbers(name: str, text: str) -> list[int]:
    """Return the distinct whole numbers of a comma-separated list, sorted; empty text gives none.

    Raises ValueError for anything else.
    """
    try:
        return sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}, expected whole numbers separated by commas, such as 5,10.") from error
