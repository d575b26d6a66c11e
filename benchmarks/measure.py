"""What the benchmarks share: alternating timing, the machine's measured roofs, and one way to report.

Every benchmark is `python benchmarks/NAME.py [--quick] [--json]`: a table for people and, with --json, one JSON object
as the last line. A result is the ratio of a peer's median time to ours, both measured in turns in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from checks import CHECKS, checked, targets


def options(description: str | None, *, data: bool = False) -> argparse.Namespace:
    """Parse --quick and --json, and --data where a benchmark takes it."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a smaller size of the same comparison, under a minute (but for inputs that a first run makes)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    if data:
        parser.add_argument("--data", metavar="FOLDER", help="compare on its items.jsonl and sequences.jsonl, too")
    return parser.parse_args()


def medians(runs: Mapping[str, Callable[[], Any]], rounds: int, *, warm: bool = True) -> dict[str, float]:
    """Median seconds of each function, called in turns ``rounds`` times, after one call each that does not count."""
    if warm:
        for run in runs.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def threads() -> int:
    """Threads that this process computes with: of the processors that it may use, which can be fewer than there are."""
    return int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))


def flops_roof(dtype: Any) -> float:
    """Floating point operations a second of a large matrix product in ``dtype``, the best of a few."""
    import torch

    size = 2048
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = min(medians({"product": lambda: a @ b}, 1)["product"] for _ in range(5))
    return 2 * size**3 / best


def bandwidth_roof() -> float:
    """Bytes a second that a large sum reads, the best of a few."""
    import torch

    data = torch.ones(64 * 1024 * 1024)
    best = min(medians({"sum": data.sum}, 1)["sum"] for _ in range(5))
    return 4 * len(data) / best


def report(
    args: argparse.Namespace,
    name: str,
    ratios: Mapping[str, tuple[float, float]],
    *,
    equal: Mapping[str, Any],
    roof: Mapping[str, float],
    seconds: Mapping[str, float],
    about: str,
) -> None:
    """Print the result: a table, and with --json the object that `make bench` collects.

    ``ratios`` are by peer: how many times faster we are, and the goal. ``equal`` says what was checked to be the same,
    under the names in `checks`: a check that is False ends the benchmark, since a faster answer that differs is not an
    answer, and so does a name that is missing or not known there.
    """
    if checked(dict(equal)) != set(CHECKS[name]):
        raise SystemExit(f"{name}: checked {sorted(checked(dict(equal)))}, checks.py names {sorted(CHECKS[name])}.")
    wrong = [what for what, value in equal.items() if value is False]
    if wrong:
        raise SystemExit(f"{name}: not the same as the peer: {', '.join(wrong)}. All that was compared: {dict(equal)}")
    print(f"\n{name}: {about}")
    width = max(map(len, seconds))
    for who, value in seconds.items():
        print(f"  {who:<{width}}  {value:.4g} s")
    for peer, (ratio, goal) in ratios.items():
        print(f"  {ratio:.2f} times faster than {peer} (goal {goal:g})")
    for what, (value, least) in targets(name, dict(equal)).items():
        print(f"  {what}: {value:.4g} (goal {least:g}{'' if value >= least else ', not reached'})")
    for label, values in (("equal", equal), ("roof", roof)):
        print(
            f"  {label}: "
            + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        )
    if args.json:
        first = next(iter(ratios.values()))
        print(
            json.dumps(
                {
                    "name": name,
                    "ratio": round(first[0], 3),
                    "goal": first[1],
                    "ratios": {peer: [round(ratio, 3), goal] for peer, (ratio, goal) in ratios.items()},
                    "equal": dict(equal),
                    "roof": {k: round(v, 4) for k, v in roof.items()},
                    "seconds": {k: round(v, 5) for k, v in seconds.items()},
                    "about": about,
                    "quick": args.quick,
                    "threads": threads(),
                }
            )
        )
