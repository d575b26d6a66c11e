"""Variants of a study, times seeds: an initialization, a grounding corpus, tasks of fine-tuning (`mean+gti+lc-rec`).

`mean+gti+unfrozen` trains all weights on the corpus, too, after the rows alone and before the tasks (GTI's industrial
recipe). `centroid+cpt@4` takes the rows after 4 epochs of grounding. All depths of a corpus come from one grounding
run: the tasks `expand` and `ground` of such variants have the same arguments, so that all but the first are reused.
Where 0 is the only depth, nothing is grounded: `mean+gti@0+unfrozen` is the second phase alone.
"""

from __future__ import annotations

import re
from typing import Any

from sidgraft import objectives
from sidgraft.checks import one_of

INITIALIZATIONS = ("mean", "random", "gaussian", "centroid", "centroid-shuffled", "description")
CORPORA = ("none", *objectives.CORPORA)

UNFROZEN = "unfrozen"

FORM = f"INITIALIZATION[+CORPUS[@EPOCH][+{UNFROZEN}]][+TASKS]"

LAST = -1  # the epoch that stands for the last one

DEPTH = re.compile(r"@(\d+)")


def depth(name: str) -> tuple[str, int] | None:
    """A variant's name without its depth, and the depth: ``centroid+cpt@4`` gives ``centroid+cpt`` and 4."""
    found = DEPTH.search(name)
    return (name[: found.start()] + name[found.end() :], int(found[1])) if found else None


def plan_variants(variants: list[str], seeds: list[int]) -> list[dict[str, Any]]:
    """Return one entry a variant and seed, with what differs and a label for people.

    The keys are variant, initialization, corpus, keep_epochs, rows_epoch, grounding, tasks, seed, label, and start, the
    label of what variants with the same rows share. A variant is named
    ``INITIALIZATION[+CORPUS[@EPOCH][+unfrozen]][+TASKS]``, where TASKS is ``lc-rec`` or a mixture that names
    ``next-item``, and EPOCH that of grounding whose rows it takes (the last where it is left out); keep_epochs lists
    those of all variants with the same rows and corpus. Where 0 is the only one of them, the corpus is none: the rows
    are those that grounding would start from. ``unfrozen`` makes the corpus that of finetune's ``grounding``,
    which is none otherwise. Raises ValueError for unknown names, repeated variants or seeds, and empty lists. Seeds may
    arrive as floats from a pipeline's list.
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
    parsed = {name: _settings(name) for name in variants}
    for name, settings in parsed.items():
        start = (settings["initialization"], settings["corpus"])
        depths = {s["rows_epoch"] for s in parsed.values() if (s["initialization"], s["corpus"]) == start}
        rows = {"keep_epochs": ",".join(map(str, sorted(depths - {LAST})))}
        if depths == {0}:  # the rows that grounding would start from
            start = (settings["initialization"], "none")
            rows = {"corpus": "none", "keep_epochs": "", "rows_epoch": LAST}
        for seed in map(int, seeds):
            plan.append(
                {
                    "variant": name,
                    **settings,
                    **rows,
                    "start": f"{'+'.join(start).removesuffix('+none')}, seed {seed}",
                    "seed": seed,
                    "label": f"{name}, seed {seed}",
                }
            )
    return plan


def _settings(name: str) -> dict[str, Any]:
    """What a variant's name says of its initialization, corpus, epoch of grounding, second phase and tasks."""
    initialization, *more = name.split("+")
    one_of(f"the initialization of variant {name!r}", initialization, INITIALIZATIONS)
    tasks = more.pop() if more and _is_tasks(more[-1]) else objectives.NEXT_ITEM
    objectives.parse_tasks(tasks)
    corpus, at, epoch = (more.pop(0) if more else "none").partition("@")
    one_of(f"the grounding corpus of variant {name!r}", corpus, [*CORPORA, UNFROZEN, *objectives.MIXTURES])
    unfrozen = more == [UNFROZEN]
    if (more and not unfrozen) or corpus not in CORPORA:
        raise ValueError(f"the variant is {name!r}, expected {FORM} in this order.")
    for mark, given in ((f"@{epoch}", at), (f"+{UNFROZEN}", unfrozen)):
        if given and corpus == "none":
            raise ValueError(f"the variant is {name!r}, expected a corpus before {mark}.")
    if at and not epoch.isdecimal():
        raise ValueError(f"the variant is {name!r}, expected a whole number of epochs behind @.")
    return {
        "initialization": initialization,
        "corpus": corpus,
        "rows_epoch": int(epoch) if at else LAST,
        "grounding": corpus if unfrozen else "none",
        "tasks": tasks,
    }


def _is_tasks(part: str) -> bool:
    return part in objectives.MIXTURES or objectives.NEXT_ITEM in part
