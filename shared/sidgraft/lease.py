"""A sign in the object store that somebody waits for a job: the task renews it, and the nodes end when it grows old.

A task that is killed can remove nothing, and the nodes of its job ask the cluster for nothing (their account has no
token there); the store is what both see. Clocks are not compared: a node counts by its own how long the sign stayed
the same.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from sidgraft import distributed, storage
from sidgraft.progress import say

VARIABLE = "SIDGRAFT_LEASE"  # where a node finds its address
RENEWED = 5 * 60  # seconds from one sign to the next

# Seconds without a new sign after which nobody waits. Longer than a store that is restarted stays away and than a task
# that is tried again takes to come (its pause, a node, its image), and the most that a stopped run costs in GPUs.
OLD = 30 * 60


@contextmanager
def renewed(uri: str) -> Iterator[None]:
    """Within the body there is a sign at ``uri``, a new one every five minutes.

    Raises StorageError when the store refuses the first; a later one that fails is told, and the next is tried.
    """
    storage.write_text(uri, uuid.uuid4().hex)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEWED):
            try:
                storage.write_text(uri, uuid.uuid4().hex)
            except Exception as error:  # whatever it is, the job goes on for half an hour
                say(f"the sign that this task waits was not renewed: {error}")

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def end_when_old(stage: str) -> None:
    """From now on, end this process when nobody waits for its job; for the first of each node, and no other process.

    torchrun then ends the others, and Kubernetes the job, as when a node dies: its checkpoint stays for the next run.
    """
    uri = os.environ.get(VARIABLE)
    if uri and distributed.leads_machine():
        threading.Thread(target=_end_when_old, args=(uri, stage), daemon=True).start()


def _end_when_old(uri: str, stage: str) -> None:
    _wait_until_old(uri)
    print(
        f"sidgraft {stage}: no task has waited for this job for {OLD // 60} minutes: its run was stopped, or its task"
        " is lost. Start the run again: it goes on from the last checkpoint.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)  # this is not the main thread, which is at work


def _wait_until_old(uri: str) -> None:
    seen, since = "", time.monotonic()
    while time.monotonic() - since < OLD:
        time.sleep(RENEWED)
        sign = _read(uri)
        if sign is None or sign != seen:  # a store that gives no answer says nothing of the task
            seen, since = sign, time.monotonic()


def _read(uri: str) -> str | None:
    """The sign; empty where there is none, None where the store gives no answer."""
    try:
        return storage.read_text(uri) if storage.exists(uri) else ""
    except Exception:
        return None
