"""Files and folders on disk and in a real object store: whole or absent, checked, and errors that say what to do."""

import concurrent.futures
import contextlib
import hashlib
import io
import json
import os
import queue
import socket
import ssl
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sidgraft import artifacts, cli, models, storage
from sidgraft.stages.embed import embed
from sidgraft.storage import StorageError

MB = 1 << 20


def write_folder(folder, **files):
    for name, content in files.items():
        file = folder / name.replace("__", "/").replace("_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder


def contents(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def key(uri):
    return uri.removeprefix("s3://shop/")


@pytest.fixture
def impatient(monkeypatch):
    """One try a request, so that a test of what never answers does not last."""
    monkeypatch.setattr(storage, "TRIES", 0)
    storage._connect.cache_clear()
    yield
    storage._connect.cache_clear()


@pytest.fixture(params=["disk", pytest.param("store", marks=pytest.mark.s3)])
def place(request, tmp_path):
    """A place for files, on disk and in the store: the same is true of both."""
    return str(tmp_path / "place") if request.param == "disk" else request.getfixturevalue("store").place


def test_text_files_and_folders_come_back_as_they_went(place, tmp_path):
    made = write_folder(tmp_path / "made", a_txt=b"one", sub__b_bin=os.urandom(3 * MB), empty=b"")
    storage.write_text(f"{place}/note.txt", "Größe: 3 × 4\n")
    assert storage.read_text(f"{place}/note.txt") == "Größe: 3 × 4\n"
    storage.upload(made, f"{place}/folder")
    assert storage.list_uris(f"{place}/folder") == [f"{place}/folder/{n}" for n in ("a.txt", "empty", "sub/b.bin")]
    assert all(storage.exists(f"{place}/{name}") for name in ("note.txt", "folder"))
    assert not any(storage.exists(f"{place}/{name}") for name in ("fold", "other"))
    storage.download(f"{place}/folder", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(made)
    storage.download(f"{place}/folder/a.txt", tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_bytes() == b"one"

    # A newer folder takes the place of the older one, in both directions; nothing of the older one is left.
    newer = write_folder(tmp_path / "newer", a_txt=b"two")
    storage.upload(newer, f"{place}/folder")
    storage.download(f"{place}/folder", tmp_path / "back")
    assert contents(tmp_path / "back") == {"a.txt": b"two"}

    storage.delete(f"{place}/folder")
    storage.delete(f"{place}/folder")
    assert (storage.exists(f"{place}/folder"), storage.list_uris(f"{place}/folder")) == (False, [])
    assert storage.exists(f"{place}/note.txt")
    assert not list(tmp_path.rglob("*.partial"))


def test_a_local_path_needs_no_client(tmp_path):
    code = (
        "import sys; sys.modules['minio'] = None\n"
        "from sidgraft import artifacts, storage, tables\n"
        f"storage.write_text({str(tmp_path / 'x')!r}, 'y'); print(storage.read_text({str(tmp_path / 'x')!r}))\n"
        "try: storage.exists('s3://shop/x')\n"
        "except storage.StorageError as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "y\nthe package minio is not installed; install sidgraft[s3].\n"


@pytest.mark.s3
def test_a_large_file_goes_in_parts_and_carries_its_digest(store, tmp_path):
    content = os.urandom(2 * storage.PART + 12_345)
    (tmp_path / "large").write_bytes(content)
    storage.upload(tmp_path / "large", f"{store.place}/large")
    head = store.client().stat_object("shop", key(f"{store.place}/large"))
    assert head.etag.endswith("-3")  # S3 names an object of three parts so
    assert head.metadata["x-amz-meta-sha256"] == hashlib.sha256(content).hexdigest()
    storage.download(f"{store.place}/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content


@pytest.mark.s3
def test_a_listing_of_more_than_a_page_is_whole(store):
    client, names = store.client(), [f"{key(store.place)}/{n:04d}" for n in range(1005)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: client.put_object("shop", name, io.BytesIO(b"x"), 1), names))
    assert storage.list_uris(store.place) == [f"s3://shop/{name}" for name in names]
    storage.delete(store.place)
    assert storage.list_uris(store.place) == []


@pytest.mark.s3
def test_an_upload_survives_a_server_that_is_killed_and_started_again(store, tmp_path, monkeypatch):
    content = os.urandom(6 * storage.PART)
    (tmp_path / "large").write_bytes(content)
    happened = []

    def update(meter, length):
        meter.bytes += length
        if meter.bytes > 3 * storage.PART and not happened:
            happened.append(storage.exists(f"{store.place}/large"))
            store.kill()
            store.start()

    monkeypatch.setattr(storage._Meter, "update", update)
    storage.upload(tmp_path / "large", f"{store.place}/large")
    assert happened == [False]  # what is half there does not show
    monkeypatch.undo()
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    storage.download(f"{store.place}/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content


@pytest.mark.s3
def test_an_upload_that_broke_off_shows_as_incomplete_and_goes_on_where_it_was(store, tmp_path, monkeypatch):
    uri, client = f"{store.place}/folder", store.client()
    storage.upload(write_folder(tmp_path / "older", artifact_json=b"{}", a=b"1"), uri)
    made = write_folder(tmp_path / "made", artifact_json=b'{"files": {}}', a=b"2", b=b"3", c=b"4")
    put, sent = storage._put, []

    def until_the_third(bucket, name, *rest):
        if name.endswith("/c"):
            raise KeyboardInterrupt
        sent.append(name.rpartition("/")[2])
        put(bucket, name, *rest)

    monkeypatch.setattr(storage, "_put", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        storage.upload(made, uri)
    there = sorted(o.object_name.rpartition("/")[2] for o in client.list_objects("shop", key(uri), recursive=True))
    assert storage.is_mark(there[0])
    assert there[1:] == ["a", "b"]  # no artifact.json, neither the old one nor the new one
    assert not storage.exists(uri)
    for read in (storage.local, lambda uri: storage.download(uri, tmp_path / "back")):
        with pytest.raises(StorageError, match="incomplete"):
            read(uri)
    assert not (tmp_path / "back").exists()

    sent.clear()
    monkeypatch.setattr(storage, "_put", lambda bucket, name, *rest: (sent.append(name), put(bucket, name, *rest)))
    storage.upload(made, uri)
    names = [name.rpartition("/")[2] for name in sent]
    assert storage.is_mark(names[0])
    assert [name for name in names if not storage.is_mark(name)] == ["c", "artifact.json"]
    storage.download(uri, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(made)


@pytest.mark.s3
@pytest.mark.parametrize("order", ["ABABAB", "BAABBA"], ids=["first-ends-first", "last-ends-first"])
def test_a_writer_that_is_done_does_not_unmark_what_another_still_writes(store, tmp_path, monkeypatch, order):
    """A begins before B does; then each letter is a file of theirs that is written. No file is a manifest."""
    uri, put_file = f"{store.place}/model", storage._put_file
    storage.upload(write_folder(tmp_path / "older", a=b"1", b=b"1", c=b"1"), uri)
    made = write_folder(tmp_path / "made", a=b"2", b=b"2", c=b"2")
    turns, waiting = {name: queue.SimpleQueue() for name in "AB"}, queue.SimpleQueue()

    def in_turn(*arguments):
        waiting.put("at a file")
        turns[threading.current_thread().name].get(timeout=60)
        put_file(*arguments)

    def write():
        storage.upload(made, uri)
        waiting.put("done")

    monkeypatch.setattr(storage, "_put_file", in_turn)
    writers = {name: threading.Thread(target=write, name=name, daemon=True) for name in "AB"}
    for writer in writers.values():
        writer.start()
        assert waiting.get(timeout=60) == "at a file"
    for place, name in enumerate(order):
        assert not storage.exists(uri), f"before file {place}"
        turns[name].put(None)
        ends = name not in order[place + 1 :]
        assert waiting.get(timeout=60) == ("done" if ends else "at a file")
    assert storage.exists(uri)
    storage.download(uri, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(made)


@pytest.mark.s3
def test_a_folder_stays_marked_while_what_is_left_over_is_removed(store, tmp_path, monkeypatch):
    """Another writer begins at the last file, and ends when the removal begins."""
    uri, put_file, remove = f"{store.place}/folder", storage._put_file, storage._remove
    storage.upload(write_folder(tmp_path / "older", a=b"1", b=b"1"), uri)
    another, happened = storage._marked_incomplete("shop", f"{key(uri)}/"), []

    def begins(*arguments):
        another.__enter__()
        put_file(*arguments)

    def ends(bucket, keys):
        if f"{key(uri)}/b" in keys:
            another.__exit__(None, None, None)
            happened.append(storage.exists(uri))
        remove(bucket, keys)

    monkeypatch.setattr(storage, "_put_file", begins)
    monkeypatch.setattr(storage, "_remove", ends)
    storage.upload(write_folder(tmp_path / "made", a=b"2"), uri)
    assert happened == [False]
    assert storage.exists(uri)


@pytest.mark.s3
def test_a_deletion_that_broke_off_leaves_nothing_that_looks_whole(store, tmp_path, monkeypatch):
    storage.upload(write_folder(tmp_path / "made", a=b"1", b=b"2"), f"{store.place}/folder")
    monkeypatch.setattr(storage, "_remove", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        storage.delete(f"{store.place}/folder")
    assert not storage.exists(f"{store.place}/folder")


class Cutting:
    """A way to the server that breaks off the first answer after a number of bytes, and passes on everything else."""

    def __init__(self, target, after):
        self.target, self.left, self.cut = target, after, False
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                near, _ = self.socket.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            threading.Thread(target=self.copy, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self.copy, args=(far, near, True), daemon=True).start()

    def copy(self, source, target, is_answer):
        try:
            while data := source.recv(1 << 16):
                if is_answer and not self.cut:
                    self.left -= len(data)
                    self.cut = self.left < 0
                    if self.cut:
                        break
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):  # the other direction was quicker
                end.shutdown(socket.SHUT_RDWR)


@pytest.mark.s3
def test_a_download_that_breaks_off_goes_on_where_it_was(store, tmp_path, monkeypatch):
    content = os.urandom(4 * MB)
    (tmp_path / "file").write_bytes(content)
    storage.upload(tmp_path / "file", f"{store.place}/file")
    way = Cutting(int(store.url.rpartition(":")[2]), after=2 * MB)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{way.port}")
    client, starts = storage._connection(), []
    get = client.get_object
    monkeypatch.setattr(
        client, "get_object", lambda *a, offset, **k: (starts.append(offset), get(*a, offset=offset, **k))[1]
    )
    storage.download(f"{store.place}/file", tmp_path / "back")
    way.socket.close()
    assert way.cut
    assert len(starts) == 2
    assert 0 < starts[1] < len(content)
    assert (tmp_path / "back").read_bytes() == content


@pytest.mark.s3
@pytest.mark.parametrize("content", [b"all of it but the en", b"all of it but the END"], ids=["truncated", "altered"])
def test_an_object_that_is_not_what_was_sent_is_refused(store, tmp_path, content):
    digest = hashlib.sha256(b"all of it but the end").hexdigest()
    store.client().put_object(
        "shop", f"{key(store.place)}/x", io.BytesIO(content), len(content), metadata={"sha256": digest}
    )
    with pytest.raises(StorageError, match=r"is damaged: .* Upload it again"):
        storage.download(f"{store.place}/x", tmp_path / "x")
    with pytest.raises(StorageError, match="damaged"):
        storage.read_text(f"{store.place}/x")
    assert not (tmp_path / "x").exists()


@pytest.mark.s3
def test_names_that_leave_the_folder_are_refused(store, tmp_path, monkeypatch):
    class Found:
        object_name, size, etag = f"{key(store.place)}/../../evil", 1, "e"

    monkeypatch.setattr(storage._connection(), "list_objects", lambda *a, **k: iter([Found()]))
    with pytest.raises(StorageError, match="not allowed"):
        storage.download(store.place, tmp_path / "x")


@pytest.mark.s3
def test_the_local_copy_is_used_again_while_it_is_what_the_store_has(store, tmp_path, monkeypatch):
    storage.write_text(f"{store.place}/items.csv", "one")
    first = storage.local(f"{store.place}/items.csv")
    assert (first.name, first.read_text()) == ("items.csv", "one")
    fetch = storage._fetch
    monkeypatch.setattr(storage, "_fetch", lambda *_: pytest.fail("it was fetched again"))
    assert storage.local(f"{store.place}/items.csv") == first
    monkeypatch.setattr(storage, "_fetch", fetch)
    first.write_text("two")
    assert storage.local(f"{store.place}/items.csv").read_text() == "one"
    before = storage.fingerprint(f"{store.place}/items.csv")
    storage.write_text(f"{store.place}/items.csv", "three")
    assert storage.local(f"{store.place}/items.csv").read_text() == "three"
    assert storage.fingerprint(f"{store.place}/items.csv") != before
    assert storage.file_digest(f"{store.place}/items.csv") == hashlib.sha256(b"three").hexdigest()
    store.client().put_object("shop", f"{key(store.place)}/theirs", io.BytesIO(b"four"), 4)  # carries no digest
    assert storage.file_digest(f"{store.place}/theirs") == hashlib.sha256(b"four").hexdigest()


@pytest.mark.s3
@pytest.mark.parametrize(
    ("changes", "uri", "expected"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "not-the-secret"}, "s3://shop/x", "refuses the credentials .* check AWS_ACCESS"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "s3://shop/x", "refuses the credentials"),
        ({}, "s3://nowhere/x", "there is no bucket nowhere at 127.0.0.1:.*: create it"),
        ({}, "s3://shop/nothing", "does not exist in the store: correct the URI"),
        ({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}, "s3://shop/x", "no answer from 127.0.0.1:9 .*check AWS_ENDP"),
        ({"AWS_ENDPOINT_URL_S3": "127.0.0.1:9"}, "s3://shop/x", "AWS_ENDPOINT_URL_S3 is not the address"),
        ({"AWS_ENDPOINT_URL_S3": "http://a:sec@h"}, "s3://shop/x", "AWS_ENDPOINT_URL_S3 is not the address"),
        ({"AWS_S3_ADDRESSING_STYLE": "dns"}, "s3://shop/x", "expected auto, path or virtual"),
        ({"AWS_ACCESS_KEY_ID": "", "HOME": "/nonexistent"}, "s3://shop/x", "no credentials .* set AWS_ACCESS_KEY_ID"),
        ({}, "s3://shop", "expected s3://bucket/key"),
        ({}, "s3://shop/a/../b", "expected names between single slashes"),
    ],
)
def test_what_is_wrong_is_one_sentence_that_says_what_to_do(
    store, impatient, monkeypatch, tmp_path, changes, uri, expected
):
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    calls = [lambda: storage.download(uri, tmp_path / "x"), lambda: storage.local(uri)]
    if "nothing" not in uri:
        (tmp_path / "y").write_text("y")
        calls.append(lambda: storage.upload(tmp_path / "y", uri))
    for call in calls:
        with pytest.raises(StorageError, match=expected) as caught:
            call()
        message = str(caught.value)
        assert "\n" not in message
        assert not [secret for secret in (os.environ["AWS_SECRET_ACCESS_KEY"], "sec@h") if secret in message]
    assert not (tmp_path / "x").exists()


@pytest.mark.s3
@pytest.mark.parametrize("kind", ["variables' names", "names of Kubeflow's secret", "profiles"])
def test_credentials_come_from_a_mounted_secret_or_a_file_of_profiles(store, monkeypatch, tmp_path, kind):
    mine, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    place = tmp_path / "secret"
    if kind == "profiles":
        place.write_text(
            f"[default]\naws_access_key_id = x\n[two]\naws_access_key_id={mine}\naws_secret_access_key={secret}"
        )
        monkeypatch.setenv("AWS_PROFILE", "two")
    else:
        names = ("accesskey", "secretkey") if "Kubeflow" in kind else ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        place.mkdir()
        for name, value in zip(names, (mine, secret), strict=True):
            (place / name).write_text(value + "\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(place))
    storage.write_text(f"{store.place}/x", "y")
    assert storage.read_text(f"{store.place}/x") == "y"


def test_a_certificate_that_nobody_vouches_for_is_refused(impatient, monkeypatch, tmp_path):
    made = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert"), "-subj", "/CN=localhost"]
    name = ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *made, *name], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")

    def answer(listener):
        while True:
            try:
                with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            except ssl.SSLError:
                continue
            except OSError:
                return

    for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")):
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"https://localhost:{listener.getsockname()[1]}")
        with pytest.raises(StorageError, match=r"certificate of localhost:\d+ is not trusted: set AWS_CA_BUNDLE"):
            storage.read_text("s3://shop/x")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "cert"))
        with pytest.raises(StorageError, match="does not exist"):
            storage.read_text("s3://shop/x")


@pytest.mark.s3
def test_stages_read_and_write_the_store(store, tmp_path, capsys):
    place = store.place
    rows = [{"item_id": f"i{n}", "title": f"item {n}"} for n in range(6)]
    users = [{"user_id": f"u{n}", "items": [f"i{(n + k) % 6}" for k in range(4)]} for n in range(4)]
    for name, table in (("items", rows), ("users", users)):
        storage.write_text(f"{place}/{name}.jsonl", "\n".join(map(json.dumps, table)))
    prepare = [
        "prepare", "--catalog", f"{place}/items.jsonl", "--interactions", f"{place}/users.jsonl",
        "--out-catalog", f"{place}/catalog", "--out-interactions", f"{place}/interactions",
    ]  # fmt: skip
    assert cli.main(prepare) == 0
    vectors = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    pq.write_table(
        pa.table({"item_id": [f"i{n}" for n in range(6)], "embedding": list(vectors)}), tmp_path / "own.parquet"
    )
    storage.upload(tmp_path / "own.parquet", f"{place}/own.parquet")
    embed(f"{place}/catalog", f"{place}/embeddings", embeddings=f"{place}/own.parquet")
    made = artifacts.load(f"{place}/embeddings", "item_embeddings/v1")
    assert np.array_equal(np.stack(made.read_table("embeddings.parquet")["embedding"].to_numpy()), vectors)
    assert artifacts.load(f"{place}/catalog", "catalog/v1").digest in made.lineage
    assert not list((tmp_path / "cache").rglob("*.partial"))

    capsys.readouterr()
    assert cli.main([arg.replace("items.jsonl", "gone.jsonl") for arg in prepare]) == 1
    assert "gone.jsonl does not exist in the store" in capsys.readouterr().err


@pytest.mark.s3
def test_an_artifact_whose_files_are_not_its_own_is_refused(store, shop):
    storage.upload(shop["catalog"], f"{store.place}/catalog")
    assert artifacts.load(f"{store.place}/catalog", "catalog/v1").kind == "catalog/v1"
    storage.write_text(f"{store.place}/catalog/catalog.parquet", "of another artifact")
    with pytest.raises(
        StorageError, match=r"catalog.parquet is missing or differs .* artifact in the store is damaged"
    ):
        artifacts.load(f"{store.place}/catalog", "catalog/v1")


@pytest.mark.s3
def test_a_failed_stage_leaves_its_mark_in_the_store(store):
    artifacts.record_failure(f"{store.place}/out", "metrics/v1", stage="evaluate", error="no", variant="mean")
    with pytest.raises(artifacts.FailedArtifactError, match="stage evaluate failed: no"):
        artifacts.load(f"{store.place}/out", "metrics/v1")


@pytest.mark.s3
def test_a_base_model_comes_from_the_store(store, tmp_path):
    model, tokenizer = models.load_base("tiny")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    storage.upload(tmp_path / "model", f"{store.place}/model")
    there, words = models.load_base(f"{store.place}/model")
    assert models.weights_digest(there) == models.weights_digest(model)
    assert words.encode("a shop") == tokenizer.encode("a shop")
