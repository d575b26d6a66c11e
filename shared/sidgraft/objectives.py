"""What fine-tuning trains on, by name: next-item prediction alone, or a weighted mixture of tasks (LC-Rec).

Nothing here loads torch: a study checks the names of its variants before anything runs.
"""

from __future__ import annotations

import math

from sidgraft.checks import one_of

NEXT_ITEM = "next-item"
CORPORA = ("gti", "gti-text-to-sid", "gti-sid-to-text", "cpt")  # what `ground` trains on, too
HISTORY_TASKS = ("history-to-title", "titles-to-sid")
ON_HISTORIES = ("cpt", *HISTORY_TASKS)  # what cannot be made of queries
TASKS = (NEXT_ITEM, *CORPORA, *HISTORY_TASKS)

# Mixtures with a name. LC-Rec (arXiv 2311.09049) gives all of its tasks the same standing; its tasks on queries and
# preferences, which a large language model writes from reviews, need texts that no catalog holds and are not here.
MIXTURES = {"lc-rec": "next-item:1,gti-text-to-sid:1,gti-sid-to-text:1,history-to-title:1,titles-to-sid:1"}


def parse_tasks(tasks: str) -> dict[str, float]:
    """Return the auxiliary tasks by name, each with its samples per next-item sample; {} for next-item alone.

    ``tasks`` is ``next-item``, the name of a mixture, or ``next-item:1,titles-to-sid:0.5``: a weight is relative
    to that of next-item, and 1 where it is left out. Raises ValueError for unknown and repeated names, weights that
    are no numbers above zero, and mixtures without next-item, by which the best epoch is chosen.
    """
    weights: dict[str, float] = {}
    for part in MIXTURES.get(tasks, tasks).split(","):
        name, _, weight = (piece.strip() for piece in part.partition(":"))
        one_of("a task", name, [*TASKS, *MIXTURES] if tasks == name else TASKS)
        if name in weights:
            raise ValueError(f"tasks names {name} more than once: {tasks!r}.")
        weights[name] = _weight(name, weight or "1")
    if NEXT_ITEM not in weights:
        raise ValueError(f"tasks is {tasks!r}, expected next-item among them: the best epoch is chosen by it.")
    whole = weights.pop(NEXT_ITEM)
    return {name: weight / whole for name, weight in weights.items()}


def parse_tasks_on_queries(tasks: str) -> dict[str, float]:
    """`parse_tasks` where queries stand in the place of histories: a mixture with a name goes without those tasks.

    Raises ValueError also for tasks on histories that are named one by one.
    """
    weights = parse_tasks(tasks)
    for name in weights if tasks not in MIXTURES else ():
        check_on_queries("tasks", name)
    return {name: weight for name, weight in weights.items() if name not in ON_HISTORIES}


def check_on_queries(option: str, name: str) -> None:
    """Raise ValueError for a corpus or task that is made of histories."""
    if name in ON_HISTORIES:
        rest = ", ".join(name for name in TASKS[1:] if name not in ON_HISTORIES)
        raise ValueError(
            f"{option} names {name}, which is made of users' histories, but the interactions come from queries: give"
            f" {rest} or none."
        )


def _weight(name: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f"the weight of task {name} is {text!r}, expected a number above zero, such as {name}:0.5.")
    return weight
