"""The stage quantize: unique and reproducible Semantic IDs, an artifact that encodes new items, clear errors."""

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sidgraft import artifacts, kmeans, quality, quantizers, residual
from sidgraft.sids import codes_array
from sidgraft.stages.quantize import quantize

SMALL = {"codebook_size": 8, "dedup_size": 64, "levels": 2, "steps": 30, "batch_size": 64}


def write_embeddings(path, item_ids, vectors, dtype=np.float32, *, row_group=None):
    values = pa.array(np.ascontiguousarray(vectors, dtype).ravel())
    column = pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])
    table = pa.table({"item_id": pa.array(item_ids), "embedding": column})
    with artifacts.create(path, "item_embeddings/v1", stage="embed", arguments={}) as draft:
        options = {"row_group_size": row_group, "use_dictionary": False, "compression": "none"}
        pq.write_table(table, draft.path / "embeddings.parquet", **options)
    return path


@pytest.fixture
def items():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((40, 16))[rng.integers(40, size=500)] + 0.05 * rng.standard_normal((500, 16))
    vectors[100:110] = vectors[100]  # equal items, told apart by the deduplication code alone
    return [f"i{i:04d}" for i in range(500)], vectors.astype(np.float32)


def read(path):
    artifact = artifacts.load(path, "semantic_ids/v1")
    table = artifact.read_table("semantic_ids.parquet")
    return artifact, table["item_id"].to_pylist(), codes_array(table)


def test_ids_are_unique_reproducible_and_stored_with_their_quantizer(tmp_path, items):
    ids, vectors = items
    write_embeddings(tmp_path / "e", ids, vectors)
    summary = quantize(str(tmp_path / "e"), str(tmp_path / "s"), **SMALL)
    quantize(str(tmp_path / "e"), str(tmp_path / "again"), **SMALL)
    artifact, item_ids, codes = read(tmp_path / "s")
    assert artifact.digest == read(tmp_path / "again")[0].digest
    assert item_ids == ids
    assert codes.shape == (500, 3)
    assert len(set(map(tuple, codes.tolist()))) == 500
    assert codes[100:110, 2].tolist() == list(range(codes[100, 2], codes[100, 2] + 10))

    quantizer = quantizers.load(artifact)
    assert quantizer.sizes == [8, 8, 64]
    assert [b.dtype for b in quantizer.codebooks] == [np.float32] * 2
    assert np.array_equal(quantizer.encode(vectors), codes[:, :2])
    described = artifact.read_json("quantizer.json")
    assert (described["method"], described["levels"], described["reduction"]) == ("residual-kmeans", 2, "none")
    assert artifact.metadata == summary
    assert artifact.arguments["steps"] == 30
    assert "item_embeddings" not in artifact.arguments
    figures = artifact.read_json("quality.json")
    shared = sum((codes[:, :2] == row).all(axis=1).sum() > 1 for row in codes[:, :2])
    assert figures["collision_rate"] == pytest.approx(shared / 500)
    assert figures["largest_bucket"] == codes[:, 2].max() + 1
    assert 0 < figures["neighbours_kept"] <= 1
    # what is needed to measure other items against these: the decoder, and its errors at the fit
    unit = vectors.astype(float) / np.linalg.norm(vectors.astype(float), axis=1, keepdims=True)
    errors = ((unit - quantizer.decode(codes[:, :2])) ** 2).sum(axis=1)
    assert figures["relative_squared_error"] == pytest.approx(errors.mean(), rel=1e-4)
    first = ((unit - quantizer.codebooks[0][codes[:, 0]]) ** 2).sum(axis=1).mean()
    assert described["at_fit"] == {
        "relative_squared_error": figures["relative_squared_error"],
        "first_code_error": pytest.approx(first, rel=1e-4),
        "collision_rate": figures["collision_rate"],
    }


def test_the_order_of_the_items_does_not_matter(tmp_path, items):
    ids, vectors = items
    order = np.random.default_rng(1).permutation(500)
    write_embeddings(tmp_path / "e", ids, vectors)
    write_embeddings(tmp_path / "shuffled", [ids[i] for i in order], vectors[order])
    quantize(str(tmp_path / "e"), str(tmp_path / "s"), **SMALL)
    quantize(str(tmp_path / "shuffled"), str(tmp_path / "t"), **SMALL)
    _, a_ids, a = read(tmp_path / "s")
    _, b_ids, b = read(tmp_path / "t")
    assert b_ids == [ids[i] for i in order]
    assert dict(zip(a_ids, a.tolist(), strict=True)) == dict(zip(b_ids, b.tolist(), strict=True))


