"""Published bundles: immutable versions under one place, and the pointer `latest.json` to the one in use.

    BUNDLES/versions/<version>/   a bundle/v1 artifact: model/, semantic_ids/, metrics/, the digests of the catalog's
                                  rows (items.parquet, fields.parquet), README.md
    BUNDLES/latest.json           which version is in use
    BUNDLES/refused.json          the catalog of the model that was refused last, until one is published

BUNDLES is a folder, local or `s3://bucket/key`. A version is written whole before the pointer moves, and the pointer
is replaced at once: a publisher that is killed at any point leaves it on a whole bundle.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from sidgraft import artifacts, storage
from sidgraft.artifacts import Artifact, ArtifactError, Draft

KIND = "bundle/v1"
LATEST = "latest.json"
REFUSED = "refused.json"
OWN_VECTORS = "own vectors"  # the encoder of embeddings that the user brought
ITEMS, FIELDS = "items.parquet", "fields.parquet"  # of a bundle; the second is missing in versions of older sidgrafts
# What training reads of an item besides its text. Not the price: who keeps it out of the text does so because it moves.
FIELD_COLUMNS = ("title", "brand", "category", "description")
COMPARED = ("item_id", "text", *FIELD_COLUMNS)  # all that is read of a catalog to compare it
ROWS_AT_ONCE = 4096  # of a catalog, as Python objects


@dataclass(frozen=True)
class Bundle:
    """One published version, opened and checked."""

    version: str
    bundle: Artifact

    def part(self, name: str) -> Artifact:
        """The artifact inside the bundle: model, semantic_ids or metrics."""
        return artifacts.load(self.bundle.path / name, f"{name}/v1")

    def items(self) -> pa.Table:
        """The catalog it was trained on, as `item_digests` gives it; fields_digest is null where it was not kept."""
        items = self.bundle.read_table(ITEMS)
        if not (self.bundle.path / FIELDS).is_file():
            return items.append_column("fields_digest", pa.nulls(items.num_rows, pa.string()))
        return items.append_column("fields_digest", self.bundle.read_table(FIELDS)["fields_digest"])


def version_uri(bundles: str, version: str) -> str:
    """Where a version stands."""
    return f"{str(bundles).rstrip('/')}/versions/{version}"


def latest_version(bundles: str) -> str:
    """The version that `latest.json` names; empty where nothing is published yet.

    Raises ArtifactError where it is damaged, and what the store says where it cannot be read.
    """
    file = f"{str(bundles).rstrip('/')}/{LATEST}"
    if not storage.exists(file):
        return ""
    try:
        version = json.loads(storage.read_text(file))["version"]
    except storage.StorageError:
        raise  # the store is out of reach, which says nothing of what the file holds
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f'{file} is damaged: expected JSON such as {{"version": "v-…"}}. Write the name of a folder under'
            f" {version_uri(bundles, '')} into it."
        ) from error
    return str(version)


def open_bundle(bundles: str, version: str = "") -> Bundle:
    """Open a published version, or the latest.

    Raises ArtifactError when it is missing, damaged or of a newer format.
    """
    version = version or latest_version(bundles)
    if not version:
        raise ArtifactError(f"{bundles} has no {LATEST}: nothing is published there yet; run `sidgraft publish`.")
    return open_version(version_uri(bundles, version))


def open_version(uri: str) -> Bundle:
    """Open a version by the place where it stands, see `version_uri`; raises as `open_bundle` does."""
    return Bundle(str(uri).rstrip("/").rpartition("/")[2], artifacts.load(storage.local(uri), KIND))


def other_encoder(bundle: Bundle, item_embeddings: Artifact) -> str:
    """Why the bundle's quantizer cannot encode these embeddings, by their names; empty where it may.

    Names do not tell all: see `drift.encoded_as_before`.
    """
    known = bundle.bundle.metadata["encoder"]
    found = item_embeddings.arguments.get("encoder", OWN_VECTORS)
    if found != known:
        return f"The catalog is embedded by {found}, the published bundle by {known}."
    wanted = bundle.part("semantic_ids").read_json("quantizer.json")["input_dim"]
    width = item_embeddings.metadata["width"]
    return "" if width == wanted else f"The embeddings have {width} dimensions, the published quantizer takes {wanted}."


def other_settings(bundle: Bundle, item_embeddings: Artifact) -> str:
    """In a sentence, what may be the cause where an encoder of the same name gives vectors of another space.

    Another precision cannot be: with it nearly all items keep their codes (decision 37).
    """
    lineage = bundle.part("semantic_ids").lineage.values()
    then = next((entry["arguments"] for entry in lineage if entry["stage"] == "embed"), {}).get("max_tokens")
    now = item_embeddings.arguments.get("max_tokens")
    if then is not None and now is not None and then != now:
        why = f"max_tokens was {then}, is {now}"
    else:
        why = "other weights under the same name, or vectors of your own by another model"
    return f"The embeddings are of another space than those of the published bundle: {why}."


def differences(before: pa.Table, now: pa.Table) -> dict[str, list[str]]:
    """Items that differ, from `item_digests`; each list in item_id order.

    They are new, have another text (changed), have the same text and other FIELD_COLUMNS (relabelled), or are gone.
    Fields are compared where both have their digest.
    """
    items = now["item_id"]
    place = pc.index_in(items, value_set=before["item_id"])  # null where an item is new
    was = before.take(place)
    same_text = pc.equal(now["text_digest"], was["text_digest"])
    other_fields = pc.not_equal(now["fields_digest"], was["fields_digest"])
    # What is compared with null is null, and a filter drops it.
    return {
        "new": items.filter(pc.is_null(place)).to_pylist(),
        "changed": items.filter(pc.invert(same_text)).to_pylist(),
        "relabelled": items.filter(pc.and_(same_text, other_fields)).to_pylist(),
        "gone": before["item_id"].filter(pc.invert(pc.is_in(before["item_id"], value_set=items))).to_pylist(),
    }


def point_to(bundles: str, version: str, previous: str) -> None:
    """Move `latest.json` to a version that is whole, at once."""
    text = json.dumps({"version": version, "previous": previous}, indent=1) + "\n"
    storage.write_text(f"{str(bundles).rstrip('/')}/{LATEST}", text)


def refuse(bundles: str, *, catalog: str, version: str, latest: str, reasons: list[str]) -> None:
    """Write down that a model of this catalog (`catalog_digest`) was refused while ``latest`` was in use, at once."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"catalog_digest": catalog, "version": version, "latest": latest, "time": time, "reasons": reasons}
    storage.write_text(f"{str(bundles).rstrip('/')}/{REFUSED}", json.dumps(record, indent=1) + "\n")


