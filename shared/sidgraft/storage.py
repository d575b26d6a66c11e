"""Files and folders on disk or in an object store: each function takes a local path or `s3://bucket/key`.

    storage.upload("runs/model", "s3://shop/models/7")      # a file or a folder, checked, never half there
    storage.download("s3://shop/models/7", "/tmp/model")
    with storage.local("s3://shop/catalog.parquet").open("rb") as stream: ...

The endpoint, region and credentials come from the variables that other S3 tools read, those of a service account's
identity in a cloud among them (docs/storage.md). A store keeps single objects whole, so a file is there or it is not.
A folder is many objects: while it is being written or deleted it holds an object `.incomplete-…` of each writer, and is
not read; `artifact.json` is written last and deleted first. Every object carries the SHA-256 of its content, which is
checked when it is read. Needs the extra `s3` where a URI is remote.
"""

from __future__ import annotations

import configparser
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from sidgraft.progress import Progress

MANIFEST = "artifact.json"
INCOMPLETE = ".incomplete"  # begins the name of what marks a remote folder that is being written or deleted

PART = 16 << 20  # bytes of a part of a large object; four are in memory at a time
MOST_PARTS = 10_000  # of one object, S3's limit
CHUNK = 1 << 20  # bytes read at a time
FILES_AT_ONCE = 4  # of a folder that is read
MEGABYTE = 1_000_000

# A request is tried again when the store does not answer or is overloaded. The waits of one request add up to about
# 75 seconds (0, 1, 2, 4, … at most 20 each, and up to half a second of jitter): a store that is restarted is back by
# then. An answer that breaks off, and what else a repeated request cannot mend, is tried again from where it was.
CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 60.0
TRIES = 8
RETRIED_STATUSES = (429, 500, 502, 503, 504)
RETRIED_CODES = ("InternalError", "NoSuchUpload", "RequestTimeout", "ServiceUnavailable", "SlowDown")
REFUSED_CODES = (
    "AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "InvalidTokenId", "SignatureDoesNotMatch",
)  # fmt: skip

# The keys of a mounted secret that hold the two halves of the credentials and a session's token: named as the
# variables are, or as in the secret that Kubeflow Pipelines makes for its own store.
SECRET_KEYS = {
    "access_key": ("AWS_ACCESS_KEY_ID", "accesskey"),
    "secret_key": ("AWS_SECRET_ACCESS_KEY", "secretkey"),
    "session_token": ("AWS_SESSION_TOKEN",),
}

# Where a service account's identity in the cloud is found, in the order in which minio looks: a token that is exchanged
# for credentials (a web identity), or an agent beside the pod that hands them out. The other variables belong to these.
IDENTITIES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
IDENTITY_SETTINGS = (
    *IDENTITIES, "AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME", "AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
)  # fmt: skip


class StorageError(ValueError):
    """Something in the object store is missing, damaged or refused; the message says what to do."""


@dataclass(frozen=True)
class _Object:
    """An object of the store: its name within the folder that was asked for, its key, its size in bytes."""

    name: str
    key: str
    size: int
    etag: str


def is_remote(uri: str | Path) -> bool:
    """Whether ``uri`` names something in an object store."""
    return str(uri).startswith("s3://")


def exists(uri: str | Path) -> bool:
    """Whether there is a file or a folder; a remote folder counts when it has been written to its end."""
    if not is_remote(uri):
        return Path(uri).exists()
    with _explained(uri):
        bucket, key = _parse(uri)
        if _stat(bucket, key) is not None:
            return True
        folder = key.rstrip("/") + "/"
        found = next(_connection().list_objects(bucket, prefix=folder, recursive=True), None)
        return found is not None and not _marks(bucket, folder)


def list_uris(prefix: str | Path) -> list[str]:
    """The URIs of all files in a folder and in the folders below it, sorted; none where there is no such folder."""
    if not is_remote(prefix):
        return sorted(str(file) for file in Path(prefix).rglob("*") if file.is_file())
    with _explained(prefix):
        bucket, key = _parse(prefix)
        return [f"s3://{bucket}/{found.key}" for found in _listed(bucket, key) if not is_mark(found.name)]


def read_text(uri: str | Path) -> str:
    """Read a small UTF-8 file. Raises StorageError when a remote one is missing or damaged."""
    if not is_remote(uri):
        return Path(uri).read_text(encoding="utf-8")
    with _explained(uri):
        bucket, key = _parse(uri)
        stream = io.BytesIO()
        _fetch(bucket, _head(bucket, key), stream, None)
        return stream.getvalue().decode("utf-8")


