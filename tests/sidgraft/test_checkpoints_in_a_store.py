"""Checkpoints in a real object store: whole or not there, pruned, resumed on another machine, refused in a sentence."""

import io
import json
import threading
from types import SimpleNamespace

import pytest
from test_checkpoints import break_off, run, same_weights

from sidgraft import distributed, storage
from sidgraft.checkpoints import WHOLE, Checkpoints, remote_place, working_directory
from sidgraft.storage import StorageError

pytestmark = pytest.mark.s3
FACTS = {"base model": "aa", "vocabulary": "bb", "processes": 1}


def names(uri):
    return {found.removeprefix(f"{uri}/") for found in storage.list_uris(uri)}


def save(directory, remote, step, *, best=None, saved=None):
    """Write a checkpoint as the Trainer does, with the best weights beside it, and let it be kept."""
    saved = saved or Checkpoints(directory, FACTS, 10.0, remote)
    written = directory / f"checkpoint-{step}"
    (written / "global_step").mkdir(parents=True)
    (written / "trainer_state.json").write_text(f'{{"step": {step}}}')
    (written / "global_step" / "shard_0.pt").write_bytes(bytes([step]) * 100)
    if best is not None:
        (directory / "best").mkdir(exist_ok=True)
        (directory / "best" / "model.safetensors").write_text(best)
    saved.on_save(None, SimpleNamespace(global_step=step), None)
    return saved


def on_a_fresh_machine(tmp_path, remote, facts=FACTS):
    folder = tmp_path / f"fresh-{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    return folder, Checkpoints(folder, facts, 10.0, remote)


