"""The sign that a task waits for its job: when nodes give it up, on a clock of our own, and how it is renewed."""

import threading

import pytest

from sidgraft import lease, storage

MINUTE = 60


class Clock:
    """Time as the node sees it: it passes in `sleep` alone, and what is to happen meanwhile happens there."""

    def __init__(self, until):
        self.now, self.until = 0.0, until  # until: (seconds, what happens in every step that ends by then), in order

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        happens = next((what for end, what in self.until if self.now <= end), None)
        if happens:
            happens(self)


@pytest.fixture
def lasts(monkeypatch, tmp_path):
    """How many minutes a node stays; the sign is the file given beside it."""
    sign = tmp_path / "waited-for"

    def run(*until):
        clock = Clock([(minutes * MINUTE, what) for minutes, what in until])
        monkeypatch.setattr(lease, "time", clock)
        lease._wait_until_old(str(sign))
        return clock.now / MINUTE

    return run, sign


def test_a_node_stays_half_an_hour_beyond_the_last_sign(lasts):
    run, sign = lasts
    assert run() == 30  # nobody has ever waited

    def renew(clock):
        sign.write_text(str(clock.now))

    sign.unlink(missing_ok=True)
    assert run((600, renew)) == 630
    assert run() == 35  # what an earlier task has left is new to a node once


def test_a_sign_that_is_missed_and_comes_in_time_keeps_the_node(lasts):
    run, sign = lasts

    def renew(clock):
        sign.write_text(str(clock.now))

    assert run((10, renew), (35, None), (40, renew)) == 70  # as when a task is tried again after 25 minutes
    assert run((10, renew), (40, None), (60, renew)) == 40  # too late


def test_a_sign_that_is_removed_is_none(lasts):
    run, sign = lasts
    sign.write_text("a")
    assert run((10, None), (15, lambda clock: sign.unlink())) == 45


def test_a_store_that_gives_no_answer_says_nothing_of_the_task(lasts, monkeypatch):
    run, sign = lasts
    sign.write_text("a")
    exists = storage.exists

    def away(clock):
        def exists(uri):
            raise storage.StorageError("no answer")

        monkeypatch.setattr(storage, "exists", exists)

    def back(clock):
        monkeypatch.setattr(storage, "exists", exists)

    assert run((300, away), (305, back)) == 335


def test_a_node_that_was_held_up_looks_before_it_gives_up(lasts, monkeypatch):
    run, sign = lasts

    def held_up(clock):
        clock.now += 120 * MINUTE
        sign.write_text("new")

    assert run((5, held_up)) == 155


def test_a_task_renews_its_sign_and_outlives_a_store_that_fails(tmp_path, monkeypatch, capsys):
    written, write, enough = [], storage.write_text, threading.Event()

    def failing(uri, text):
        written.append(text)
        if len(written) == 2:
            raise storage.StorageError("the store is away")
        write(uri, text)
        if len(written) == 5:
            enough.set()

    monkeypatch.setattr(storage, "write_text", failing)
    monkeypatch.setattr(lease, "RENEWED", 0.01)
    sign = tmp_path / "waited-for"
    with lease.renewed(str(sign)):
        assert sign.read_text() == written[0]  # at once, before the job is made
        assert enough.wait(60)
    assert len(set(written)) == len(written) >= 5
    assert sign.read_text() == written[-1]
    assert "the sign that this task waits was not renewed: the store is away" in capsys.readouterr().err
    assert not [thread for thread in threading.enumerate() if "renew" in thread.name]  # none is written from now on


def test_a_store_that_refuses_the_first_sign_is_told_before_a_job_is_made(tmp_path, monkeypatch):
    def refuse(uri, text):
        raise storage.StorageError("refused")

    monkeypatch.setattr(storage, "write_text", refuse)
    with pytest.raises(storage.StorageError, match="refused"), lease.renewed(str(tmp_path / "waited-for")):
        pytest.fail("the body was entered")


@pytest.fixture
def ended(monkeypatch):
    """Set, with the status, when this process would have ended."""
    ended = threading.Event()

    def leave(status):
        ended.status = status
        ended.set()

    monkeypatch.setattr(lease.os, "_exit", leave)
    monkeypatch.setattr(lease, "RENEWED", 0.01)
    monkeypatch.setattr(lease, "OLD", 0.05)
    return ended


def test_the_first_process_of_a_node_ends_and_says_why(ended, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SIDGRAFT_LEASE", str(tmp_path / "waited-for"))
    lease.end_when_old("finetune")
    assert ended.wait(60)
    assert ended.status == 1
    assert capsys.readouterr().err.startswith("sidgraft finetune: no task has waited for this job for ")


def test_other_processes_and_trainings_without_a_task_look_for_no_sign(ended, monkeypatch, tmp_path):
    monkeypatch.delenv("SIDGRAFT_LEASE", raising=False)
    before = threading.active_count()
    lease.end_when_old("finetune")
    monkeypatch.setenv("SIDGRAFT_LEASE", str(tmp_path / "waited-for"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("LOCAL_RANK", "1")
    lease.end_when_old("finetune")
    assert threading.active_count() <= before


@pytest.mark.s3
def test_the_sign_is_seen_through_an_object_store(store, monkeypatch):
    uri = f"{store.place}/job/waited-for"
    assert lease._read(uri) == ""
    signs = []
    for _ in range(2):  # as when a task is tried again
        with lease.renewed(uri):
            signs.append(lease._read(uri))
    assert all(signs)
    assert signs[0] != signs[1]
    storage.delete(f"{store.place}/job")
    assert lease._read(uri) == ""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert lease._read(uri) is None
