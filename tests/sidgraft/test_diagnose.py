"""Diagnose: the whole stage on small artifacts made on the spot, its figures checked against direct formulas."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file

from sidgraft import artifacts, models, prompts
from sidgraft.quantizers import Quantizer
from sidgraft.rqvae import RqVae
from sidgraft.sids import SidVocabulary
from sidgraft.stages.diagnose import diagnose

ITEMS, SIZES, LEVELS = 40, (8, 6, 3), 2
STATES = ["initialization", "grounding", "fine-tuning"]
CATEGORIES = ["Hair", "Skin", "Nails", "Other"]


def _codes() -> np.ndarray:
    """Unique codes: level 0 is the category's (two codes each, code 7 empty), the dedup code counts up."""
    codes = np.array([[i % 7, (i // 7) % 6, 0] for i in range(ITEMS)])
    assert len({tuple(c) for c in codes}) == ITEMS
    return codes


def _category(item: int) -> str:
    return CATEGORIES[(item % 7) // 2]


def _write_tables(root: Path, histories: list[list[int]]) -> None:
    names = [f"i{i:02d}" for i in range(ITEMS)]
    with artifacts.create(root / "catalog", "catalog/v1", stage="prepare", arguments={}) as draft:
        schema = artifacts.SCHEMAS["catalog/v1"]["catalog.parquet"]
        rows = [
            dict.fromkeys(schema.names) | {"item_id": names[i], "text": "t", "category": ["All", _category(i)]}
            for i in range(ITEMS)
        ]
        draft.write_table("catalog.parquet", pa.Table.from_pylist(rows, schema=schema))
    with artifacts.create(root / "interactions", "interactions/v1", stage="prepare", arguments={}) as draft:
        schema = artifacts.SCHEMAS["interactions/v1"]["interactions.parquet"]
        rows = [
            {
                "user_id": f"u{u}",
                "item_ids": [names[i] for i in history],
                "train_length": len(history) - 2,
                "valid_position": len(history) - 2,
                "test_position": len(history) - 1,
            }
            for u, history in enumerate(histories)
        ]
        draft.write_table("interactions.parquet", pa.Table.from_pylist(rows, schema=schema))
    with artifacts.create(root / "sids", "semantic_ids/v1", stage="quantize", arguments={}) as draft:
        table = pa.table({"item_id": names, "codes": pa.array(_codes().tolist(), pa.list_(pa.int32()))})
        schema = artifacts.SCHEMAS["semantic_ids/v1"]["semantic_ids.parquet"]
        draft.write_table("semantic_ids.parquet", table.cast(schema))
        save_file(_codebooks(), draft.path / "codebooks.safetensors")
        draft.write_json("quantizer.json", {"sizes": list(SIZES)})


def _codebooks() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {f"codebook_{level}": rng.normal(size=(SIZES[level], 5)).astype(np.float32) for level in range(LEVELS)}


def _write_rows(path: Path, tokenizer, vocabulary: SidVocabulary, digest: str, tensors: dict, training=None) -> None:
    with artifacts.create(path, "token_rows/v1", stage="expand", arguments={}) as draft:
        save_file({k: np.ascontiguousarray(v, np.float32) for k, v in tensors.items()}, draft.path / "rows.safetensors")
        vocabulary.save(draft.path)
        models.BaseModel("tiny", "", digest, False).save(draft.path)
        tokenizer.save_pretrained(draft.path / "tokenizer")
        if training is not None:
            draft.write_json("training.json", training)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> dict:
    """Artifacts of a run with mean initialization, scattered grounded rows and a fine-tuned model."""
    root = tmp_path_factory.mktemp("diagnose")
    rng = np.random.default_rng(1)
    histories = [rng.integers(0, ITEMS, rng.integers(3, 9)).tolist() for _ in range(30)]
    _write_tables(root, histories)
    model, tokenizer = models.load_base("tiny")
    digest = models.weights_digest(model)
    vocabulary = models.add_tokens(tokenizer, list(SIZES))
    base_VD = model.get_input_embeddings().weight.detach().numpy()[: vocabulary.first_id].copy()
    mu_D = base_VD.mean(axis=0, dtype=np.float64).astype(np.float32)
    centroids_SD = (mu_D + rng.normal(size=(sum(SIZES[:-1]), 64)) * 0.1).astype(np.float32)
    start_ND = np.tile(mu_D, (vocabulary.n_new, 1))
    grounded_ND = (start_ND + rng.normal(size=start_ND.shape) * 0.05).astype(np.float32)
    tuned_ND = (grounded_ND + rng.normal(size=start_ND.shape) * 0.02).astype(np.float32)
    tensors = {"rows": start_ND, "mu": mu_D, "centroid_rows": centroids_SD}
    _write_rows(root / "initial", tokenizer, vocabulary, digest, tensors)
    ground_log = [{"step": 1, "epoch": 0.5, "loss": 3.0}]
    _write_rows(root / "grounded", tokenizer, vocabulary, digest, {"rows": grounded_ND}, {"log": ground_log})
    models.put_rows(model, vocabulary, {"rows": torch.from_numpy(tuned_ND)})
    training = {"log": [{"step": 4, "epoch": 1, "loss": 2.0, "recall@5": 0.1}], "t_star": 4, "best_epoch": 1}
    with artifacts.create(root / "model", "model/v1", stage="finetune", arguments={"max_length": 512}) as draft:
        models.BaseModel("tiny", "", "", False).save(draft.path)
        model.save_pretrained(draft.path)
        tokenizer.save_pretrained(draft.path)
        vocabulary.save(draft.path)
        draft.write_json("training.json", training)
    rows = dict(zip(STATES, (start_ND, grounded_ND, tuned_ND), strict=True))
    return {
        "root": root,
        "histories": histories,
        "model": model,
        "tokenizer": tokenizer,
        "vocabulary": vocabulary,
        "rows": {name: x.astype(np.float64) for name, x in rows.items()},
        "mu": mu_D.astype(np.float64),
        "centroids": centroids_SD.astype(np.float64),
        "training": {"ground": ground_log, "finetune": training["log"], "t_star": 4, "best_epoch": 1},
    }


def _run(world: dict, out: Path, **settings) -> dict:
    root = world["root"]
    places = {"initial_rows": "initial", "grounded_rows": "grounded", "model": "model", "semantic_ids": "sids"}
    paths = {name: str(root / folder) for name, folder in places.items()} | {
        name: str(root / name) for name in ("catalog", "interactions")
    }
    return diagnose(**(paths | {"out": str(out), "neighbours": 2} | settings))


@pytest.fixture(scope="module")
def result(world, tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("out") / "diagnostics"
    summary = _run(world, out, variant="mean", seed=5)
    artifact = artifacts.load(out, "diagnostics/v1")
    return {"summary": summary, "artifact": artifact, "content": artifact.read_json("diagnostics.json")}


def _totals(world: dict, level: int) -> np.ndarray:
    totals = np.zeros(SIZES[level])
    for history in world["histories"]:
        for item in history[:-2]:
            totals[_codes()[item, level]] += 1
    return totals


def test_header_training_and_summary(world, result):
    content = result["content"]
    assert (content["variant"], content["seed"], content["level"]) == ("mean", 5, 0)
    assert list(content["stages"]) == STATES
    assert content["training"] == world["training"]
    assert result["artifact"].metadata == result["summary"] | {"variant": "mean", "seed": 5}
    last = content["stages"]["fine-tuning"]
    assert result["summary"]["effective_rank_fine_tuning"] == last["effective_rank"]
    assert result["summary"]["r2_popularity_5"] == last["r2"]["popularity"]["5"]
    assert all(isinstance(value, float) for value in result["summary"].values())


def test_mean_start_has_rank_zero_and_nulls(result):
    start = result["content"]["stages"]["initialization"]
    assert (start["rank"], start["effective_rank"], start["sigma_geo"]) == (0, 0.0, 0.0)
    assert start["effective_rank_all"] == pytest.approx(1)  # uncentred: one direction, the mean
    assert start["mean_cosine"] == pytest.approx(1)
    undefined = ("rsa_pearson", "rsa_spearman", "rsa_pearson_all", "purity", "cosine_to_initialization")
    for name in (*undefined, "cosine_to_centroids", "popularity_axis_correlation"):
        assert start[name] is None, name
    assert start["r2"] == {t: {"1": None, "3": None, "5": None} for t in ("popularity", "semantic")}


@pytest.mark.parametrize("state", ["grounding", "fine-tuning"])
def test_measures_against_direct_formulas(world, result, state):
    stage = result["content"]["stages"][state]
    rows, semantic = world["rows"][state][:8], world["rows"][state][:14]
    values = np.linalg.svd(rows - rows.mean(0), compute_uv=False)[:7]  # centring takes one of eight directions
    share = values / values.sum()
    assert stage["rank"] == 7
    assert stage["effective_rank"] == pytest.approx(np.exp(-(share * np.log(share)).sum()))
    assert stage["sigma_geo"] == pytest.approx(np.exp(np.log(values).mean()))
    np.testing.assert_allclose(stage["spectrum"][:7], values)
    np.testing.assert_allclose(stage["spectrum_all"], np.linalg.svd(semantic, compute_uv=False))

    books = [book.astype(np.float64) for book in _codebooks().values()]
    for suffix, x, y in (("", rows, books[0]), ("_all", semantic, np.concatenate(books))):
        upper = np.triu_indices(len(x), 1)
        x, y = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (x, y))
        expected = np.corrcoef((x @ x.T)[upper], (y @ y.T)[upper])[0, 1]
        assert stage[f"rsa_pearson{suffix}"] == pytest.approx(expected)
        assert stage[f"mean_cosine{suffix}"] == pytest.approx((x @ x.T)[upper].mean())

    left = np.linalg.svd(rows - rows.mean(0))[0]
    popularity = np.log1p(_totals(world, 0))
    # Two codes a category, "Other" has code 6 alone, code 7 is empty: a zero row before centring.
    labels = [0, 0, 1, 1, 2, 2, 3]
    one_hot = np.zeros((8, 4))
    one_hot[range(7), labels] = 1
    for target, x in (("popularity", popularity[:, None]), ("semantic", one_hot)):
        x = x - x.mean(0)
        for q in (1, 3, 5):
            expected = ((left[:, :q].T @ x) ** 2).sum() / (x**2).sum()
            assert stage["r2"][target][str(q)] == pytest.approx(expected, rel=1e-6), (target, q)

    kept = np.arange(6)  # neither the empty code nor "Other"
    shares = []
    for k in kept:
        others = sorted((np.linalg.norm(rows[k] - rows[j]), j) for j in kept if j != k)
        shares.append(np.mean([labels[j] == labels[k] for _, j in others[:2]]))
    assert stage["purity"] == pytest.approx(np.mean(shares))
    assert stage["purity_random"] == pytest.approx(1 / 5)

    seen, truth = rows - world["mu"], world["centroids"][:8] - world["mu"]
    cosines = (seen * truth).sum(1) / np.linalg.norm(seen, axis=1) / np.linalg.norm(truth, axis=1)
    assert stage["cosine_to_centroids"] == pytest.approx(cosines.mean())


def test_popularity_axis_is_the_mean_input_of_the_head(world, result):
    model, vocabulary = world["model"], world["vocabulary"]
    prompt = prompts.NextItem(world["tokenizer"], vocabulary, 1024)
    tokens = vocabulary.item_tokens(_codes())
    seen = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].detach().double()))
    states = []
    for history in world["histories"]:
        ids = prompt.sample(tokens[history[:-2]]).ids_S
        with torch.no_grad():
            model.float()(torch.from_numpy(ids)[None])
        states += [seen[-1][p - 1].numpy() for p in range(1, len(ids)) if 0 <= ids[p] - vocabulary.first_id < 8]
    handle.remove()
    assert len(states) == sum(len(h) - 2 for h in world["histories"])
    totals = _totals(world, 0)
    for state in STATES[1:]:
        projection = world["rows"][state][:8] @ np.mean(states, axis=0)
        expected = np.corrcoef(projection, totals)[0, 1]
        assert result["content"]["stages"][state]["popularity_axis_correlation"] == pytest.approx(expected, rel=1e-4)


def test_explained_variance(world, result):
    counts = np.zeros(ITEMS)
    for history in world["histories"]:
        np.add.at(counts, history[:-2], 1)
    a, codes = np.log1p(counts), _codes()
    means = np.array([a[codes[:, 0] == codes[i, 0]].mean() for i in range(ITEMS)])
    assert result["content"]["explained_variance"] == pytest.approx({"1": means.var() / a.var(), "2": 1.0})


def test_matrices_and_figures(world, result):
    path = result["artifact"].path
    table = pq.read_table(path / "cosine_grounding.parquet")
    assert table["code"].to_pylist() == list(range(8))
    rows = world["rows"]["grounding"][:8]
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(np.array(table["cosine"].to_pylist()), units @ units.T, atol=1e-3)
    text = pq.read_table(path / "cosine_text_fine-tuning.parquet")
    values = np.array(text["cosine"].to_pylist(), dtype=np.float64)
    assert values.shape == (8, 256)
    assert values.mean() == pytest.approx(result["content"]["stages"]["fine-tuning"]["mean_cosine_text"], abs=1e-3)
    listed = [entry["file"] for entry in result["content"]["figures"]]
    assert sorted(listed) == sorted(f"figures/{file.name}" for file in (path / "figures").iterdir())
    assert all(entry["title"] and entry["caption"] for entry in result["content"]["figures"])


def test_second_level_without_centroids_or_training(world, tmp_path):
    bare = tmp_path / "bare"
    tensors = {"rows": world["rows"]["grounding"]}
    _write_rows(bare, world["tokenizer"], world["vocabulary"], "", tensors)
    summary = _run(world, tmp_path / "out", level=1, initial_rows=str(bare), grounded_rows=str(bare))
    content = json.loads((tmp_path / "out" / "diagnostics.json").read_text())
    assert content["training"]["ground"] == []
    stage = content["stages"]["grounding"]
    assert stage["cosine_to_centroids"] is None
    assert stage["cosine_to_initialization"] == pytest.approx(1)
    assert len(stage["spectrum"]) == 6
    assert summary["effective_rank_grounding"] == summary["effective_rank_initialization"]


@pytest.mark.parametrize("level", [-1, 2, 3])
def test_level_must_be_semantic(world, tmp_path, level):
    with pytest.raises(ValueError, match="expected a semantic level, 0 to 1"):
        _run(world, tmp_path / "out", level=level)
    assert not (tmp_path / "out").exists()


def test_inputs_of_another_run_are_refused(world, tmp_path):
    _, tokenizer = models.load_base("tiny")
    other = models.add_tokens(tokenizer, [8, 6, 4])
    _write_rows(tmp_path / "other", tokenizer, other, "", {"rows": np.zeros((other.n_new, 64))})
    with pytest.raises(ValueError, match="grounded_rows has codes"):
        _run(world, tmp_path / "out", grounded_rows=str(tmp_path / "other"))


def test_rsa_of_an_rq_vae_is_against_the_centroids_of_its_codes_not_its_codebooks(world, tmp_path):
    books = [np.random.default_rng(9).normal(size=(size, 3)).astype(np.float32) for size in SIZES[:-1]]
    network = RqVae(5, list(SIZES[:-1]), code_dim=3, hidden=[4])
    means, counts = list(_codebooks().values()), [np.ones(size, np.int64) for size in SIZES[:-1]]
    with artifacts.create(tmp_path / "rq", "semantic_ids/v1", stage="quantize", arguments={}) as draft:
        table = artifacts.load(world["root"] / "sids", "semantic_ids/v1").read_table("semantic_ids.parquet")
        draft.write_table("semantic_ids.parquet", table)
        quantizer = Quantizer(books, list(SIZES), network=network, means=means, counts=counts)
        save_file(quantizer.tensors(), draft.path / "codebooks.safetensors")
        draft.write_json("quantizer.json", {"sizes": list(SIZES)})
    of_rq, of_means = (
        artifacts.load(tmp_path / name, "diagnostics/v1").read_json("diagnostics.json")["stages"]
        for name, sids in (("a", tmp_path / "rq"), ("b", world["root"] / "sids"))
        if _run(world, tmp_path / name, semantic_ids=str(sids))
    )
    assert of_rq == of_means  # the means are the codebooks of the other artifact
    assert of_rq["grounding"]["rsa_pearson"] is not None
