"""A validation figure after each epoch, early stopping, and the best weights kept on disk.

The figure is Recall@5 where each user has one target, and composite NDCG@5 where a query has graded candidates.

Shapes: U users (or queries) · G beams.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from sidgraft import distributed
from sidgraft.adapters import merged_weights
from sidgraft.beam import decode
from sidgraft.progress import say
from sidgraft.queries import Queries
from sidgraft.sids import SidVocabulary
from sidgraft.trie import Trie

FIGURES = {"recall@5": "Recall@5", "ndcg@5": "composite NDCG@5"}  # that the best epoch is chosen by; a run has one

# Takes the beams [u, G] of the users with these numbers [u]; returns figures by name, one a user.
Measure = Callable[[np.ndarray, np.ndarray], dict[str, np.ndarray]]


class ValidateEachEpoch(TrainerCallback):
    """After each epoch: decode the validation users, log the figures, keep the best weights, stop in time.

    What is known of earlier epochs is read from the Trainer's own log, so a resumed run continues as if nothing
    had happened. Ties keep the earlier epoch. The first ``grounding_epochs`` epochs are not validated.
    """

    def __init__(
        self,
        trie: Trie,
        vocabulary: SidVocabulary,
        prompts: list[np.ndarray],
        measure: Measure,
        *,
        beams: int,
        patience: int,
        autocast: torch.dtype | None,
        best: Path,
        grounding_epochs: int = 0,
    ) -> None:
        self.trie, self.vocabulary, self.prompts, self.measure = trie, vocabulary, prompts, measure
        self.beams, self.patience, self.autocast, self.best = beams, patience, autocast, best
        self.grounding_epochs = grounding_epochs

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if round(state.epoch) <= self.grounding_epochs:
            return
        with distributed.whole(model):
            row = {"step": state.global_step, "epoch": state.epoch} | self._figures(model)
            state.log_history.append(row)
            named = ", ".join(f"{_shown(name)} {row[name]:.4f}" for name in row if "@" in name)
            say(f"epoch {state.epoch:.0f}, step {state.global_step}: validation {named}")
            if best_epoch(state.log_history)["step"] == state.global_step and distributed.rank() == 0:
                save_best(model, self.best)
        if is_exhausted(state.log_history, self.patience):
            control.should_training_stop = True

    def _figures(self, model: Any) -> dict[str, float]:
        """Each figure's mean over all users; every process decodes a share of them."""
        mine = np.arange(len(self.prompts))[distributed.rank() :: distributed.world()]
        model.eval()
        found = decode(
            model, self.trie, self.vocabulary, [self.prompts[user] for user in mine],
            beams=self.beams, autocast=self.autocast, what="validate",
        )  # fmt: skip
        model.train()
        shares = distributed.gather(self.measure(found.items_UG, mine))
        return {name: float(np.concatenate([share[name] for share in shares]).mean()) for name in shares[0]}


def recall_of(targets: list[int], ks: list[int]) -> Measure:
    """Recall@k of one target a user."""
    target_U = np.asarray(targets)

    def measure(items_UG: np.ndarray, users: np.ndarray) -> dict[str, np.ndarray]:
        hits_UG = items_UG == target_U[users, None]
        return {f"recall@{k}": hits_UG[:, :k].any(axis=1) for k in ks}

    return measure


def ndcg_of(queries: Queries, chosen: np.ndarray, ks: list[int]) -> Measure:
    """Composite NDCG@k of the queries ``chosen``."""

    def measure(items_UG: np.ndarray, users: np.ndarray) -> dict[str, np.ndarray]:
        values = queries.metrics(chosen[users], items_UG, ks)
        return {f"ndcg@{k}": values["composite_ndcg", k] for k in ks}

    return measure


def _shown(name: str) -> str:
    return name.replace("recall", "Recall").replace("ndcg", "composite NDCG")


def deciding(row: dict[str, Any]) -> float | None:
    """The figure of a log's row by which the best epoch is chosen; None where it is not an epoch's."""
    return next((row[name] for name in FIGURES if name in row), None)


def best_epoch(log: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of the log with the best validation figure; the earliest of equals."""
    rows = [(figure, row) for row in log if (figure := deciding(row)) is not None]
    return max(rows, key=lambda pair: pair[0])[1]


def is_exhausted(log: list[dict[str, Any]], patience: int) -> bool:
    """Whether the last ``patience`` epochs brought nothing better."""
    figures = [figure for row in log if (figure := deciding(row)) is not None]
    return bool(figures) and len(figures) - 1 - int(np.argmax(figures)) >= patience


def finished(checkpoint: str, epochs: int, patience: int) -> bool:
    """Whether a checkpoint was written after the last epoch, or after the one that ended the patience."""
    state = json.loads(Path(checkpoint, "trainer_state.json").read_text(encoding="utf-8"))
    validated = sum(deciding(row) is not None for row in state["log_history"])
    return validated >= epochs or is_exhausted(state["log_history"], patience)


def save_best(model: Any, directory: Path) -> None:
    """Save the weights, adapters merged, whole or not at all."""
    written, old = (directory.with_name(directory.name + suffix) for suffix in (".partial", ".old"))
    for leftover in (written, old):
        shutil.rmtree(leftover, ignore_errors=True)
    model.save_pretrained(written, state_dict=merged_weights(model))
    if directory.exists():
        directory.rename(old)
    written.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