@pytest.mark.parametrize("reduction", ["truncate", "pca"])
def test_reduced_vectors_encode_from_the_artifact(tmp_path, items, reduction):
    ids, vectors = items
    write_embeddings(tmp_path / "e", ids, vectors, np.float16)
    quantize(str(tmp_path / "e"), str(tmp_path / "s"), dim=6, reduction=reduction, fit="lloyd", **SMALL)
    artifact, _, codes = read(tmp_path / "s")
    quantizer = quantizers.load(artifact)
    assert quantizer.dim == 6
    assert artifact.read_json("quantizer.json")["reduction"] == reduction
    assert np.array_equal(quantizer.encode(vectors.astype(np.float16)), codes[:, :2])


def test_truncation_to_more_dimensions_than_there_are_keeps_all(tmp_path, items):
    """The first min(d, D) dimensions: one dim serves encoders of any width."""
    write_embeddings(tmp_path / "e", *items)
    quantize(str(tmp_path / "e"), str(tmp_path / "whole"), **SMALL)
    summary = quantize(str(tmp_path / "e"), str(tmp_path / "s"), dim=2048, reduction="truncate", **SMALL)
    assert summary["dim"] == 16
    artifact, _, codes = read(tmp_path / "s")
    assert np.array_equal(codes, read(tmp_path / "whole")[2])
    assert quantizers.load(artifact).dim == 16
    assert artifact.read_json("quantizer.json")["reduction"] == "none"


RQ_VAE = {"method": "rq-vae", "hidden": "16", "code_dim": 4, "batch_size": 128, "epochs": 3, "fit": "balanced"}


def test_rq_vae_stands_behind_the_same_artifact(tmp_path, items):
    ids, vectors = items
    write_embeddings(tmp_path / "e", ids, vectors)
    settings = RQ_VAE | {"codebook_sizes": "60,50", "dedup_size": 500, "dim": 12, "learning_rate": 0.05}
    summary = quantize(str(tmp_path / "e"), str(tmp_path / "s"), **settings)
    artifact, _, codes = read(tmp_path / "s")
    quantizer = quantizers.load(artifact)
    assert quantizer.sizes == [60, 50, 500]
    assert (quantizer.dim, quantizer.codebooks[0].shape) == (12, (60, 4))
    assert np.array_equal(quantizer.encode(vectors), codes[:, :2])
    assert np.array_equal(quantizer.encode(vectors[7:8]), codes[7:8, :2])
    assert quantizer.encode(vectors[:0]).shape == (0, 2)
    described = artifact.read_json("quantizer.json")
    assert (described["method"], described["settings"]["hidden"], described["settings"]["balanced"]) == (
        "rq-vae", [16], True,
    )  # fmt: skip
    assert artifact.read_json("training.json")["log"][0]["epoch"] == 3
    # the figures, and the centroids: the mean unit vector of a code's items
    unit = vectors[:, :12].astype(float) / np.linalg.norm(vectors[:, :12].astype(float), axis=1, keepdims=True)
    decoded = quantizer.network.decode(codes[:, :2])
    assert summary["relative_squared_error"] == pytest.approx(((unit - decoded) ** 2).sum(axis=1).mean(), abs=1e-5)
    assert np.array_equal(quantizer.decode(codes[:, :2]), decoded)
    first = ((unit - quantizer.centroids[0][codes[:, 0]]) ** 2).sum(axis=1).mean()
    assert described["at_fit"]["first_code_error"] == pytest.approx(first, rel=1e-4)
    levels = artifact.read_json("quality.json")["levels"]
    left = quantizer.lengths(vectors[:, :12], codes[:, :2])
    assert [level["mse"] for level in levels] == pytest.approx(np.square(left).mean(axis=0))
    assert not quantizer.has_centroid.all()  # 3 epochs leave codes without items
    used = [np.unique(codes[:, level]) for level in (0, 1)]
    expected = [{k: unit[codes[:, level] == k].mean(axis=0) for k in used[level]} for level in (0, 1)]
    centre = np.mean([row for rows in expected for row in rows.values()], axis=0)
    for level in (0, 1):
        for k, row in enumerate(quantizer.centroids[level]):
            np.testing.assert_allclose(row, expected[level].get(k, centre), atol=1e-6)
    assert quantizer.has_centroid.sum() == len(used[0]) + len(used[1])


