"""Run a stage as one task of a pipeline, for the components: report its key figures, hand failures on."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from sidgraft import artifacts
from sidgraft.signatures import signature

# Marks the lines that the console of `python -m pipelines run` reads from a task's output.
EVENT = "@sidgraft "

# In the environment of a task that is only to tell that a signal, of this name, has ended it before.
ENDED_BY = "SIDGRAFT_ENDED_BY"


class Place(Protocol):
    """What a pipeline gives for an artifact: a directory and a few facts that its user interface shows."""

    @property
    def path(self) -> str: ...

    metadata: dict[str, Any]


def run_task(
    stage: Callable[..., dict[str, Any]],
    parameters: Mapping[str, Any],
    *,
    kinds: Mapping[str, str],
    keep_going: str = "",
) -> dict[str, Any]:
    """Run ``stage`` with the parameters of its component and return its summary.

    ``kinds`` names the outputs and what they hold, such as ``{"out": "semantic_ids/v1"}``. The summary
    becomes the metadata of the outputs. With ``keep_going``, the name of a study's variant, an error does not
    end the pipeline: each output is marked as failed under that name (`artifacts.record_failure`), later
    stages of the variant hand the mark on, the report shows it, and the summary is empty. Without it the
    error is raised.
    """
    name = stage.__name__
    arguments = {p.name: _directory(parameters[p.name]) for p in signature(name).parameters}
    began = time.monotonic()
    try:
        if os.environ.get(ENDED_BY):
            raise ChildProcessError(_ended_by(os.environ[ENDED_BY]))
        summary = stage(**arguments)
        _check_written(name, {output: arguments[output] for output in kinds})
    except artifacts.FailedArtifactError as error:
        if not keep_going:
            announce("failed", name, error=str(error), kept=False)
            raise
        announce("skipped", name, error=str(error))
        _record(kinds, arguments, error.stage, error.error, keep_going)  # the mark may be another variant's, shared
        return {}
    except Exception as error:
        announce("failed", name, error=describe(error), kept=bool(keep_going))
        if not keep_going:
            raise
        traceback.print_exc()
        _record(kinds, arguments, name, describe(error), keep_going)
        return {}
    places = [arguments[output] for output in kinds]
    announce("done", name, seconds=round(time.monotonic() - began, 1), summary=_plain(summary), outputs=places)
    for output in kinds:
        parameters[output].metadata.update(_plain(summary))
    return summary


def show_metrics(place: Place, summary: Mapping[str, Any]) -> None:
    """Put the numbers of a summary where the pipeline's user interface shows metrics.

    The file is needed, too: a cache takes an output without one for lost.
    """
    place.metadata.update({k: v for k, v in _plain(summary).items() if not isinstance(v, str | bool)})
    Path(place.path).write_text(json.dumps(place.metadata), encoding="utf-8")


def show_page(place: Place, page: Path) -> None:
    """Put a self-contained HTML page where the pipeline's user interface shows it."""
    shutil.copyfile(page, place.path)


def describe(error: BaseException) -> str:
    """Return an error for people: a message we wrote as it is, a surprise with the name of its type."""
    text = str(error).strip()
    if isinstance(error, ValueError | OSError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def announce(event: str, stage: str, **facts: Any) -> None:
    """Print one event for the console, as a line of JSON."""
    line = json.dumps({"event": event, "stage": stage, **facts}, ensure_ascii=True, allow_nan=False)
    print(EVENT + line, file=sys.stderr, flush=True)


def _ended_by(signal: str) -> str:
    why = " The system does so to the process that takes the most where memory runs out." if signal == "SIGKILL" else ""
    return f"{signal} has ended the process.{why}"


def _directory(value: Any) -> Any:
    if isinstance(value, list):
        return [_directory(entry) for entry in value]
    return value.path if hasattr(value, "path") else value


def _record(kinds: Mapping[str, str], arguments: Mapping[str, Any], stage: str, error: str, variant: str) -> None:
    for output, kind in kinds.items():
        artifacts.record_failure(arguments[output], kind, stage=stage, error=error, variant=variant)


def _check_written(stage: str, outputs: Mapping[str, str]) -> None:
    """A pipeline takes a missing output for a warning only, so it is an error here."""
    missing = [name for name, path in outputs.items() if not (Path(path) / artifacts.MANIFEST).is_file()]
    if missing:
        raise RuntimeError(f"the stage {stage} ended without writing {', '.join(missing)}.")


def _plain(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what a pipeline's metadata can hold: no nulls, NaN or infinity; NumPy scalars become Python's."""
    values = {key: getattr(value, "item", lambda v=value: v)() for key, value in summary.items()}
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
    }