def test_a_run_that_broke_off_goes_on_to_the_same_bits_on_another_machine(shop, store, tmp_path, monkeypatch):
    every = {"checkpoints": store.place, "checkpoint_minutes": 0.0}
    run(shop, tmp_path / "whole")
    with monkeypatch.context() as patch:
        break_off(patch, 8, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run(shop, tmp_path / "out", **every)
    (kept,) = {name.split("/")[1] for name in names(store.place) if "/checkpoint-" in name}
    assert kept == "checkpoint-7"  # in the middle of the second epoch; the older ones are gone
    assert {name.split("/")[1] for name in names(store.place) if "/beside-" in name} == {
        "beside-5"
    }  # the first epoch's
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    run(shop, tmp_path / "out", **every)
    assert same_weights(tmp_path / "whole", tmp_path / "out")
    logs = [json.loads((tmp_path / name / "training.json").read_text())["log"] for name in ("whole", "out")]
    assert logs[0] == logs[1]
    assert names(store.place) == set()  # the artifact stands: nothing is left in the store or in the caches
    assert not list((tmp_path / "another machine").glob("sidgraft/checkpoints/*"))


def test_a_checkpoint_is_whole_in_the_store_and_its_older_ones_go(store, tmp_path):
    remote, directory = f"{store.place}/run", tmp_path / "here"
    directory.mkdir()
    saved = save(directory, remote, 5, best="first")
    assert {n for n in names(remote) if n.startswith("beside")} == {"beside-5/best/model.safetensors"}
    save(directory, remote, 7, saved=saved)  # nothing better: what lies beside it is not sent again
    assert names(remote) == {
        "beside-5/best/model.safetensors", f"checkpoint-7/{WHOLE}", "checkpoint-7/trainer_state.json",
        "checkpoint-7/global_step/shard_0.pt",
    }  # fmt: skip
    save(directory, remote, 10, best="second", saved=saved)
    assert {name.split("/")[0] for name in names(remote)} == {"beside-10", "checkpoint-10"}
    fresh, again = on_a_fresh_machine(tmp_path, remote)
    assert again.last() == str(fresh / "checkpoint-10")
    assert (fresh / "best" / "model.safetensors").read_text() == "second"
    assert (fresh / "checkpoint-10" / "global_step" / "shard_0.pt").read_bytes() == bytes([10]) * 100
    assert {entry.name for entry in fresh.iterdir()} == {"best", "checkpoint-10"}


def test_what_is_as_new_here_is_not_brought_again(store, tmp_path, monkeypatch):
    remote, directory = f"{store.place}/run", tmp_path / "here"
    directory.mkdir()
    save(directory, remote, 5)
    monkeypatch.setattr(storage, "download", lambda *_: pytest.fail("it was brought again"))
    assert Checkpoints(directory, FACTS, 10.0, remote).last() == str(directory / "checkpoint-5")


@pytest.mark.parametrize("how", ["no whole.json", "marked incomplete", "damaged", "lacks a file"])
def test_one_that_cannot_be_used_is_passed_over_for_an_older_one(store, tmp_path, monkeypatch, capsys, how):
    remote, directory = f"{store.place}/run", tmp_path / "here"
    directory.mkdir()
    saved = save(directory, remote, 5, best="first")
    monkeypatch.setattr(storage, "delete", lambda uri: None)  # a kill before the older one was removed
    save(directory, remote, 7, saved=saved)
    monkeypatch.undo()
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    client, key = store.client(), f"{remote}/checkpoint-7/".removeprefix("s3://shop/")
    shard = f"{key}global_step/shard_0.pt"
    if how == "no whole.json":
        client.remove_object("shop", key + WHOLE)
    elif how == "marked incomplete":
        client.put_object("shop", f"{key}.incomplete", io.BytesIO(b""), 0)
    elif how == "lacks a file":
        client.remove_object("shop", shard)
    else:
        digest = client.stat_object("shop", shard).metadata["x-amz-meta-sha256"]
        client.put_object("shop", shard, io.BytesIO(b"x" * 100), 100, metadata={"sha256": digest})
    fresh, again = on_a_fresh_machine(tmp_path, remote)
    assert again.last() == str(fresh / "checkpoint-5")
    assert not (fresh / "checkpoint-7").exists()
    said = capsys.readouterr().err
    assert ("checkpoint-7 cannot be used" in said) == (how in ("damaged", "lacks a file"))

    if how in ("damaged", "lacks a file"):  # and where there is no older one
        storage.delete(f"{remote}/checkpoint-5")
        alone, last = on_a_fresh_machine(tmp_path, remote)
        with pytest.raises(
            StorageError, match=r"no checkpoint of this run .* can be used.*Delete that folder to train"
        ):
            last.last()
        assert list(alone.iterdir()) == []


def test_one_that_was_made_for_something_else_is_refused_before_it_is_brought(store, tmp_path, monkeypatch):
    remote, directory = f"{store.place}/run", tmp_path / "here"
    directory.mkdir()
    save(directory, remote, 5)
    _, other = on_a_fresh_machine(tmp_path, remote, FACTS | {"vocabulary": "cc"})
    monkeypatch.setattr(storage, "download", lambda *_: pytest.fail("it was brought"))
    with pytest.raises(ValueError, match="made for vocabulary bb, but this run has vocabulary cc"):
        other.last()


def test_a_server_killed_within_an_upload_keeps_the_older_checkpoint(store, tmp_path, monkeypatch):
    remote, directory = f"{store.place}/run", tmp_path / "here"
    directory.mkdir()
    saved = save(directory, remote, 5, best="first")
    put = storage._put

    def dying(bucket, name, *rest):
        if "checkpoint-7" in name and name.endswith("shard_0.pt"):
            store.kill()
        put(bucket, name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "TRIES", 0)
        storage._connect.cache_clear()
        patch.setattr(storage, "_put", dying)
        with pytest.raises(StorageError, match=r"checkpoint-7 could not be kept.*no answer.*older one.*same command"):
            save(directory, remote, 7, best="second", saved=saved)
    storage._connect.cache_clear()
    store.start()
    store.wait()
    fresh, again = on_a_fresh_machine(tmp_path, remote)
    assert again.last() == str(fresh / "checkpoint-5")
    assert (fresh / "best" / "model.safetensors").read_text() == "first"
    here = Checkpoints(directory, FACTS, 10.0, remote)  # this machine has the newer one, which is whole here
    assert here.last() == str(directory / "checkpoint-7")
    save(directory, remote, 9, saved=here)
    assert {name.split("/")[0] for name in names(remote)} == {"beside-9", "checkpoint-9"}


@pytest.mark.slow
def test_a_server_that_is_killed_within_an_upload_and_comes_back_costs_only_time(store, tmp_path, monkeypatch, caplog):
    remote, directory = f"{store.place}/run", tmp_path / "here"
    directory.mkdir()
    saved = save(directory, remote, 5, best="first")
    put, comes_back = storage._put, threading.Timer(2.0, store.start)

    def dying(bucket, name, *rest):
        if name.endswith("checkpoint-7/global_step/shard_0.pt") and not comes_back.is_alive():
            store.kill()
            comes_back.start()
        put(bucket, name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "_put", dying)
        try:
            save(directory, remote, 7, best="second", saved=saved)
        finally:
            comes_back.join()
            store.wait()  # for the tests after this one
    assert "Retrying" in caplog.text
    assert {name.split("/")[0] for name in names(remote)} == {"beside-7", "checkpoint-7"}
    fresh, again = on_a_fresh_machine(tmp_path, remote)
    assert again.last() == str(fresh / "checkpoint-7")
    assert (fresh / "checkpoint-7" / "global_step" / "shard_0.pt").read_bytes() == bytes([7]) * 100
    assert (fresh / "best" / "model.safetensors").read_text() == "second"


def test_a_store_that_refuses_is_known_before_anything_is_computed(shop, store, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setattr("sidgraft.stages.finetune.load_grafted", lambda *_: pytest.fail("it began"))
    with pytest.raises(StorageError, match="refuses the credentials"):
        run(shop, tmp_path / "out", checkpoints=store.place)
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "cache").rglob("checkpoints"))


def test_the_result_stands_where_the_store_will_not_delete(store, tmp_path, monkeypatch, capsys):
    def refuse(uri):
        raise StorageError(f"{uri}: no")

    monkeypatch.setattr(storage, "delete", refuse)
    with working_directory(store.place, "run", str(tmp_path / "out")) as work:
        assert work.is_dir()
    assert not work.exists()
    assert "were not removed" in capsys.readouterr().err


