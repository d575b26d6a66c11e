"""Variants of a study: an initialization, or one and a grounding corpus (`gaussian+gti`), times seeds."""

from __future__ import annotations

from typing import Any

from sidgraft.checks import one_of

INITIALIZATIONS = ("mean", "random", "gaussian", "centroid", "centroid-shuffled", "description")
CORPORA = ("none", "gti", "gti-text-to-sid", "gti-sid-to-text", "cpt")


def plan_variants(variants: list[str], seeds: list[int]) -> list[dict[str, Any]]:
    """Return one entry a variant and seed, with what differs and a label for people.

    The keys are variant, initialization, corpus, seed and label. A variant is named ``INITIALIZATION`` or
    ``INITIALIZATION+CORPUS``. Raises ValueError for unknown names, repeated variants or seeds, and empty lists.
    Seeds may arrive as floats from a pipeline's list.
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
        initialization, _, corpus = name.partition("+")
        one_of(f"the initialization of variant {name!r}", initialization, INITIALIZATIONS)
        corpus = one_of(f"the grounding corpus of variant {name!r}", corpus or "none", CORPORA)
        for seed in map(int, seeds):
            plan.append(
                {
                    "variant": name,
                    "initialization": initialization,
                    "corpus": corpus,
                    "seed": seed,
                    "label": f"{name}, seed {seed}",
                }
            )
    return plan
