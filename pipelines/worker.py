"""The child process of a local run: it hands the compiled pipeline to kfp.local and does nothing else.

    python -m pipelines.worker ROOT subprocess|docker

It runs ROOT/pipeline.yaml with ROOT/parameters.json. Its standard input is a lifeline: when the parent is gone, it
ends, and the running stage with it.
"""

import json
import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

from kfp import components, local

from pipelines.forks import use_forks
from sidgraft import artifacts
from sidgraft.tasks import announce


def main(root: Path, runner: str) -> None:
    """Run the pipeline under ``root``; leaves with an exception when a stage fails."""
    threading.Thread(target=_end_with_parent, args=(root, runner), daemon=True).start()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    drop_leftovers(root / "artifacts")
    drop_lost_results(root / "cache")
    if runner == "docker":
        from pipelines import containers

        containers.remove_containers(root)  # of a run whose processes were all killed at once
        how = containers.runner(root)
    else:
        use_forks()
        how = local.SubprocessRunner(use_venv=False)
    local.init(
        how,
        pipeline_root=str(root / "artifacts"),
        enable_caching=True,
        cache_root=str(root / "cache"),
    )
    pipeline = components.load_component_from_file(str(root / "pipeline.yaml"))
    task = pipeline(**json.loads((root / "parameters.json").read_text(encoding="utf-8")))
    announce("finished", "pipeline", output=task.output.path)


def drop_leftovers(folder: Path) -> None:
    """Remove what a killed stage left half written."""
    for pattern in (".*.partial", ".*.training"):
        for leftover in folder.rglob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def drop_lost_results(cache: Path) -> None:
    """Forget cached tasks whose outputs are gone, damaged or mark a failure, so that they run again.

    KFP itself only looks whether the path of an output exists.
    """
    for entry in sorted(cache.glob("*.json")):
        outputs = json.loads(entry.read_text(encoding="utf-8"))
        places = [Path(output["uri"]) for output in outputs.values() if isinstance(output, dict) and "uri" in output]
        if not all(is_sound(place) for place in places):
            print(f"{entry.name}: an output is lost, damaged or failed; the task will run again", flush=True)
            entry.unlink()


def is_sound(place: Path) -> bool:
    """Tell whether an output can be used again.

    Every stage checks digests when it loads; here sizes do, and the digests of what was touched after it was
    finished, so that a large model is not read for nothing.
    """
    manifest_file = place / artifacts.MANIFEST
    if not manifest_file.is_file():
        return place.is_file()  # a metrics file or page for the user interface
    manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
    if "failed" in manifest:
        return False
    written = manifest_file.stat().st_mtime_ns
    for name, facts in manifest["files"].items():
        file = place / name
        if not file.is_file() or file.stat().st_size != facts["bytes"]:
            return False
        if file.stat().st_mtime_ns > written:
            return _loads(place, manifest["kind"])
    return True


def _loads(place: Path, kind: str) -> bool:
    try:
        artifacts.load(place, kind)
    except artifacts.ArtifactError:
        return False
    return True


def _end_with_parent(root: Path, runner: str) -> None:
    """Wait for the end of standard input, then end the running stage and this process group."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    try:
        if runner == "docker":
            from pipelines import containers

            containers.remove_containers(root)
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