def clear_refusal(bundles: str) -> None:
    """Remove what `refuse` has written."""
    storage.delete(f"{str(bundles).rstrip('/')}/{REFUSED}")


def refusal(bundles: str, catalog: str, latest: str) -> str:
    """Return in a sentence when and why this catalog was refused, with ``latest`` in use; empty where it was not.

    Where another version is in use now, the record counts for nothing: it was judged against one that is gone.
    """
    file = f"{str(bundles).rstrip('/')}/{REFUSED}"
    if not storage.exists(file):
        return ""
    try:
        record = json.loads(storage.read_text(file))
        if (record["catalog_digest"], record["latest"]) != (catalog, latest):
            return ""
        time, why = record["time"], record["reasons"][0]
    except storage.StorageError:
        raise  # as in latest_version
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ArtifactError(
            f"{file} is damaged: delete it, and the catalog is looked at as if none was refused."
        ) from error
    return (
        f"A model of this catalog was refused at {time}: {why}. It is trained again when it has changed, or with"
        " force=full."
    )


@contextmanager
def publishing(bundles: str) -> Iterator[None]:
    """Hold a local folder for one publisher at a time: each judges against what the one before has published.

    The lock ends with the process that holds it, however that ends. An object store has no lock: there the pointer
    is read again before it moves.
    """
    if storage.is_remote(bundles):
        yield
        return
    Path(bundles).mkdir(parents=True, exist_ok=True)
    with (Path(bundles) / ".publish.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def new_version(bundles: str, version: str) -> Iterator[Path]:
    """A local place to write a version's artifact to; one of an object store is sent there at the end, whole.

    What killed publishers have left half written in a local folder goes; call it within `publishing`.
    """
    place = version_uri(bundles, version)
    if storage.is_remote(place):
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / version
            storage.upload(Path(folder) / version, place)
        return
    for leftover in Path(place).parent.glob(".*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    yield Path(place)


def item_digests(catalog: pa.Table) -> pa.Table:
    """Items with the digests of their text and of FIELD_COLUMNS, in item_id order: what tells how a catalog differs.

    ``catalog`` has the columns COMPARED, and may have others.
    """
    texts, fields = [], []
    for batch in catalog.select(["text", *FIELD_COLUMNS]).to_batches(ROWS_AT_ONCE):
        text, *others = (column.to_pylist() for column in batch.columns)
        texts.append(pa.array([_digest(one) for one in text], pa.string()))
        fields.append(pa.array([_digest(json.dumps(row)) for row in zip(*others, strict=True)], pa.string()))
    digests = {
        "item_id": catalog["item_id"],
        "text_digest": pa.chunked_array(texts, pa.string()),
        "fields_digest": pa.chunked_array(fields, pa.string()),
    }
    return pa.table(digests).sort_by("item_id")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def write_items(draft: Draft, items: pa.Table) -> None:
    """Write what `item_digests` gives into a bundle."""
    draft.write_table(ITEMS, items.select(["item_id", "text_digest"]))
    draft.write_table(FIELDS, items.select(["item_id", "fields_digest"]))


def catalog_digest(items: pa.Table) -> str:
    """One name for a whole catalog, from `item_digests`: the order of its rows and the dates of files do not count."""
    hashed = hashlib.sha256()
    for batch in items.to_batches(ROWS_AT_ONCE):
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            hashed.update(json.dumps(row).encode())
    return hashed.hexdigest()
