"""Words and figures for display: text cut and cleaned, rates, p-values, settings; nothing here escapes HTML."""

from __future__ import annotations

import unicodedata
from typing import Any

LONGEST_TEXT = 140
CONTROL = ("Cc", "Cs")  # control characters and lone surrogates, which HTML has no way to hold


def short(text: Any, most: int = LONGEST_TEXT) -> str:
    """Return text for display: control characters become spaces, and what is longer than ``most`` ends in …"""
    text = str(text)
    clean = _clean(text[: most + 1]).strip()  # cut first: a title may have 100 kB
    return clean[: most - 1].rstrip() + "…" if len(text) > most else clean


def block(text: str, most: int = 4000) -> str:
    """Return text of several lines for display, such as an error: control characters but line ends become spaces."""
    kept = "\n".join(_clean(line) for line in text[:most].expandtabs().splitlines())
    return kept + "…" if len(text) > most else kept


def _clean(text: str) -> str:
    return "".join(" " if unicodedata.category(c) in CONTROL else c for c in text)


def figure(value: float | None, digits: int = 4) -> str:
    """Return a figure with so many decimals, a whole number as it is; a dash where it is undefined."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    text = f"{abs(value):.1e}" if value and abs(value) < 10.0**-digits else f"{abs(value):.{digits}f}"
    return f"−{text}" if value < 0 else text


def rate(value: float | None, digits: int = 4) -> str:
    """Return a figure between 0 and 1 as papers print it, without the zero before the point."""
    text = figure(value, digits)
    return text.replace("0.", ".", 1) if value is not None and abs(value) < 1 else text


def percent(value: float | None) -> str:
    """Return a relative gain in percent as papers print it, with its sign; a dash where it is undefined."""
    text = figure(value, 2) if value is None else figure(float(value), 2)
    return f"+{text}" if value is not None and value > 0 else text


def p_text(p: float) -> str:
    """Return a p-value for people."""
    return "p < .001" if p < 0.001 else f"p = {rate(p, 3)}"


def show(value: Any) -> str:
    """Return a setting, count or fact for display."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        whole = value.is_integer() or abs(value) >= 9999.5  # which four digits cannot tell without an exponent
        return f"{value:,.0f}" if whole and abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return short(", ".join(show(v) for v in value[:30]) or "none", 400)
    if isinstance(value, dict):
        return short(", ".join(f"{name} {show(v)}" for name, v in list(value.items())[:30]) or "none", 400)
    return short(value, 400)


def setting(value: Any) -> str:
    """Return a setting as it is given on the command line."""
    if value is None or value == "":
        return "–"
    return short(str(value).lower() if isinstance(value, bool) else value, 400)


def joined(names: list[str]) -> str:
    """Return "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
