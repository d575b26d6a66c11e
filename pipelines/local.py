"""Run a pipeline on this machine with kfp.local, and show it: python -m pipelines run.

The run itself is a child process in a group of its own (`pipelines/worker.py`), so that Ctrl-C, a closed terminal or
a kill of this process also ends the stage that is running. All it prints goes to the log; this process picks out the
events of the stages and their progress.
"""

import fcntl
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pipelines.build import ROOT as CHECKOUT
from pipelines.build import for_local_run, stage_of
from pipelines.console import NOTE, PROGRESS, Console, clock, comparison, key_figures, stage_line
from pipelines.fingerprints import image_tags
from pipelines.placement import CHECKPOINTED
from pipelines.settings import Settings, SettingsError, pipeline_inputs_of
from sidgraft import storage
from sidgraft.artifacts import MANIFEST
from sidgraft.catalog import source_digest
from sidgraft.tables import file_digest
from sidgraft.tasks import EVENT
from sidgraft.variants import plan_variants

DONE, FAILED, PARTLY, STOPPED = 0, 1, 3, 130

CACHE_HIT = re.compile(r"Task (\S+) cache hit")
BEGUN = re.compile(r"Executing task '(\S+)'")
ERROR = re.compile(r"(\w+\.)*\w+(Error|Exception|Exit|Interrupt)(: |$)")
KFP_ERROR = re.compile(r"Pipeline .* finished with status FAILURE")  # of the runner alone: says nothing
COLOR = re.compile(r"\x1b\[[0-9;]*m")


def run_locally(settings: Settings, root: Path, console: Console, runner: str = "subprocess") -> int:
    """Run a pipeline under ``root`` and return the exit status; ``runner`` is subprocess or docker.

    0: the report is written, or retraining is done. 3: so it is, but a variant failed, or the gate refused the model.
    1: a stage failed. 130: stopped by Ctrl-C.
    """
    root = root.resolve()
    (root / "logs").mkdir(parents=True, exist_ok=True)
    plan = _plan(settings)
    with (root / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"another run is writing to {root}; give another --root or wait for it.") from None
        environments = {}
        if runner == "docker":
            from pipelines import containers  # with the client of the engine, which nothing else needs

            settings = replace(settings, parameters=containers.prepare(root, settings.parameters))
            environments = containers.environments()
        tags = image_tags(settings.parameters, environments)
        parameters = complete(settings, root, tags)
        _drop_checkpoints_of_other_code(root / "checkpoints", tags)
        spec = for_local_run(settings.pipeline, tags)
        (root / "pipeline.yaml").write_text(spec, encoding="utf-8")
        (root / "parameters.json").write_text(json.dumps(parameters, indent=1) + "\n", encoding="utf-8")
        log = root / "logs" / f"run-{datetime.now():%Y%m%d-%H%M%S}.log"
        console.line(f"{settings.preset}: pipeline {settings.pipeline}, results under {shown(root)}")
        return _run(root, log, plan, lock.fileno(), console, runner)


def complete(settings: Settings, root: Path, tags: dict[str, str]) -> dict[str, Any]:
    """Return the parameters with what only this machine knows: digests of the user's files, and where checkpoints go.

    The stages name a checkpoint by their arguments and inputs; the folder here stands for their code.
    """
    places = {f"{stage}_checkpoints": str(root / "checkpoints" / tags[stage]) for stage in CHECKPOINTED}
    parameters = places | settings.parameters
    if "bundles" in parameters and not storage.is_remote(parameters["bundles"]):
        parameters["bundles"] = str(Path(parameters["bundles"]).resolve())
    try:
        sources = [parameters[name] for name in ("catalog", "interactions", "queries") if parameters.get(name)]
        parameters["prepare_source_digest"] = source_digest(*sources)
        if parameters.get("embed_embeddings"):
            parameters["embed_embeddings_digest"] = file_digest(parameters["embed_embeddings"])
    except OSError as error:
        raise SettingsError(f"cannot read {error.filename}: {error.strerror}.") from error
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return parameters


def _drop_checkpoints_of_other_code(folder: Path, tags: dict[str, str]) -> None:
    for place in folder.glob("run-*"):
        if place.name not in tags.values():
            shutil.rmtree(place)