def write_text(uri: str | Path, text: str) -> None:
    """Write a small UTF-8 file whole: a reader sees the old text or the new one."""
    content = text.encode("utf-8")
    if not is_remote(uri):
        with _partial_file(Path(uri)) as stream:
            stream.write(content)
        return
    with _explained(uri):
        bucket, key = _parse(uri)
        digest = hashlib.sha256(content).hexdigest()
        _put(bucket, key, lambda: io.BytesIO(content), len(content), digest, None)


def download(uri: str | Path, path: str | Path) -> None:
    """Bring a file or a folder to the local ``path``, in place of what is there, when all of it has been checked.

    Checked are the sizes, the digests that the objects carry, and those of an `artifact.json`. Raises StorageError
    when something is missing, damaged, incomplete, or changes meanwhile.
    """
    path = Path(path)
    if not is_remote(uri):
        _copy(Path(uri), path)
        return
    with _explained(uri):
        bucket, _ = _parse(uri)
        _download(uri, bucket, _find(uri), path)


def upload(path: str | Path, uri: str | Path, last: str = MANIFEST) -> None:
    """Bring a local file or folder to ``uri``, in place of what is there.

    A remote folder is marked incomplete while it changes, and its file ``last`` is written last; files that are there
    already with the same content are not sent again, so that an upload that broke off goes on where it was. Raises
    StorageError when the store refuses, does not answer, or has not kept all of it.
    """
    path = Path(path)
    if not path.exists():
        raise StorageError(f"{path} does not exist, so it cannot be uploaded to {uri}.")
    if not is_remote(uri):
        _copy(path, Path(uri))
        return
    with _explained(uri):
        bucket, key = _parse(uri)
        if path.is_file():
            with _meter("upload", path.name, path.stat().st_size) as meter:
                _put_file(bucket, key, path, meter)
        else:
            _upload_folder(path, bucket, key.rstrip("/") + "/", last)


def delete(prefix: str | Path) -> None:
    """Delete a file, or a folder with all that is in it; nothing happens where there is none."""
    if not is_remote(prefix):
        path = Path(prefix)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return
    with _explained(prefix):
        bucket, key = _parse(prefix)
        if _stat(bucket, key) is not None:
            _connection().remove_object(bucket, key)
        found = _listed(bucket, key)
        if found:
            folder = key.rstrip("/") + "/"
            with _marked_incomplete(bucket, folder) as renew:
                _remove(bucket, [o.key for o in found if o.name == MANIFEST])
                renew()
                _remove(bucket, [o.key for o in found if o.name != MANIFEST and not is_mark(o.name)])