def test_levels_may_have_different_numbers_of_codes(tmp_path, items):
    write_embeddings(tmp_path / "e", *items)
    quantize(str(tmp_path / "e"), str(tmp_path / "s"), **(SMALL | {"codebook_sizes": "16, 4,2"}))
    artifact, _, codes = read(tmp_path / "s")
    assert quantizers.load(artifact).sizes == [16, 4, 2, 64]
    assert codes.max(axis=0)[:3].tolist() == [15, 3, 1]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"method": "rqvae"}, "Did you mean rq-vae"),
        ({"method": "rq-vae", "fit": "lloyd"}, "fit is 'lloyd', expected one of minibatch, balanced"),
        ({"codebook_sizes": "8,x"}, "codebook_sizes is '8,x', expected whole numbers above zero"),
        ({"hidden": "64,0"}, "hidden is '64,0', expected whole numbers above zero"),
        ({"dropout": 1.0}, "dropout=1.0, expected less than 1"),
        ({"patience": 0}, "patience=0"),
        (RQ_VAE | {"codebook_size": 501}, "level 0 has 4.. distinct vectors for 501 codes"),
        (
            RQ_VAE | {"learning_rate": 1e30, "epochs": 50},
            r"the loss of the RQ-VAE became (nan|inf) at step \d+ \(epoch",
        ),
        (
            RQ_VAE | {"learning_rate": 1e30, "epochs": 1, "batch_size": 500},
            r"held-out error of the RQ-VAE became (nan|inf) at step 1 \(epoch 1, batch 1 of 1\): lower learning_rate",
        ),
        ({"fit": "loyd"}, "Did you mean lloyd"),
        ({"levels": 0}, "levels=0"),
        ({"dim": -1}, "dim=-1, expected 0"),
        ({"dim": 17, "reduction": "pca"}, "dim=17, expected 0 .* 16"),
        ({"codebook_size": 501}, "distinct vectors for 501 codes"),
        ({"dedup_size": 2}, "raise dedup_size, codebook_size or levels"),
        ({"max_collision_rate": 0.01}, "max_collision_rate"),
        ({"min_utilisation": 1.01}, "min_utilisation"),
    ],
)
def test_wrong_settings_are_refused_and_leave_nothing(tmp_path, items, change, match):
    write_embeddings(tmp_path / "e", *items)
    with pytest.raises(ValueError, match=match):
        quantize(str(tmp_path / "e"), str(tmp_path / "s"), **(SMALL | change))
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


def test_vectors_that_are_not_finite_and_repeated_items_are_refused(tmp_path, items):
    ids, vectors = items
    bad = vectors.copy()
    bad[7, 3], bad[9, 0] = np.nan, np.inf
    write_embeddings(tmp_path / "e", ids, bad)
    with pytest.raises(ValueError, match="2 embeddings hold NaN or infinity, such as that of item 'i0007'"):
        quantize(str(tmp_path / "e"), str(tmp_path / "s"), **SMALL)
    write_embeddings(tmp_path / "f", [ids[0], *ids[:-1]], vectors)
    with pytest.raises(ValueError, match="repeats 1 item_ids"):
        quantize(str(tmp_path / "f"), str(tmp_path / "s"), **SMALL)


@pytest.mark.parametrize("fit", ["minibatch", "lloyd", "sampled", "balanced"])
def test_ids_are_the_same_in_other_processes_with_other_threads_and_hash_seeds(tmp_path, items, fit):
    write_embeddings(tmp_path / "e", *items)
    settings = SMALL | {"fit": fit}
    program = f"import sys; from sidgraft.stages.quantize import quantize; quantize('e', sys.argv[1], **{settings!r})"
    for name, threads in (("one", "1"), ("two", "2")):
        environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run([sys.executable, "-c", program, name], cwd=tmp_path, env=environment, check=True)
    assert read(tmp_path / "one")[0].digest == read(tmp_path / "two")[0].digest