def shown(path: Path) -> str:
    """Return a path as a person would type it here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _plan(settings: Settings) -> list[dict[str, Any]]:
    """Return the variants and seeds of a study, in their order; none for another pipeline."""
    if settings.pipeline != "study":
        return []
    given = {name: p.default for name, p in pipeline_inputs_of("study").items()} | settings.parameters
    try:
        return plan_variants(given["variants"], given["seeds"])
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _labels(plan: list[dict[str, Any]]) -> list[str]:
    if len({entry["seed"] for entry in plan}) == 1:
        return [entry["variant"] for entry in plan]
    return [entry["label"] for entry in plan]


@dataclass
class Progress:
    """What the events have told so far."""

    labels: list[str]
    running: str = ""  # the stage at work, with its variant
    since: float = field(default_factory=time.monotonic)  # when the stage before it ended
    variants_begun: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)  # (stage and variant, its own error)
    fatal: tuple[str, str] | None = None
    output: Path | None = None  # of the pipeline: the report, or what retraining decided
    refused: str = ""  # the version that publish has refused
    report: Path | None = None  # of what was trained in retraining, where it was not reused
    last_error: str = ""

    def begin(self, stage: str) -> str:
        """Note that a stage begins; return its name, in a study with its variant: they run one after the other."""
        if stage == "expand":
            self.variants_begun += 1
        inside = self.labels and stage in ("expand", "ground", "finetune", "evaluate", "diagnose")
        self.running = f"{stage} ({self.labels[self.variants_begun - 1]})" if inside else stage
        self.last_error = ""
        return self.running


def _run(root: Path, log: Path, plan: list[dict[str, Any]], lock: int, console: Console, runner: str) -> int:
    worker = subprocess.Popen(
        [sys.executable, "-m", "pipelines.worker", str(root), runner],
        cwd=CHECKOUT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=(lock,),  # the lock lives as long as either process
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    progress = Progress(_labels(plan))
    try:
        with log.open("w", encoding="utf-8") as file:
            _follow(worker, file, progress, console)
    except KeyboardInterrupt:
        _end(worker, root, runner)
        what = f" in {progress.running}" if progress.running else ""
        console.line(f"Stopped{what}. Run the same command again to go on: finished stages are reused.")
        return STOPPED
    except BaseException:
        _end(worker, root, runner)
        raise
    variants = [entry["variant"] for entry in plan]
    return _conclude(worker.wait(), root, log, variants, progress, console)


def _follow(worker: subprocess.Popen, log: Any, progress: Progress, console: Console) -> None:
    """Copy the worker's output to the log until it ends, and show events, notes and progress."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_pump, args=(worker.stdout, lines), daemon=True).start()
    latest = "…"
    while True:
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            if progress.running:
                console.progress(stage_line(progress.running, latest, time.monotonic() - progress.since))
            continue
        if line is None:
            return
        line = COLOR.sub("", line.rstrip("\n"))
        log.write(line + "\n")
        log.flush()
        text = line.strip()
        if text.startswith(EVENT):
            _take(json.loads(text.removeprefix(EVENT)), progress, console)
        elif hit := CACHE_HIT.search(text):
            who = progress.begin(stage_of(hit[1]))
            progress.running = ""
            if hit[1] != "variants":
                console.line(stage_line(who, "reused"))
        elif begun := BEGUN.search(text):
            progress.begin(stage_of(begun[1]))
            latest = "…"
        elif PROGRESS.match(text):
            latest = text
            console.progress(stage_line(progress.running, latest, time.monotonic() - progress.since))
        elif NOTE.match(text):
            console.line(stage_line(progress.running, text))
        elif ERROR.match(text) and not KFP_ERROR.search(text):
            progress.last_error = text


def _pump(stream: Iterable[str], lines: "queue.Queue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _take(event: dict[str, Any], progress: Progress, console: Console) -> None:
    who, error = progress.running, event.get("error", "")
    match event["event"]:
        case "done":
            if event["stage"] == "publish" and not event["summary"]["published"]:
                progress.refused = event["summary"]["version"]
            if event["stage"] == "report":
                progress.report = Path(*event["outputs"])
            figures = key_figures(event["stage"], event["summary"])
            console.line(stage_line(who, figures, time.monotonic() - progress.since))
        case "skipped":
            console.line(stage_line(who, "skipped: an earlier stage of this variant failed"))
        case "failed" if event["kept"]:
            progress.failures.append((who, error))
            console.line(stage_line(who, f"FAILED: {error}"))
        case "failed":
            progress.fatal = (who, error)
        case "finished":
            progress.output = Path(event["output"])
    progress.since = time.monotonic()
    progress.running = ""


def _end(worker: subprocess.Popen, root: Path, runner: str) -> None:
    """End the worker and the stage it runs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(worker.pid, number)
            worker.wait(timeout=5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    if runner == "docker":
        from pipelines import containers

        containers.remove_containers(root)


def _conclude(code: int, root: Path, log: Path, variants: list[str], progress: Progress, console: Console) -> int:
    if code != 0 or progress.output is None:
        who, error = progress.fatal or _unexplained(progress, code)
        console.line(f"The stage {who} failed: {error}" if who else f"The run failed: {error}")
        console.line(f"Log: {shown(log)}. Run the same command again to go on: finished stages are reused.")
        return FAILED
    took = f"Took {clock(time.monotonic() - console.started)}."
    if (progress.output / "decision.md").is_file():
        if progress.report:
            console.line(f"Report: {shown(progress.report / 'index.html')}")
        console.line(f"{took} Decision: {shown(progress.output / 'decision.md')}")
        return PARTLY if progress.refused else DONE
    report = _publish(progress.output, root / "report")
    console.line()
    for line in comparison(report / "metrics.parquet", variants):
        console.line(line)
    verdict = json.loads((report / MANIFEST).read_text(encoding="utf-8"))["metadata"].get("verdict")
    if verdict:
        console.line(verdict)
    console.line()
    for who, error in progress.failures:
        console.line(f"The stage {who} failed: {error}")
    if progress.failures:
        console.line(f"Log: {shown(log)}. Run the same command again to try what failed once more.")
    console.line(f"{took} Report: {shown(report / 'index.html')}")
    return PARTLY if progress.failures else DONE


def _unexplained(progress: Progress, code: int) -> tuple[str, str]:
    """Say what can be said of a failure that no stage announced."""
    if progress.running:
        cause = progress.last_error or "it was killed; the usual cause is too little memory"
        return progress.running, cause
    return "", progress.last_error or f"the runner ended with status {code}"


def _publish(report: Path, place: Path) -> Path:
    """Copy the report to where people look for it, replacing an older one whole."""
    fresh, old = place.with_name(".report.new"), place.with_name(".report.old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.copytree(report, fresh)
    if place.exists():
        place.rename(old)
    fresh.rename(place)
    shutil.rmtree(old, ignore_errors=True)
    return place
