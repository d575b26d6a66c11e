"""What each benchmark checks of its answers: the keys of a result's `equal`, up to their first comma.

True: it must hold, or there is no result. A number: the least that is aimed at; less is shown as missed. None: shown.
`measure.report` refuses a result with other keys; `all.py --stale` lists the records from before a check, among others.
"""

from __future__ import annotations

from typing import Any

PEERS = ("semantic-id", "faiss", "scikit-learn")  # of quantize

CHECKS: dict[str, dict[str, Any]] = {
    "decode": {
        "same beams in float32": True,
        "same scores in float32": True,
        "as many float32 beams kept in bfloat16 as the peer's but for two": True,
        "beams shared in float32": 0.98,
        "beams shared in bfloat16": 0.98,
        "float32 beams that our bfloat16 keeps": None,
        "float32 beams that the peer's bfloat16 keeps": None,
        "largest difference of scores in float32": None,
    },
    "constraint": {"same scores": True, "same nodes": True},
    "ground": {
        "same gradient in float32": True,
        "gradient cosine in float32": None,
        "gradient cosine in bfloat16": 0.999,
        "gradient cosine of ours in bfloat16 with float32": None,
        "gradient cosine of the peer's in bfloat16 with float32": None,
        "loss difference in float32": None,
        "loss difference in bfloat16": None,
    },
    "finetune": {"same loss in float32": True, "loss difference in float32": None},
    "quantize": {
        "error": None,
        "collisions": None,
        **{f"error of {peer}": None for peer in PEERS},
        **{f"collisions of {peer}": None for peer in PEERS},
        **{f"error at most 1 % above {peer}'s": True for peer in PEERS if peer != "semantic-id"},
        **{f"collisions at most 10 % above {peer}'s": True for peer in PEERS},
        "worse within that": None,
    },
    "embed": {"cosines at least 0.999": True, "lowest cosine": 0.999},
    "parquet": {"same table": True},
    "pipeline": {"all stages wrote their artifacts": True, "same recommendations": True},
    "startup": {"prepare loads no torch": True, "report loads no torch": True},
    "growth": {"every item came through": True},
}


def checked(equal: dict[str, Any]) -> set[str]:
    """The checks that a result holds: its keys without the sizes behind their first comma."""
    return {key.partition(",")[0] for key in equal}


def missing(name: str, equal: dict[str, Any]) -> list[str]:
    """The checks of a benchmark that a result of it does not hold."""
    return [check for check in CHECKS[name] if check not in checked(equal)]


def targets(name: str, equal: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """The values of a result that have a least one to reach, with it."""
    goals = {key: CHECKS[name].get(key.partition(",")[0]) for key in equal}
    return {key: (equal[key], goal) for key, goal in goals.items() if goal is not None and not isinstance(goal, bool)}