def local(uri: str | Path) -> Path:
    """A local path with the content of ``uri``: itself, or a checked copy in the user's cache.

    A copy is used again while the store lists the same objects and it still has the digests it came with.
    """
    if not is_remote(uri):
        return Path(uri)
    with _explained(uri):
        bucket, key = _parse(uri)
        found = _find(uri)
        place = cache_folder() / "s3" / _fingerprint(uri, found)[:24]
        content = place / (PurePosixPath(key).name or bucket)
        if not _is_intact(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(place, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=place.parent, prefix=".", suffix=".partial") as folder:
                fresh = Path(folder) / "copy"
                fresh.mkdir()
                digests = _download(uri, bucket, found, fresh / content.name)
                (fresh / "digests.json").write_text(json.dumps(digests, indent=1), encoding="utf-8")
                try:
                    fresh.rename(place)
                except OSError:
                    if not place.is_dir():  # otherwise another process was quicker
                        raise
        return content


def file_digest(uri: str | Path) -> str:
    """SHA-256 of a file's content, in hexadecimal; a remote file that carries its digest is not read for it."""
    if is_remote(uri):
        with _explained(uri):
            bucket, key = _parse(uri)
            head = _stat(bucket, key)
            if head is not None and (digest := _digest_of(head.metadata)):
                return digest
    return _sha256(local(uri))


def fingerprint(uri: str | Path) -> str:
    """Digest of what a remote file or folder holds by its listing (names, sizes, ETags), without reading it."""
    with _explained(uri):
        return _fingerprint(uri, _find(uri))


def cache_folder() -> Path:
    """Where sidgraft keeps what can be made or fetched again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sidgraft"


def draft_directory(out: Path) -> Path:
    """Make a hidden directory beside ``out``, and remove what a kill within `replace` has left there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for sibling in out.parent.iterdir():
        if re.fullmatch(rf"\.{re.escape(out.name)}\.\d+\.old", sibling.name):
            shutil.rmtree(sibling, ignore_errors=True)
    draft_path = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    draft_path.chmod(0o755)  # mkdtemp makes it private; another user's container reads it later
    return draft_path


def replace(draft_path: Path, out: Path) -> None:
    """Move a finished directory to ``out``; an older one there is set aside first, then removed."""
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        os.replace(out, old)
    os.replace(draft_path, out)
    shutil.rmtree(old, ignore_errors=True)


# What is written here: local files whole, remote folders marked while they change.


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        draft = draft_directory(target)
        try:
            shutil.copytree(source, draft, dirs_exist_ok=True)
            replace(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    else:
        with source.open("rb") as stream, _partial_file(target) as out:
            shutil.copyfileobj(stream, out, CHUNK)


@contextmanager
def _partial_file(path: Path) -> Iterator[BinaryIO]:
    """A hidden file beside ``path`` that takes its place at the end; nothing is left when the body raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
        partial.chmod(0o644)  # mkstemp makes it private
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _marked_incomplete(bucket: str, folder: str) -> Iterator[Callable[[], None]]:
    """Mark a remote folder while its content changes; the mark stays when the body raises or is killed.

    Every writer has a mark of its own, so that one that is done unmarks nothing that another still writes. The body
    renews its mark before each file that it writes and before it removes what is left over, by a call of what it is
    given. So a mark that was there at the start and is the same at the end is that of a writer that was killed, whose
    work this one has done again: it goes, too. (Or that of one that took longer for a single file than this one for all
    of its own: it marks the folder again before its next file.)
    """
    mark, before = f"{folder}{INCOMPLETE}-{uuid.uuid4().hex}", _marks(bucket, folder)

    def renew() -> None:
        content = uuid.uuid4().hex.encode()  # another each time, and so another ETag
        _put(bucket, mark, lambda: io.BytesIO(content), len(content), hashlib.sha256(content).hexdigest(), None)

    renew()
    yield renew
    left = [key for key, etag in _marks(bucket, folder).items() if before.get(key) == etag]
    _remove(bucket, [*left, mark])


def _marks(bucket: str, folder: str) -> dict[str, str]:
    """The keys and ETags of the marks of all writers of a folder."""
    found = _connection().list_objects(bucket, prefix=folder + INCOMPLETE)
    return {mark.object_name: mark.etag for mark in found}


def is_mark(name: str) -> bool:
    """Whether a file of a remote folder says that the folder is being written or deleted, or that this broke off."""
    return name.startswith(INCOMPLETE)


def _upload_folder(path: Path, bucket: str, folder: str, last: str) -> None:
    files = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}
    if not files:
        raise StorageError(f"{path} holds no files, so there is nothing to upload to s3://{bucket}/{folder}.")
    before = {found.name: found for found in _listed(bucket, folder)}
    total = sum(file.stat().st_size for file in files.values())
    with _meter("upload", path.name, total) as meter, _marked_incomplete(bucket, folder) as renew:
        _remove(bucket, [folder + last] if last in before else [])
        for name in sorted(files, key=lambda name: (name == last, name)):
            renew()
            _put_file(bucket, folder + name, files[name], meter, before.get(name))
        left = [found.key for name, found in before.items() if name not in files and not is_mark(name)]
        if left:
            renew()
        _remove(bucket, left)


def _put_file(bucket: str, key: str, file: Path, meter: _Meter | None, before: _Object | None = None) -> None:
    size, digest = file.stat().st_size, _sha256(file)
    if before is not None and before.size == size and _is_stored(bucket, key, size, digest):
        if meter:
            meter.update(size)
        return
    _put(bucket, key, lambda: file.open("rb"), size, digest, meter)


def _put(
    bucket: str, key: str, open_stream: Callable[[], BinaryIO], size: int, digest: str, meter: _Meter | None
) -> None:
    """Write one object with its digest, in parts where it is large, and see that the store has all of it.

    The store checks each part against the digest in its request. A multipart upload shows as an object only when it
    is complete.
    """
    part = max(PART, math.ceil(size / MOST_PARTS))
    for wait in _waits():
        try:
            with open_stream() as stream:
                _connection().put_object(
                    bucket, key, stream, size, metadata={"sha256": digest}, part_size=part, progress=meter
                )
        except Exception as error:
            # The answer to the last request of an upload may be all that was lost.
            if not _may_pass(error) or (wait is None and not _is_stored(bucket, key, size, digest)):
                raise
        if _is_stored(bucket, key, size, digest):
            return
        if wait is not None:
            time.sleep(wait)
    raise StorageError(
        f"s3://{bucket}/{key} is not in the store as it was sent ({size} bytes, SHA-256 {digest[:12]}…): look at the"
        " store's log and free space, then run this again."
    )


def _is_stored(bucket: str, key: str, size: int, digest: str) -> bool:
    head = _stat(bucket, key)
    return head is not None and head.size == size and _digest_of(head.metadata) == digest


def _remove(bucket: str, keys: list[str]) -> None:
    if keys:
        from minio.deleteobjects import DeleteObject

        for error in _connection().remove_objects(bucket, [DeleteObject(key) for key in keys]):
            raise StorageError(f"s3://{bucket}/{error.name} cannot be deleted: {error.code}, {error.message}")


# What is read.


def _find(uri: str | Path) -> list[_Object]:
    """The object at ``uri``, or all in the folder. Raises StorageError where there is none, or not all of them."""
    bucket, key = _parse(uri)
    if _stat(bucket, key) is not None:
        return [_head(bucket, key)]
    found = _listed(bucket, key)
    if any(is_mark(o.name) for o in found):
        raise StorageError(
            f"{uri} is incomplete: its upload or deletion is still going on or broke off. Wait, or run the step that"
            " writes it again."
        )
    if not found:
        raise StorageError(f"{uri} does not exist in the store: correct the URI, or run the step that writes it.")
    return found


def _listed(bucket: str, key: str) -> list[_Object]:
    """All objects in the folder ``key``, sorted by name; the client asks for a page of 1000 at a time."""
    folder = key.rstrip("/") + "/" if key else ""
    objects = []
    for found in _connection().list_objects(bucket, prefix=folder, recursive=True):
        name = found.object_name.removeprefix(folder)
        if not name or name.endswith("/"):  # a console's mark for an empty folder
            continue
        if ".." in name.split("/") or name.startswith("/"):  # it would leave the folder it is downloaded to
            raise StorageError(f"s3://{bucket}/{found.object_name} has a name that is not allowed: rename it.")
        objects.append(_Object(name, found.object_name, found.size, found.etag or ""))
    return sorted(objects, key=lambda o: o.name)


def _stat(bucket: str, key: str) -> Any:
    """What the store says of one object: size, etag, metadata; None where there is no such object."""
    from minio.error import S3Error

    if not key or key.endswith("/"):
        return None
    try:
        return _connection().stat_object(bucket, key)
    except S3Error as error:
        if error.code in ("NoSuchKey", "NoSuchObject"):
            return None
        raise


def _head(bucket: str, key: str) -> _Object:
    head = _connection().stat_object(bucket, key)
    return _Object(PurePosixPath(key).name, key, head.size, head.etag or "")


def _digest_of(headers: Mapping[str, str] | None) -> str:
    return next((value for name, value in (headers or {}).items() if name.lower() == "x-amz-meta-sha256"), "")


def _download(uri: str | Path, bucket: str, found: list[_Object], path: Path) -> dict[str, str]:
    """Fetch a file or folder to ``path`` whole; returns the digests by file name."""
    _, key = _parse(uri)
    with _meter("download", PurePosixPath(key).name, sum(o.size for o in found)) as meter:
        if len(found) == 1 and found[0].key == key:
            with _partial_file(path) as stream:
                return {found[0].name: _fetch(bucket, found[0], stream, meter)}
        draft = draft_directory(path)
        try:

            def fetch(one: _Object) -> str:
                file = draft / one.name
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as stream:
                    return _fetch(bucket, one, stream, meter)

            with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
                digests = dict(zip([o.name for o in found], pool.map(fetch, found), strict=True))
            _check_manifest(uri, draft, digests)
            replace(draft, path)
            return digests
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _check_manifest(uri: str | Path, folder: Path, digests: dict[str, str]) -> None:
    """Compare what was fetched with the digests in an artifact's manifest, where there is one."""
    if not (folder / MANIFEST).is_file():
        return
    files = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("files", {})
    wrong = [name for name, facts in files.items() if digests.get(name) != facts["sha256"]]
    if wrong:
        raise StorageError(
            f"{str(uri).rstrip('/')}/{wrong[0]} is missing or differs from the digest in {MANIFEST}: the artifact in"
            " the store is damaged. Run the stage that made it again, or upload it anew."
        )


def _fetch(bucket: str, found: _Object, stream: BinaryIO, meter: _Meter | None) -> str:
    """Write an object's content to ``stream``, from where it broke off when it does; returns its SHA-256."""
    hashed, expected, done = hashlib.sha256(), "", 0
    for wait in _waits():
        response = None
        try:
            # The ETag holds all pieces to one version of the object.
            response = _connection().get_object(
                bucket, found.key, offset=done, request_headers={"If-Match": f'"{found.etag}"'}
            )
            expected = _digest_of(response.headers)
            for chunk in response.stream(CHUNK):
                stream.write(chunk)
                hashed.update(chunk)
                done += len(chunk)
                if meter:
                    meter.update(len(chunk))
        except Exception as error:
            if wait is None or not _may_pass(error):
                raise
        finally:
            if response is not None:
                response.close()
                response.release_conn()
        if done >= found.size or wait is None:
            break
        time.sleep(wait)
    if done != found.size or (expected and hashed.hexdigest() != expected):
        raise StorageError(
            f"s3://{bucket}/{found.key} is damaged: {done} bytes of {found.size}, SHA-256 {hashed.hexdigest()[:12]}…,"
            f" expected {expected[:12] or 'unknown'}…. Upload it again, or run the stage that made it."
        )
    return hashed.hexdigest()


def _fingerprint(uri: str | Path, found: list[_Object]) -> str:
    body = [_endpoint()[0], str(uri).rstrip("/"), [(o.name, o.size, o.etag) for o in found]]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def _is_intact(place: Path) -> bool:
    """Whether a cached copy has the content it was fetched with."""
    record = place / "digests.json"
    if not record.is_file():
        return False
    (content,) = [entry for entry in place.iterdir() if entry != record]
    digests = json.loads(record.read_text(encoding="utf-8"))
    files = {content / name if content.is_dir() else content: digest for name, digest in digests.items()}
    return all(file.is_file() and _sha256(file) == digest for file, digest in files.items())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# The connection: endpoint, credentials, patience, and what errors mean.


def _parse(uri: str | Path) -> tuple[str, str]:
    bucket, _, key = str(uri).removeprefix("s3://").partition("/")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket) or not key.strip("/"):
        raise StorageError(f"{uri} is no URI of an object store; expected s3://bucket/key.")
    if any(part in ("", ".", "..") for part in key.rstrip("/").split("/")):
        raise StorageError(f"{uri} has an empty part, '.' or '..' in its key; expected names between single slashes.")
    return bucket, key


def _endpoint() -> tuple[str, bool]:
    """Host and port of the store, and whether it speaks TLS."""
    name = "AWS_ENDPOINT_URL_S3" if os.environ.get("AWS_ENDPOINT_URL_S3") else "AWS_ENDPOINT_URL"
    address = urlsplit(os.environ.get(name) or "https://s3.amazonaws.com")
    if address.scheme not in ("http", "https") or not address.hostname or address.path.strip("/") or address.username:
        raise StorageError(f"{name} is not the address of an object store; expected https://host or http://host:port.")
    return address.netloc, address.scheme == "https"


def _connection() -> Any:
    """The client for the environment as it is now; connections are not shared between processes."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    style = os.environ.get("AWS_S3_ADDRESSING_STYLE") or "auto"
    if style not in ("auto", "path", "virtual"):
        raise StorageError(f"AWS_S3_ADDRESSING_STYLE is {style!r}, expected auto, path or virtual.")
    authority = os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
    settings = tuple(os.environ.get(name) for name in IDENTITY_SETTINGS)
    return _connect(os.getpid(), *_endpoint(), region, style, authority, settings)


@lru_cache(maxsize=8)
def _connect(
    process: int, host: str, tls: bool, region: str, style: str, authority: str | None, settings: tuple[str | None, ...]
) -> Any:
    try:
        import certifi
        import urllib3
        from minio import Minio
        from minio.credentials.credentials import Credentials
        from minio.credentials.providers import Provider
    except ModuleNotFoundError as error:
        raise StorageError(f"the package {error.name} is not installed; install sidgraft[s3].") from error

    class Environment(Provider):
        """Credentials read for each request: a mounted secret may be renewed while a stage runs."""

        def retrieve(self) -> Credentials:
            if found := _credentials():
                return Credentials(found["access_key"], found["secret_key"], found.get("session_token"))
            return _exchanged(identity)

    retries = urllib3.Retry(
        total=TRIES,
        read=2,  # each may wait for an answer as long as ANSWER_SECONDS
        other=1,  # such as a certificate that is not trusted
        redirect=0,
        allowed_methods=None,  # all: writing an object twice is writing it once
        status_forcelist=RETRIED_STATUSES,
        raise_on_status=False,  # so that the store's own words reach the user
        backoff_factor=0.5,
        backoff_max=20,
        backoff_jitter=0.5,
        respect_retry_after_header=False,  # it has no bound
    )
    pool = urllib3.PoolManager(
        maxsize=10,
        timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=ANSWER_SECONDS),
        cert_reqs="CERT_REQUIRED",
        ca_certs=authority or certifi.where(),
        retries=retries,
    )
    identity = _identity(pool, region)
    client = Minio(host, secure=tls, region=region, credentials=Environment(), http_client=pool)
    if style == "path":
        client.disable_virtual_style_endpoint()
    elif style == "virtual":
        client.enable_virtual_style_endpoint()
    return client


def _credentials() -> dict[str, str]:
    """Credentials from the variables, a mounted secret, or a file of profiles: the first that has them, or none."""
    found = {part: os.environ[names[0]] for part, names in SECRET_KEYS.items() if os.environ.get(names[0])}
    place = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
    if "access_key" in found and "secret_key" in found:
        return found
    if place.is_dir():
        files = {part: [place / name for name in names] for part, names in SECRET_KEYS.items()}
        found = {
            part: file.read_text(encoding="utf-8").strip()
            for part, candidates in files.items()
            for file in candidates
            if file.is_file()
        }
    elif place.is_file():
        profile = os.environ.get("AWS_PROFILE") or "default"
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(place, encoding="utf-8")
        values = dict(parser[profile]) if parser.has_section(profile) else {}
        found = {part: values[n.lower()] for part, (n, *_) in SECRET_KEYS.items() if values.get(n.lower())}
    return found if found.get("access_key") and found.get("secret_key") else {}


def _identity(pool: Any, region: str) -> Any:
    """The client's own provider for a service account's identity, which keeps credentials until shortly before they
    end; None where the environment names no identity.

    As in other tools an address of one's own for all services is also that of the one that exchanges tokens.
    """
    from minio.credentials.providers import IamAwsProvider

    if not any(os.environ.get(name) for name in IDENTITIES):
        return None
    service = os.environ.get("AWS_ENDPOINT_URL_STS") or os.environ.get("AWS_ENDPOINT_URL")
    exchanged = bool(os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"))
    client: Any = _Exchange(pool)
    return IamAwsProvider(custom_endpoint=service if exchanged else None, region=region, http_client=client)


def _exchanged(identity: Any) -> Any:
    """Credentials for the identity of this service account. Raises StorageError where there is none, or no exchange."""
    if identity is None:
        raise StorageError(
            "there are no credentials for the object store: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or"
            " AWS_SHARED_CREDENTIALS_FILE to a file of profiles or the folder of a mounted secret, or give the service"
            " account a role (docs/storage.md)."
        )
    try:
        return identity.retrieve()
    except StorageError:
        raise
    except (OSError, ValueError, KeyError, SyntaxError) as error:  # the last is that of XML
        reason = f"the answer has no {error}" if isinstance(error, KeyError) else error
        name = next(name for name in IDENTITIES if os.environ.get(name))
        raise StorageError(
            f"{name} gives no credentials for the object store ({reason}): correct it, or set AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY."
        ) from error


class _Exchange:
    """Asks for the credentials of an identity; the minio client calls it by this name."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def urlopen(self, method: str, url: str, body: Any = None, headers: Any = None) -> Any:
        """The answer. Raises StorageError where there is none, or it is a refusal."""
        from urllib3.exceptions import HTTPError, MaxRetryError

        if method == "POST":  # the token is in the query there, and an address ends up in logs and errors
            url, _, body = url.partition("?")
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
        else:
            headers = {name: value.strip() for name, value in (headers or {}).items()}  # a line's end is refused
        host = urlsplit(url).netloc
        try:
            response = self.pool.urlopen(method, url, body=body, headers=headers)
        except HTTPError as error:
            reason = error.reason if isinstance(error, MaxRetryError) else error
            raise StorageError(
                f"no answer from {host}, which gives this service account's credentials for the object store"
                f" ({reason}): check that this machine can reach it, in a cluster the network policy."
            ) from error
        if response.status != 200:
            raise StorageError(
                f"{host} gives this service account no credentials for the object store ({response.status},"
                f" {_said(response.data)}): check that the account has a role, and that the role trusts it."
            )
        return response


def _said(body: bytes) -> str:
    """The words of a refusal: code and message where it is XML, on one line."""
    text = body.decode("utf-8", "replace")
    found = dict(re.findall(r"<(Code|Message)>([^<]*)<", text))
    words = " ".join((f"{found['Code']}: {found.get('Message', '')}" if "Code" in found else text).split())
    return words[:300].rstrip(".: ") or "without a word"


def _waits() -> Iterator[float | None]:
    """Seconds to wait after each try, growing, with jitter; None after the last."""
    yield from (2**n * random.uniform(0.5, 1.0) for n in range(4))
    yield None


def _may_pass(error: Exception) -> bool:
    """Whether trying again may help; the client itself has tried as often as it should when it gives up."""
    from minio.error import S3Error, ServerError
    from urllib3.exceptions import HTTPError, MaxRetryError

    if isinstance(error, S3Error):
        return error.code in RETRIED_CODES
    return isinstance(error, HTTPError | ServerError) and not isinstance(error, MaxRetryError)


@contextmanager
def _explained(uri: str | Path) -> Iterator[None]:
    """Turn the client's errors into one sentence each that says what to do."""
    bucket, _ = _parse(uri)
    host, _ = _endpoint()
    _connection()  # so that the imports below are there, or the user is told
    from minio.error import MinioException, S3Error
    from urllib3.exceptions import HTTPError, MaxRetryError, SSLError

    try:
        yield
    except S3Error as error:
        if error.code == "NoSuchBucket":
            message = f"there is no bucket {bucket} at {host}: create it, or correct the URI."
        elif error.code in ("NoSuchKey", "NoSuchObject"):
            message = "it does not exist in the store: correct the URI, or run the step that writes it."
        elif error.code in REFUSED_CODES:
            message = (
                f"{host} refuses the credentials ({error.code}): check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or"
                f" the role of the service account, and that they may read and write the bucket {bucket}."
            )
        elif error.code == "PreconditionFailed":
            message = "it changed while it was being read: run this again."
        else:
            message = f"{host} answers {error.code}: {error.message}"
        raise StorageError(f"{uri}: {message}") from error
    except HTTPError as error:
        reason = error.reason if isinstance(error, MaxRetryError) else error
        if isinstance(reason, SSLError):
            message = (
                f"the TLS certificate of {host} is not trusted: set AWS_CA_BUNDLE to the file of the authority that"
                f" signed it ({reason})."
            )
        else:
            message = (
                f"no answer from {host} ({reason}): check AWS_ENDPOINT_URL_S3, that the store is running, and that"
                " this machine can reach it."
            )
        raise StorageError(f"{uri}: {message}") from error
    except MinioException as error:
        message = f"{host} does not answer as an object store does: check AWS_ENDPOINT_URL_S3 ({error})."
        raise StorageError(f"{uri}: {message}") from error


class _Meter:
    """Counts bytes from several threads and shows whole megabytes; the minio client calls it by these names."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.bytes, self.lock = progress, 0, threading.Lock()

    def set_meta(self, object_name: str, total_length: int) -> None:
        """Called at the start of each object; the total of the whole folder is known already."""

    def update(self, length: int) -> None:
        """Add bytes."""
        with self.lock:
            self.bytes += length
            done = min(self.bytes // MEGABYTE, self.progress.total)  # what was sent twice counts once at the end
            if done > self.progress.done:
                self.progress.update(done - self.progress.done)


@contextmanager
def _meter(what: str, name: str, size: int) -> Iterator[_Meter | None]:
    """Show progress where it may take more than a moment."""
    if size < 8 * MEGABYTE:
        yield None
        return
    with Progress(f"{what} {name}", size // MEGABYTE, "MB") as progress:
        yield _Meter(progress)
