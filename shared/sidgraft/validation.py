"""Validation recall after each epoch, early stopping, and the best weights kept on disk.

Shapes: U users · G beams.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from sidgraft import distributed
from sidgraft.adapters import merged_weights
from sidgraft.beam import decode
from sidgraft.progress import say
from sidgraft.sids import SidVocabulary
from sidgraft.trie import Trie


class ValidateEachEpoch(TrainerCallback):
    """After each epoch: decode the validation users, log Recall@5 and @10, keep the best weights, stop in time.

    What is known of earlier epochs is read from the Trainer's own log, so a resumed run continues as if nothing
    had happened. Ties keep the earlier epoch. The first ``grounding_epochs`` epochs are not validated.
    """

    def __init__(
        self,
        trie: Trie,
        vocabulary: SidVocabulary,
        prompts: list[np.ndarray],
        targets: list[int],
        *,
        beams: int,
        patience: int,
        autocast: torch.dtype | None,
        best: Path,
        grounding_epochs: int = 0,
    ) -> None:
        self.trie, self.vocabulary, self.prompts, self.targets = trie, vocabulary, prompts, targets
        self.beams, self.patience, self.autocast, self.best = beams, patience, autocast, best
        self.grounding_epochs = grounding_epochs

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if round(state.epoch) <= self.grounding_epochs:
            return
        with distributed.whole(model):
            hits_UG = self._hits(model)
            row = {"step": state.global_step, "epoch": state.epoch}
            row |= {f"recall@{k}": float(hits_UG[:, :k].any(axis=1).mean()) for k in (5, 10) if k <= self.beams}
            state.log_history.append(row)
            say(
                f"epoch {state.epoch:.0f}, step {state.global_step}: validation "
                + ", ".join(f"Recall@{k} {row[f'recall@{k}']:.4f}" for k in (5, 10) if k <= self.beams)
            )
            if best_epoch(state.log_history)["step"] == state.global_step and distributed.rank() == 0:
                save_best(model, self.best)
        if is_exhausted(state.log_history, self.patience):
            control.should_training_stop = True

    def _hits(self, model: Any) -> np.ndarray:
        """Whether each beam is the target [U, G]; every process decodes a share of the users."""
        mine = slice(distributed.rank(), None, distributed.world())
        model.eval()
        found = decode(
            model, self.trie, self.vocabulary, self.prompts[mine],
            beams=self.beams, autocast=self.autocast, what="validate",
        )  # fmt: skip
        model.train()
        return np.concatenate(distributed.gather(found.items_UG == np.asarray(self.targets)[mine, None]))


def best_epoch(log: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of the log with the best validation Recall@5; the earliest of equals."""
    return max((row for row in log if "recall@5" in row), key=lambda row: row["recall@5"])


def is_exhausted(log: list[dict[str, Any]], patience: int) -> bool:
    """Whether the last ``patience`` epochs brought nothing better."""
    recalls = [row["recall@5"] for row in log if "recall@5" in row]
    return bool(recalls) and len(recalls) - 1 - int(np.argmax(recalls)) >= patience


def finished(checkpoint: str, epochs: int, patience: int) -> bool:
    """Whether a checkpoint was written after the last epoch, or after the one that ended the patience."""
    state = json.loads(Path(checkpoint, "trainer_state.json").read_text(encoding="utf-8"))
    validated = sum("recall@5" in row for row in state["log_history"])
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