def test_where_a_run_is_kept():
    assert remote_place("s3://shop/checkpoints/", "run") == "s3://shop/checkpoints/run"
    assert remote_place("/volume/checkpoints", "run") == remote_place("", "run") == ""


class Machines:
    """Two machines, whose first processes take turns: each hears what the others have said so far."""

    def __init__(self, patch, tmp_path, remote):
        self.patch, self.remote, self.said = patch, remote, {}
        self.folders = [tmp_path / f"machine-{number}" for number in (0, 1)]
        for folder in self.folders:
            folder.mkdir()
        self.saved = [Checkpoints(folder, FACTS, 10.0, remote) for folder in self.folders]
        patch.setattr(distributed, "on_one_machine", lambda: False)

    def become(self, number):
        """Be the first process of a machine from now on."""

        def gather(value):
            self.said[number] = value
            return list(self.said.values())

        for name, value in (("rank", number), ("machine", number), ("leads_machine", True)):
            self.patch.setattr(distributed, name, lambda value=value: value)
        self.patch.setattr(distributed, "gather", gather)

    def save(self, step):
        """Both write their shard, the first what else there is; the last to come is the first machine."""
        for number in (1, 0):
            self.become(number)
            written = self.folders[number] / f"checkpoint-{step}"
            (written / "global_step").mkdir(parents=True)
            (written / "global_step" / f"shard_{number}.pt").write_bytes(bytes([step, number]) * 50)
            if number == 0:
                (written / "trainer_state.json").write_text("{}")
            self.saved[number].on_save(None, SimpleNamespace(global_step=step), None)
        self.said.clear()

    def last(self):
        """What each finds, in a process of its own that was started anew."""
        found = []
        for number in (0, 1):
            self.become(number)
            found.append(Checkpoints(self.folders[number], FACTS, 10.0, self.remote).last())
        self.said.clear()
        return found


@pytest.fixture
def machines(store, tmp_path, monkeypatch):
    return Machines(monkeypatch, tmp_path, f"{store.place}/run")


def test_of_several_machines_each_sends_its_part_and_brings_all_of_them_back(machines):
    for step in (5, 7):
        machines.save(step)
        assert names(machines.remote) == {
            f"part-{step}-1/global_step/shard_1.pt", f"checkpoint-{step}/global_step/shard_0.pt",
            f"checkpoint-{step}/trainer_state.json", f"checkpoint-{step}/{WHOLE}",
        }  # fmt: skip
        assert list(machines.folders[1].iterdir()) == []  # what it has sent
    assert machines.last() == [str(folder / "checkpoint-7") for folder in machines.folders]
    for folder in machines.folders:
        assert {entry.name for entry in folder.iterdir()} == {"checkpoint-7"}
        for number in (0, 1):
            shard = folder / "checkpoint-7" / "global_step" / f"shard_{number}.pt"
            assert shard.read_bytes() == bytes([7, number]) * 50
    machines.save(9)
    assert list(machines.folders[1].iterdir()) == []
    assert {name.split("/")[0] for name in names(machines.remote)} == {"checkpoint-9", "part-9-1"}


@pytest.mark.parametrize("lost", ["part-7-1", "checkpoint-7/whole.json"])
def test_a_checkpoint_that_lacks_a_part_is_passed_over_by_all_machines(machines, store, monkeypatch, lost):
    machines.save(5)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "delete", lambda uri: None)  # a kill before the older one was removed
        machines.save(7)
    storage.delete(f"{machines.remote}/{lost}")
    assert machines.last() == [str(folder / "checkpoint-5") for folder in machines.folders]


def test_machines_that_find_different_checkpoints_are_told(machines):
    machines.save(5)
    machines.said[0] = 7
    machines.become(1)
    with pytest.raises(
        StorageError, match=r"different checkpoints under .* at the steps \[5, 7\]: start the run again"
    ):
        Checkpoints(machines.folders[1], FACTS, 10.0, machines.remote).last()


def test_a_part_that_cannot_be_sent_is_told(machines, monkeypatch):
    def refuse(path, uri, **_):
        raise StorageError("no room.")

    monkeypatch.setattr(storage, "upload", refuse)
    with pytest.raises(StorageError, match=r"checkpoint-5 could not be kept in the store: no room\. An older one"):
        machines.save(5)


def test_machines_that_share_a_cache_keep_their_parts_apart(store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    places = []
    for number in (1, 0):
        alone = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}
        for name, value in (alone | {"RANK": number, "GROUP_RANK": number}).items():
            monkeypatch.setenv(name, str(value))
        with working_directory(store.place, "run", str(tmp_path / "out")) as work:
            places.append(work)
        assert not work.exists()
    assert len(set(places)) == 2
    assert {remote_place(store.place, place.name) for place in places} == {f"{store.place}/run"}
    assert names(store.place) == set()
