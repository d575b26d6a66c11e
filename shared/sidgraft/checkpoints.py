"""Checkpoints of a training run: when they are made, which are whole, which go, and whose they are.

They are written to a directory. Where the run keeps them in an object store, that is a directory of the cache, and each
is uploaded when it is whole here: RUN/checkpoint-STEP, and beside it, in RUN/beside-STEP, what else the run needs to go
on (the best weights so far, rows kept for a depth sweep), sent again only when it has changed.

Of several machines each writes a part of a checkpoint into its own cache: those but the first send theirs to
RUN/part-STEP-MACHINE before the first makes the checkpoint whole, and each brings all parts of one back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from transformers import TrainerCallback

from sidgraft import distributed, storage
from sidgraft.progress import say

WHOLE = "whole.json"  # written last, by one rename: a checkpoint without it is cut short
RUNNING = "running.txt"  # in the run's folder in the store: written first, so that a refusal is known at once
# In it, of a checkpoint that is uploaded: the folder beside it; those of the other machines' parts; names and sizes.
BESIDE, PARTS, FILES = "beside", "parts", "files"
RUN = "run"  # in it: the arguments and inputs that the checkpoint's run was started with
RUN_FOLDER = re.compile(r"(ground|finetune)-[0-9a-f]{16}")  # its name: the stage and `artifacts.run_digest`
PASSING = (".partial", ".old")  # endings of what is being written or replaced


class Checkpoints(TrainerCallback):
    """The checkpoints in one directory, as a callback of the Trainer that writes them.

    A checkpoint counts when all processes have written their part; only then are older ones removed. ``made_for``
    names what a checkpoint cannot be used without (base model, vocabulary, number of processes); `last` refuses
    one that was made for something else. Beside the one after each epoch there is one every ``minutes``. ``remote`` is
    the run's folder in an object store, or empty. ``run`` holds `artifacts.run_facts`, by which a run that starts anew
    is told from others.
    """

    def __init__(
        self,
        directory: Path,
        made_for: dict[str, Any],
        minutes: float,
        remote: str = "",
        run: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory, self.made_for, self.minutes, self.remote = directory, made_for, minutes, remote
        self.run = dict(run or {})
        self.beside = ""  # the folder in the store of what lies beside the checkpoints
        self.sent: dict[str, tuple[int, int]] = {}  # what it holds

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
        written = self.directory / f"checkpoint-{state.global_step}"
        parts = self._send_parts(written) if self.remote else {}
        if distributed.rank() == 0:
            beside = self._beside() if self.remote else {}
            if beside != self.sent:
                self.beside = f"{BESIDE}-{state.global_step}"
            files = sizes(written) | {name: size for part in parts.values() for name, size in part.items()}
            about = {BESIDE: self.beside, PARTS: sorted(parts), FILES: files} if self.remote else {}
            draft = written / f".{WHOLE}"
            facts = self.made_for | {RUN: self.run} | about
            draft.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            os.replace(draft, written / WHOLE)
            for step, path in found(self.directory).items():
                if step != state.global_step:
                    shutil.rmtree(path)
            if self.remote:
                self._upload(written, beside, parts)
        self.saved = time.monotonic()

    def last(self) -> str | None:
        """The newest whole checkpoint; removes those cut short. Raises ValueError when it was made for another run.

        One in the store that is newer than those here is brought here, all of it checked. One that is damaged there is
        passed over where an older one is whole, else a StorageError. Of several machines each brings it from the store,
        whatever is here: that is a part of it alone. Where there is none, but other runs of the stage have left whole
        ones in the same place, it says what the nearest of them was made with.
        """
        apart = bool(self.remote) and not distributed.on_one_machine()
        if distributed.rank() == 0 or (apart and distributed.leads_machine()):
            remove_unfinished(self.directory)
            for path in found(self.directory).values() if apart else ():
                shutil.rmtree(path)
            if self.remote:
                self._fetch_newest()
        distributed.barrier()
        checkpoints = found(self.directory)
        if apart and len(steps := set(distributed.gather(max(checkpoints, default=-1)))) > 1:
            raise storage.StorageError(
                f"the machines found different checkpoints under {self.remote}, at the steps {sorted(steps)}: start"
                " the run again."
            )
        if not checkpoints:
            self._tell_of_others()
            return None
        step, path = max(checkpoints.items())
        self._check(json.loads((path / WHOLE).read_text(encoding="utf-8")), path)
        say(f"resuming from the checkpoint at step {step}")
        return str(path)

    def _check(self, made_for: dict[str, Any], place: Any) -> None:
        for name, value in self.made_for.items():
            if made_for.get(name) != value:
                raise ValueError(
                    f"the checkpoint {place} was made for {name} {made_for.get(name)}, but this run has {name} {value}:"
                    " give another checkpoints directory, or the run that it was made for, or remove it."
                )

    def _tell_of_others(self) -> None:
        """Say of the other runs' checkpoint that differs least from this run in what it does.

        Only in a directory: a place in an object store is shared by runs that are going on elsewhere.
        """
        name = RUN_FOLDER.fullmatch(self.directory.name)
        if self.remote or name is None:
            return
        differing: dict[Path, list[str]] = {}
        for whole in self.directory.parent.glob(f"{name[1]}-*/checkpoint-*/{WHOLE}"):
            try:
                facts = json.loads(whole.read_text(encoding="utf-8"))
            except (OSError, ValueError):  # its run has just removed it
                continue
            differing[whole.parent] = self._differing(facts)
        if differing:
            nearest = min(differing, key=lambda path: len(differing[path]))
            others = f" (of {len(differing)} that lie there)" if len(differing) > 1 else ""
            made_with = ", ".join(differing[nearest]) or "other settings or inputs"
            say(
                f"starting anew: the checkpoint {nearest}{others} was made with {made_with}; remove it when its run is"
                " not to go on"
            )

    def _differing(self, facts: Mapping[str, Any]) -> list[str]:
        """What a checkpoint with these facts was made with that this run has otherwise."""
        pairs = ((self.run, facts.get(RUN, {})), (self.made_for, facts))
        found = [
            f"{name} {there[name]} (here {value})"
            for here, there in pairs
            for name, value in here.items()
            if name in there and there[name] != value
        ]
        return list(dict.fromkeys(found))

    def _beside(self) -> dict[str, tuple[int, int]]:
        """The files beside the checkpoints by name, with their sizes and times."""
        entries = [
            entry
            for entry in self.directory.iterdir()
            if not entry.name.startswith((".", "checkpoint-")) and entry.suffix not in PASSING
        ]
        files = [file for entry in entries for file in (entry.rglob("*") if entry.is_dir() else [entry])]
        facts = {file.relative_to(self.directory).as_posix(): file.stat() for file in sorted(files) if file.is_file()}
        return {name: (fact.st_size, fact.st_mtime_ns) for name, fact in facts.items()}

    def _send_parts(self, written: Path) -> dict[str, dict[str, int]]:
        """Send what each machine but the first has written; return the folders in the store, each with its files.

        The first machine's own are not among them. On the others nothing is left: alone it is of no use.
        """
        if distributed.on_one_machine():
            return {}
        part: dict[str, dict[str, int]] = {}
        if distributed.machine() > 0 and distributed.leads_machine():
            name = f"part-{_step(written.name)}-{distributed.machine()}"
            with _keeping(written.name):
                storage.upload(written, f"{self.remote}/{name}")
            part = {name: sizes(written)}
            for path in found(self.directory).values():  # with the one that this run went on from
                shutil.rmtree(path)
        return {name: files for sent in distributed.gather(part) for name, files in sent.items()}

    def _upload(self, written: Path, beside: dict[str, tuple[int, int]], parts: Mapping[str, Any]) -> None:
        """Upload a checkpoint that is whole, `whole.json` last; only then remove what it replaces."""
        with _keeping(written.name):
            if beside != self.sent:
                for name in dict.fromkeys(name.partition("/")[0] for name in beside):
                    storage.upload(self.directory / name, f"{self.remote}/{self.beside}/{name}")
                self.sent = beside
            storage.upload(written, f"{self.remote}/{written.name}", last=WHOLE)
            for name in self._in_store().keys() - {written.name, self.beside, *parts, RUNNING}:
                storage.delete(f"{self.remote}/{name}")

    def _in_store(self) -> dict[str, list[str]]:
        """The folders of the run in the store, each with the names of its files."""
        folders: dict[str, list[str]] = {}
        for uri in storage.list_uris(self.remote):
            folder, _, name = uri.removeprefix(f"{self.remote}/").partition("/")
            folders.setdefault(folder, []).append(name)
        return folders

    def _fetch_newest(self) -> None:
        """Bring the newest whole checkpoint of the store here, unless there is one here that is as new."""
        here = max(found(self.directory), default=-1)
        folders = self._in_store()
        damaged: ValueError | None = None
        for step in sorted((step for step in _whole(folders) if step > here), reverse=True):
            place = f"{self.remote}/checkpoint-{step}"
            try:
                facts = json.loads(storage.read_text(f"{place}/{WHOLE}"))
            except ValueError as error:
                damaged = error
            else:
                self._check(facts, place)
                damaged = self._fetch(place, facts)
            if damaged is None:
                return
            say(f"the checkpoint {place} cannot be used: {damaged}")
        if damaged and here < 0:
            raise storage.StorageError(
                f"no checkpoint of this run under {self.remote} can be used: {damaged} Delete that folder to train from"
                " the beginning."
            )

    def _fetch(self, place: str, facts: dict[str, Any]) -> storage.StorageError | None:
        """Bring a checkpoint here, what lies beside it first, so that what looks whole is; return what is wrong."""
        beside, arrived, part = (self.directory / f".{name}.partial" for name in (BESIDE, "checkpoint", "part"))
        try:
            if facts.get(BESIDE):
                storage.download(f"{self.remote}/{facts[BESIDE]}", beside)
            storage.download(place, arrived)
            for name in facts.get(PARTS, ()):
                storage.download(f"{self.remote}/{name}", part)
                shutil.copytree(part, arrived, dirs_exist_ok=True, copy_function=os.replace)
            if sizes(arrived) != facts.get(FILES):
                raise storage.StorageError(f"{place} does not hold the files that its {WHOLE} names.")
            for entry in beside.iterdir() if beside.is_dir() else ():
                target = self.directory / entry.name
                shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
                entry.rename(target)
            arrived.rename(self.directory / PurePosixPath(place).name)
        except storage.StorageError as error:
            return error
        finally:
            for folder in (beside, arrived, part):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _keeping(checkpoint: str) -> Iterator[None]:
    """Say of an upload that fails what is left, and what to do."""
    try:
        yield
    except storage.StorageError as error:
        raise storage.StorageError(
            f"the checkpoint {checkpoint} could not be kept in the store: {error} An older one there is still whole."
            " Give the same command again: it goes on from the last whole checkpoint."
        ) from error


def sizes(checkpoint: Path) -> dict[str, int]:
    """The files of a checkpoint by name, `whole.json` apart, with their sizes."""
    files = (file for file in sorted(checkpoint.rglob("*")) if file.is_file() and file.name != WHOLE)
    return {file.relative_to(checkpoint).as_posix(): file.stat().st_size for file in files}


def _whole(folders: dict[str, list[str]]) -> list[int]:
    """The steps of the checkpoints that have their `whole.json`, and whose upload or deletion did not break off."""
    names = [name for name, files in folders.items() if WHOLE in files and not any(map(storage.is_mark, files))]
    return [_step(name) for name in names if name.startswith("checkpoint-")]


def _step(name: str) -> int:
    return int(name.removeprefix("checkpoint-"))


def found(directory: Path) -> dict[int, Path]:
    """The checkpoints in a directory by step, whole or not."""
    return {_step(path.name): path for path in directory.glob("checkpoint-*")}


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


def remote_place(checkpoints: str, name: str) -> str:
    """The folder of a run in the object store; empty where ``checkpoints`` is a directory of this machine, or none."""
    return f"{checkpoints.rstrip('/')}/{name}" if storage.is_remote(checkpoints) else ""


def _check_place(checkpoints: str) -> None:
    """Raise ValueError where the place for the checkpoints of all runs is the folder of one."""
    above, _, name = checkpoints.rstrip("/").rpartition("/")
    holds_some = not storage.is_remote(checkpoints) and any(Path(checkpoints).glob("checkpoint-*"))
    if RUN_FOLDER.fullmatch(name) or holds_some:
        raise ValueError(
            f"checkpoints is {checkpoints!r}, which is the folder of one run's checkpoints: expected the folder above"
            f" it ({above or '.'}), in which every run finds or makes its own."
        )


@contextmanager
def working_directory(checkpoints: str, name: str, out: str) -> Iterator[Path]:
    """Where a training run keeps its checkpoints: ``checkpoints``/``name``, or a temporary place beside ``out``.

    It is removed when the body ends well; after an error or a kill the one under ``checkpoints`` stays, and the
    same run finds it again (``name`` holds the digest of its arguments and inputs). The temporary place starts empty,
    whatever a killed run left there. Of checkpoints in an object store
    there is a directory in the cache, one for each machine, should they share it; a store that refuses them is known
    before anything is computed. Raises ValueError where ``checkpoints`` is itself a run's folder.
    """
    if checkpoints:
        _check_place(checkpoints)
    remote = remote_place(checkpoints, name)
    if remote:
        if distributed.rank() == 0:
            storage.write_text(f"{remote}/{RUNNING}", name + "\n")
        number = distributed.machine()
        place = storage.cache_folder() / (f"checkpoints-{number}" if number else "checkpoints") / name
    else:
        beside = storage.cache_folder() / "training" / name if storage.is_remote(out) else Path(out)
        place = Path(checkpoints) / name if checkpoints else beside.parent / f".{beside.name}.training"
    place.mkdir(parents=True, exist_ok=True)
    if not checkpoints and distributed.rank() == 0:  # a killed run's files are no other's, and none goes on from them
        for left in place.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    try:
        yield place
    except BaseException:
        if not checkpoints and distributed.rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
        raise
    if distributed.rank() == 0 or (remote and distributed.machine() and distributed.leads_machine()):
        shutil.rmtree(place, ignore_errors=True)  # the others end before the first has read the weights
    if distributed.rank() == 0 and remote:
        try:
            storage.delete(remote)
        except storage.StorageError as error:  # the result stands: what is left in the store is no failure
            say(f"the checkpoints under {remote} were not removed: {error}")
