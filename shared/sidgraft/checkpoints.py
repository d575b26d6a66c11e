"""Checkpoints of a training run: when they are made, which are whole, which go, and whose they are."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sidgraft import distributed, storage
from sidgraft.progress import say

WHOLE = "whole.json"  # written last, by one rename: a checkpoint without it is cut short


class Checkpoints(TrainerCallback):
    """The checkpoints in one directory, as a callback of the Trainer that writes them.

    A checkpoint counts when all processes have written their part; only then are older ones removed. ``made_for``
    names what a checkpoint cannot be used without (base model, vocabulary, number of processes); `last` refuses
    one that was made for something else. Beside the one after each epoch there is one every ``minutes``.
    """

    def __init__(self, directory: Path, made_for: dict[str, Any], minutes: float) -> None:
        self.directory, self.made_for, self.minutes = directory, made_for, minutes

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saved = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        # The last step of an epoch is left to the checkpoint after the epoch's validation: a run resumed from one
        # before it would go on with the next epoch and never validate this one.
        ends_epoch = state.global_step % len(train_dataloader) == 0
        if not ends_epoch and distributed.agree(time.monotonic() - self.saved > 60 * self.minutes):
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        distributed.barrier()
        if distributed.rank() == 0:
            written = self.directory / f"checkpoint-{state.global_step}"
            draft = written / f".{WHOLE}"
            draft.write_text(json.dumps(self.made_for, indent=1) + "\n", encoding="utf-8")
            os.replace(draft, written / WHOLE)
            for step, path in found(self.directory).items():
                if step != state.global_step:
                    shutil.rmtree(path)
        self.saved = time.monotonic()

    def last(self) -> str | None:
        """The newest whole checkpoint; removes those cut short. Raises ValueError when it was made for another run."""
        if distributed.rank() == 0:
            remove_unfinished(self.directory)
        distributed.barrier()
        checkpoints = found(self.directory)
        if not checkpoints:
            return None
        step, path = max(checkpoints.items())
        made_for = json.loads((path / WHOLE).read_text(encoding="utf-8"))
        for name, value in self.made_for.items():
            if made_for.get(name) != value:
                raise ValueError(
                    f"the checkpoint {path} was made for {name} {made_for.get(name)}, but this run has {name} {value}:"
                    " give another checkpoints directory, or the run that it was made for, or remove it."
                )
        say(f"resuming from the checkpoint at step {step}")
        return str(path)


def found(directory: Path) -> dict[int, Path]:
    """The checkpoints in a directory by step, whole or not."""
    return {int(path.name.removeprefix("checkpoint-")): path for path in directory.glob("checkpoint-*")}


def remove_unfinished(directory: Path) -> list[Path]:
    """Remove what a kill or a full disk cut short; returns what was removed."""
    unfinished = [path for path in found(directory).values() if not (path / WHOLE).is_file()]
    unfinished += directory.glob("best.partial")
    for path in unfinished:
        shutil.rmtree(path)
    return unfinished


def explain_failed_write(directory: Path, error: Exception) -> None:
    """Raise OSError with what to do when an error came while weights were being written; return when it did not."""
    if not remove_unfinished(directory):
        return
    step = max(found(directory), default=None)
    kept = f"the checkpoint at step {step} is whole" if step is not None else "there is no earlier one"
    raise OSError(
        f"a checkpoint could not be written to {directory}: {error} ({kept}). Make room there, then give the same"
        " command again: it goes on from the last whole checkpoint."
    ) from error


@contextmanager
def working_directory(checkpoints: str, name: str, out: str) -> Iterator[Path]:
    """Where a training run keeps its checkpoints: ``checkpoints``/``name``, or a temporary place beside ``out``.

    It is removed when the body ends well; after an error or a kill the one under ``checkpoints`` stays, and the
    same run finds it again (``name`` holds the digest of its arguments and inputs). Raises ValueError for checkpoints
    in an object store, where nothing can be renamed.
    """
    if storage.is_remote(checkpoints):
        raise ValueError(
            f"checkpoints is {checkpoints}, expected a directory: give one that outlives the run, such as on a volume."
        )
    beside = storage.cache_folder() / "training" / name if storage.is_remote(out) else Path(out)
    place = Path(checkpoints) / name if checkpoints else beside.parent / f".{beside.name}.training"
    place.mkdir(parents=True, exist_ok=True)
    try:
        yield place
    except BaseException:
        if not checkpoints and distributed.rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
        raise
    if distributed.rank() == 0:  # the others end before it has read the weights
        shutil.rmtree(place, ignore_errors=True)
