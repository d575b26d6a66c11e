"""Variants of a study, times seeds: an initialization, a grounding corpus, tasks of fine-tuning (`mean+gti+lc-rec`)."""

from __future__ import annotations

from typing import Any

from sidgraft import objectives
from sidgraft.checks import one_of

INITIALIZATIONS = ("mean", "random", "gaussian", "centroid", "centroid-shuffled", "description")
CORPORA = ("none", *objectives.CORPORA)


def plan_variants(variants: list[str], seeds: list[int]) -> list[dict[str, Any]]:
    """Return one entry a variant and seed, with what differs and a label for people.

    The keys are variant, initialization, corpus, tasks, seed and label. A variant is named
    ``INITIALIZATION[+CORPUS][+TASKS]``, where TASKS is ``lc-rec`` or a mixture that names ``next-item``. Raises
    ValueError for unknown names, repeated variants or seeds, and empty lists. Seeds may arrive as floats from a
    pipeline's list.
    """
    if not variants or not seeds:
        raise ValueError("a study needs at least one variant and one seed.")
    for name, values in (("variants", variants), ("seeds", [str(seed) for seed in seeds])):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise ValueError(f"{name} holds {', '.join(twice)} more than once.")
    if any(int(seed) != seed for seed in seeds):
        raise ValueError(f"seeds is {seeds}, expected whole numbers.")
    plan = []
    for name in variants:
        settings = _settings(name)
        for seed in map(int, seeds):
            plan.append(
                {
                    "variant": name,
                    **settings,
                    "seed": seed,
                    "label": f"{name}, seed {seed}",
                }
            )
    return plan


def _settings(name: str) -> dict[str, str]:
    """What a variant's name says of its initialization, corpus and tasks."""
    initialization, *more = name.split("+")
    one_of(f"the initialization of variant {name!r}", initialization, INITIALIZATIONS)
    tasks = more.pop() if more and _is_tasks(more[-1]) else objectives.NEXT_ITEM
    objectives.parse_tasks(tasks)
    corpus = more.pop(0) if more else "none"
    one_of(f"the grounding corpus of variant {name!r}", corpus, [*CORPORA, *objectives.MIXTURES])
    if more or corpus not in CORPORA:
        raise ValueError(f"the variant is {name!r}, expected INITIALIZATION[+CORPUS][+TASKS] in this order.")
    return {"initialization": initialization, "corpus": corpus, "tasks": tasks}


def _is_tasks(part: str) -> bool:
    return part in objectives.MIXTURES or objectives.NEXT_ITEM in part