# In batches


@pytest.fixture
def small_batches(monkeypatch):
    """37 items a batch (of width 16), and samples that are smaller than the catalog of 500."""
    monkeypatch.setattr(kmeans, "SCORES_PER_CHUNK", 37 * 16)
    monkeypatch.setattr(kmeans, "MOST", 20)
    monkeypatch.setattr(quality, "AMONG", 120)
    monkeypatch.setattr(quantizers, "PCA_ITEMS", 200)


def encode_plainly(vectors, codebooks):
    """METHOD 4 for the whole matrix in float64: codes, residual lengths, and, of mean lengths, what codes stand for."""
    rest, codes, lengths, decoded, scale = vectors.astype(np.float64), [], [], 0.0, 1.0
    for level, book in enumerate(codebooks):
        norms = np.linalg.norm(rest, axis=1, keepdims=True)
        norms[norms <= (1e-6 if level else 0.0)] = np.inf
        distances = ((rest[:, None] / norms[:, None] - book.astype(np.float64)) ** 2).sum(axis=2)
        codes.append((distances <= distances.min(axis=1, keepdims=True) + 1e-12).argmax(axis=1))
        rest = rest / norms - book[codes[-1]]
        lengths.append(np.linalg.norm(rest, axis=1))
        decoded = decoded + scale * book[codes[-1]].astype(np.float64)
        scale *= lengths[-1].mean()
    return np.stack(codes, axis=1), np.stack(lengths, axis=1), decoded


def ten_nearest(queries, units):
    """The ten rows of the unit vectors nearest by cosine to each query, which stands for the row of its number."""
    cosines = queries @ units.T
    np.fill_diagonal(cosines, -np.inf)
    return np.argsort(-cosines, axis=1)[:, :10]


def test_sampled_in_batches_is_the_fit_to_the_sample_and_plain_codes_for_all(tmp_path, items, small_batches):
    """Against NumPy on the whole matrix, for files in any order and in any row groups."""
    ids, vectors = items
    settings = SMALL | {"fit": "sampled", "dedup_size": 200}
    shuffle = np.random.default_rng(1).permutation(500)
    found = []
    for name, order, row_group in (("whole", np.arange(500), None), ("parts", shuffle, 64), ("rows", shuffle[::-1], 1)):
        file_ids = [ids[i] for i in order]
        write_embeddings(tmp_path / name, file_ids, vectors[order], np.float16, row_group=row_group)
        quantize(str(tmp_path / name), str(tmp_path / f"{name}-ids"), **settings)
        artifact, item_ids, codes = read(tmp_path / f"{name}-ids")
        assert item_ids == file_ids
        tensors = (artifact.path / "codebooks.safetensors").read_bytes()
        found.append((codes[np.argsort(order)], tensors, artifact.read_json("quality.json")))
    codes, tensors, figures = found[0]
    for others in found[1:]:
        assert np.array_equal(others[0], codes)
        assert others[1:] == (tensors, figures)

    stored = vectors.astype(np.float16).astype(np.float32)
    sample = np.sort(np.random.default_rng(0).permutation(500)[: 20 * 8])
    codebooks = quantizers.load(artifact).codebooks
    expected_books = residual.fit_residual(stored[sample], [8, 8], fit="sampled")[0]
    assert all(np.array_equal(a, b) for a, b in zip(codebooks, expected_books, strict=True))
    plain, lengths, decoded = encode_plainly(stored, codebooks)
    assert np.array_equal(codes[:, :2], plain)
    assert [row["mse"] for row in figures["levels"]] == pytest.approx((lengths**2).mean(axis=0).tolist(), rel=1e-6)
    unit = stored / np.linalg.norm(stored.astype(float), axis=1, keepdims=True)
    errors = ((unit - decoded) ** 2).sum(axis=1)
    assert figures["relative_squared_error"] == pytest.approx(errors.mean(), rel=1e-6)

    # neighbours: among a sample of its own, all of which is asked for
    among = np.sort(np.random.default_rng((0, 1)).permutation(500)[:120])
    near = ten_nearest(unit[among], unit[among])
    around = ten_nearest(decoded[among], unit[among])
    kept = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(near, around, strict=True)])
    assert figures["neighbours_kept"] == pytest.approx(kept, abs=0.005)  # equal items tie
    same = plain[among][near, 0] == plain[among][:, None, 0]
    assert figures["levels"][0]["prefix_neighbours"] == pytest.approx(same.mean(), abs=0.005)


