"""The gate before publishing: checks with a limit each, and the decision that they make, for machines and people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sidgraft.artifacts import Draft
from sidgraft.metrics import ndcg_at, recall_at

METRICS = {"ndcg": ndcg_at, "recall": recall_at}


@dataclass(frozen=True)
class Check:
    """A figure that must be at least or at most a limit."""

    name: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the figure keeps its limits; one that is no number does not."""
        if not math.isfinite(self.value):
            return False
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    def sentence(self) -> str:
        """The check in words, such as `collision rate is 0.4, at most 0.3 was expected`."""
        limit = f"at least {self.least:.6g}" if self.least is not None else f"at most {self.most:.6g}"
        return f"{self.name} is {self.value:.6g}, {limit} was expected"


def figure(item_ids: Sequence[Sequence[str]], targets: Sequence[str], metric: str, k: int) -> float:
    """Mean metric over users, from their recommended items, best first, and the one relevant item of each."""
    lists = zip(item_ids, targets, strict=True)
    ranks_U = [list(items).index(target) + 1 if target in items else 0 for items, target in lists]
    return float(METRICS[metric](np.asarray(ranks_U), k).mean())


def invalid_lists(item_ids: Sequence[Sequence[str]], known: set[str]) -> int:
    """How many recommendation lists are empty, repeat an item or name one that the catalog lacks."""
    return sum(not items or len(set(items)) < len(items) or not known.issuperset(items) for items in item_ids)


def write_decision(draft: Draft, title: str, decision: dict[str, Any], details: list[str]) -> None:
    """Write `decision.json`, and the same as `decision.md` for the user interface."""
    draft.write_json("decision.json", decision)
    lines = [f"# {title}", "", *(f"- {reason}" for reason in decision["reasons"]), "", *details]
    (draft.path / "decision.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def table(checks: Sequence[Check]) -> list[str]:
    """The checks as a Markdown table."""
    rows = [
        f"| {c.name} | {c.value:.6g} | {'at least' if c.least is not None else 'at most'}"
        f" {(c.least if c.least is not None else c.most):.6g} | {'yes' if c.passed else '**no**'} |"
        for c in checks
    ]
    return ["| check | found | expected | kept |", "|---|---|---|---|", *rows]