@pytest.mark.parametrize("change", [
    {"fit": "minibatch"}, {"fit": "lloyd"}, {"fit": "balanced"}, {"fit": "sampled", "dim": 6, "reduction": "pca"},
    {"fit": "minibatch", "dim": 5}, {"method": "rq-vae", "hidden": "16", "code_dim": 4, "epochs": 2},
])  # fmt: skip
def test_row_groups_and_order_change_no_code_of_any_fit(tmp_path, items, small_batches, change):
    ids, vectors = items
    shuffle = np.random.default_rng(1).permutation(500)
    settings = SMALL | {"dedup_size": 500} | change
    write_embeddings(tmp_path / "e", ids, vectors)
    write_embeddings(tmp_path / "parts", [ids[i] for i in shuffle], vectors[shuffle], row_group=64)
    quantize(str(tmp_path / "e"), str(tmp_path / "s"), **settings)
    quantize(str(tmp_path / "parts"), str(tmp_path / "t"), **settings)
    (a, _, codes), (b, _, shuffled) = read(tmp_path / "s"), read(tmp_path / "t")
    assert np.array_equal(codes[shuffle], shuffled)
    assert (a.path / "codebooks.safetensors").read_bytes() == (b.path / "codebooks.safetensors").read_bytes()
    assert np.array_equal(quantizers.load(b).encode(vectors), codes[:, :2])


def test_the_first_bad_item_by_id_is_named_wherever_its_batch_is_and_ids_repeat_across_batches(
    tmp_path, items, small_batches
):
    ids, vectors = items
    bad = vectors[::-1].copy()
    bad[499 - 7, 15] = np.nan  # the last batch
    bad[499 - 450, 0] = np.inf
    write_embeddings(tmp_path / "e", ids[::-1], bad, row_group=64)
    with pytest.raises(ValueError, match="2 embeddings hold NaN or infinity, such as that of item 'i0007'"):
        quantize(str(tmp_path / "e"), str(tmp_path / "s"), **SMALL)
    write_embeddings(tmp_path / "f", [*ids[:-2], ids[0], ids[3]], vectors, row_group=64)
    with pytest.raises(ValueError, match="repeats 2 item_ids"):
        quantize(str(tmp_path / "f"), str(tmp_path / "s"), **SMALL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e", "f"]


PEAK = """
import pathlib, sys
from sidgraft import quality
from sidgraft.stages.quantize import quantize
quality.AMONG = 2000  # so that the fit decides the peak
quantize(sys.argv[1], sys.argv[2], codebook_size=16, levels=2, dedup_size=10**6, fit=sys.argv[3], steps=50)
status = pathlib.Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in status if line.startswith("VmHWM:")))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_memory_does_not_grow_with_the_vectors_of_a_sampled_fit_and_holds_them_once_in_the_others(tmp_path):
    """Peaks of processes of their own, for 60 and 240 thousand items of width 512, all in one row group."""
    width, sizes, peaks = 512, (60_000, 240_000), {}
    rng = np.random.default_rng(0)
    for n in sizes:
        kinds = rng.standard_normal((200, width), np.float32)
        vectors = kinds[rng.integers(200, size=n)] + rng.standard_normal((n, width), np.float32)
        write_embeddings(tmp_path / f"e{n}", [f"i{i:06d}" for i in range(n)], vectors, np.float16)
        for fit in ("sampled", "minibatch"):
            command = [sys.executable, "-c", PEAK, str(tmp_path / f"e{n}"), str(tmp_path / f"s{n}"), fit]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            peaks[fit, n] = int(out.split()[-1]) * 1024
    more = sizes[1] - sizes[0]
    grown = {fit: (peaks[fit, sizes[1]] - peaks[fit, sizes[0]]) / more for fit in ("sampled", "minibatch")}
    # bytes an item: ids, codes and figures (200 to 350, by how malloc shares them out); its vector has 1024 in the file
    assert grown["sampled"] < 700
    assert 0.8 < grown["minibatch"] / (4 * width) < 1.5  # the vector once as float32: the check would see it
