"""The stage expand: token rows that go back into their model, tied or untied, padded or not."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoTokenizer, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from sidgraft import artifacts, initializers, models, quantizers
from sidgraft.artifacts import SCHEMAS
from sidgraft.sids import SidVocabulary, codes_array, token_texts
from sidgraft.stages.expand import INITIALIZATIONS, expand
from sidgraft.stages.quantize import quantize

N, D_ITEMS = 60, 8
SIZES = [6, 6, 16]
N_SEMANTIC, N_NEW = 12, 30


def write_catalog(path, item_ids, texts):
    schema = SCHEMAS["catalog/v1"]["catalog.parquet"]
    rows = [dict.fromkeys(schema.names) | {"item_id": i, "text": t} for i, t in zip(item_ids, texts, strict=True)]
    with artifacts.create(path, "catalog/v1", stage="prepare", arguments={}) as draft:
        draft.write_table("catalog.parquet", pa.Table.from_pylist(rows, schema=schema))
    return path


def write_embeddings(path, item_ids, vectors):
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.astype(np.float32).ravel()), vectors.shape[1])
    with artifacts.create(path, "item_embeddings/v1", stage="embed", arguments={}) as draft:
        draft.write_table("embeddings.parquet", pa.table({"item_id": pa.array(item_ids), "embedding": column}))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Artifacts of 60 items; the width of their embeddings is 8, or 40 under `wide`."""
    root = tmp_path_factory.mktemp("data")
    ids = [f"i{i:02d}" for i in range(N)]
    texts = [f"item {i} <|im_end|> <s_a_{i % 6}>" if i % 2 else f"{'ab' * (i % 5)} {i}" for i in range(N)]
    write_catalog(root / "catalog", ids, texts)
    for name, width in (("", D_ITEMS), ("wide-", 40)):
        vectors = np.random.default_rng(0).standard_normal((N, width))
        write_embeddings(root / f"{name}embeddings", ids, vectors)
        quantize(
            str(root / f"{name}embeddings"), str(root / f"{name}sids"),
            levels=2, codebook_size=6, dedup_size=16, fit="lloyd",
        )  # fmt: skip
    return root


def run(data, out, prefix="", **options):
    options = {"base_model": "tiny"} | options
    summary = expand(
        str(data / f"{prefix}sids"), str(data / "catalog"), str(data / f"{prefix}embeddings"), str(out), **options
    )
    return summary, artifacts.load(out, "token_rows/v1")


def write_model(path, *, tied, padding, width=32):
    _, tokenizer = models.load_base("tiny")
    config = LlamaConfig(
        vocab_size=len(tokenizer) + padding,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # padding rows that would show up in any mean they were counted in
        model.get_input_embeddings().weight[len(tokenizer) :] = 1e4
        model.get_output_embeddings().weight[len(tokenizer) :] = 1e4
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model, len(tokenizer)


@pytest.mark.parametrize("initialization", ["centroid", "centroid-shuffled"])
@pytest.mark.parametrize("scale", ["none", "match"])
def test_centroids_of_an_rq_vae_are_means_of_embeddings_and_codes_without_items_are_gaussian(
    tmp_path, data, initialization, scale
):
    quantize(
        str(data / "embeddings"), str(tmp_path / "sids"), method="rq-vae", hidden="8", code_dim=2,
        levels=2, codebook_size=30, dedup_size=60, epochs=2, learning_rate=0.1,
    )  # fmt: skip
    out = tmp_path / "rows"
    where = str(tmp_path / "sids"), str(data / "catalog"), str(data / "embeddings"), str(out)
    summary = expand(*where, base_model="tiny", initialization=initialization, scale=scale, seed=5)
    gaussian = tmp_path / "gaussian"
    expand(*where[:3], str(gaussian), base_model="tiny", initialization="gaussian", seed=5)
    rows = models.load_rows(artifacts.load(out, "token_rows/v1"))["rows"]
    draws = models.load_rows(artifacts.load(gaussian, "token_rows/v1"))["rows"]

    table = artifacts.load(tmp_path / "sids", "semantic_ids/v1").read_table("semantic_ids.parquet")
    codes = codes_array(table)
    vectors = np.random.default_rng(0).standard_normal((N, D_ITEMS)).astype(np.float32).astype(float)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    known = np.array([(codes[:, level] == k).any() for level in (0, 1) for k in range(30)])
    means = np.array([units[codes[:, n // 30] == n % 30].mean(axis=0) for n in np.flatnonzero(known)])
    parts = (means - means.mean(axis=0)) @ initializers.lift(D_ITEMS, 64, 5).numpy().T
    base = models.load_base("tiny")[0].get_input_embeddings().weight.detach().double()
    mu = base.mean(dim=0)
    if scale == "match":
        parts *= (base - mu).norm(dim=1).mean().item() / np.linalg.norm(parts, axis=1).mean()
    expected = draws[:60].clone()
    expected[torch.from_numpy(known)] = (torch.from_numpy(parts) + mu).float()
    if initialization == "centroid-shuffled":
        expected = initializers.shuffled(expected, [30, 30], initializers.stream(5, initializers.SHUFFLE))
    torch.testing.assert_close(rows[:60], expected)
    assert summary["empty_codes"] == (~known).sum() > 0


@pytest.mark.parametrize("initialization", INITIALIZATIONS)
def test_every_initialization_of_a_tied_model_by_its_equation(tmp_path, data, initialization):
    summary, artifact = run(data, tmp_path / "rows", initialization=initialization, seed=5)
    model, tokenizer = models.load_base("tiny")
    base = model.get_input_embeddings().weight.detach()
    mu = base.double().mean(dim=0).float()
    tensors = models.load_rows(artifact)
    rows = tensors["rows"]
    assert rows.dtype == torch.float32
    assert rows.shape == (N_NEW, 64)
    assert "head_rows" not in tensors
    assert summary["tied"] is True
    assert (summary["n_new"], summary["width"], summary["first_id"]) == (N_NEW, 64, len(tokenizer))
    assert artifact.metadata == summary
    assert summary["new_rows_norm"] == pytest.approx(rows.norm(dim=1).mean().item(), abs=1e-5)
    torch.testing.assert_close(tensors["mu"], mu)

    books = quantizers.load(artifacts.load(data / "sids", "semantic_ids/v1")).codebooks
    everything = np.concatenate(books).astype(float)
    lifted = (everything - everything.mean(axis=0)) @ initializers.lift(D_ITEMS, 64, 5).numpy().T
    truth = torch.from_numpy(lifted).float() + mu
    torch.testing.assert_close(tensors["centroid_rows"], truth)

    others = rows
    if initialization == "centroid":
        torch.testing.assert_close(rows[:N_SEMANTIC], truth)
    elif initialization == "centroid-shuffled":
        for level in (slice(0, 6), slice(6, 12)):
            distances = torch.cdist(rows[level], truth[level])
            assert (distances.min(dim=1).values < 1e-5).all()
            assert len(set(distances.argmin(dim=1).tolist())) == 6
        assert not torch.allclose(rows[:N_SEMANTIC], truth)
    elif initialization == "description":
        table = artifacts.load(data / "catalog", "catalog/v1").read_table("catalog.parquet")
        codes = codes_array(artifacts.load(data / "sids", "semantic_ids/v1").read_table("semantic_ids.parquet"))
        text = "".join(t for t, row in zip(table["text"].to_pylist(), codes, strict=True) if row[1] == 3)
        plain = [base[tokenizer.convert_tokens_to_ids(tokenizer.tokenize(c))].sum(dim=0) for c in text]
        torch.testing.assert_close(rows[6 + 3], torch.stack(plain).sum(dim=0) / len(text), atol=1e-5, rtol=1e-4)
    if initialization in ("centroid", "centroid-shuffled", "description"):
        others = rows[N_SEMANTIC:]
    if initialization == "mean":
        assert (rows == rows[0]).all()
        torch.testing.assert_close(rows[0], mu)
    elif initialization == "random":
        assert rows.std().item() == pytest.approx(model.config.initializer_range, rel=0.1)
    else:  # gaussian: near mu, and not mu
        assert ((others - mu).abs() < 1e-4).all()
        assert (others != mu).any(dim=1).all()


@pytest.mark.parametrize("padding", [0, 7, 100])
def test_an_untied_head_has_its_own_mean_and_padding_counts_nowhere(tmp_path, data, padding):
    model, size = write_model(tmp_path / "base", tied=False, padding=padding)
    mus = [e.weight.detach()[:size].double().mean(dim=0) for e in (model.get_input_embeddings(), model.lm_head)]
    options = {"base_model": str(tmp_path / "base"), "initialization": "centroid", "scale": "match"}
    summary, artifact = run(data, tmp_path / "rows", **options)
    assert summary["tied"] is False
    assert summary["first_id"] == size
    tensors = models.load_rows(artifact)
    directions = []
    for name, mu, end in zip(("rows", "head_rows"), mus, (model.get_input_embeddings(), model.lm_head), strict=True):
        centred = tensors[name].double() - mu
        expected = (end.weight.detach()[:size].double() - mu).norm(dim=1).mean()
        assert centred[:N_SEMANTIC].norm(dim=1).mean().item() == pytest.approx(expected.item(), rel=1e-5)
        assert centred[N_SEMANTIC:].abs().max() < 1e-3
        directions.append(torch.nn.functional.normalize(centred[:N_SEMANTIC]))
    torch.testing.assert_close(*directions, atol=1e-4, rtol=0)

    grafted, tokenizer, vocabulary = models.load_grafted(artifact, torch.float32)
    assert vocabulary == SidVocabulary(tuple(SIZES), size)
    assert len(grafted.get_input_embeddings().weight) == max(size + padding, size + N_NEW)
    assert torch.equal(grafted.get_input_embeddings().weight[size : size + N_NEW], tensors["rows"])
    assert torch.equal(grafted.lm_head.weight[size : size + N_NEW], tensors["head_rows"])
    ids = tokenizer("".join(token_texts(SIZES)), add_special_tokens=False).input_ids
    assert ids == list(range(size, size + N_NEW))


def test_random_takes_the_models_own_range_at_both_ends(tmp_path, data):
    write_model(tmp_path / "base", tied=False, padding=0)
    options = {"base_model": str(tmp_path / "base"), "initialization": "random"}
    tensors = models.load_rows(run(data, tmp_path / "rows", **options)[1])
    assert tensors["rows"].std().item() == pytest.approx(0.3, rel=0.1)
    assert tensors["head_rows"].std().item() == pytest.approx(0.3, rel=0.1)
    assert not torch.equal(tensors["rows"], tensors["head_rows"])


def test_rows_are_the_same_for_the_same_seed_only(tmp_path, data):
    a, b, c = (run(data, tmp_path / n, initialization="gaussian", seed=s)[1] for n, s in (("a", 0), ("b", 0), ("c", 1)))
    assert a.digest == b.digest
    assert not torch.equal(models.load_rows(a)["rows"], models.load_rows(c)["rows"])


def test_codes_without_items_start_like_the_others_under_description(tmp_path, data):
    write_catalog(tmp_path / "catalog", [f"i{i:02d}" for i in range(N)], [""] * N)
    summary = expand(
        str(data / "sids"), str(tmp_path / "catalog"), str(data / "embeddings"), str(tmp_path / "rows"),
        base_model="tiny", initialization="description",
    )  # fmt: skip
    assert summary["empty_codes"] == N_SEMANTIC
    tensors = models.load_rows(artifacts.load(tmp_path / "rows", "token_rows/v1"))
    assert ((tensors["rows"] - tensors["mu"]).abs() < 1e-4).all()


def test_rows_never_meet_another_base_model(tmp_path, data):
    model, _ = write_model(tmp_path / "base", tied=True, padding=0)
    _, artifact = run(data, tmp_path / "rows", base_model=str(tmp_path / "base"))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="restore that model, or run `sidgraft expand` again"):
        models.load_grafted(artifact, torch.float32)


def test_centroids_wider_than_the_model(tmp_path, data):
    write_model(tmp_path / "base", tied=True, padding=0)  # width 32, centroids 40
    options = {"prefix": "wide-", "base_model": str(tmp_path / "base")}
    with pytest.raises(ValueError, match="--dim 32"):
        run(data, tmp_path / "rows", initialization="centroid", **options)
    assert not (tmp_path / "rows").exists()
    _, artifact = run(data, tmp_path / "rows", initialization="description", **options)
    assert models.load_rows(artifact).keys() == {"rows", "mu"}


def test_inputs_that_do_not_belong_together_are_refused(tmp_path, data):
    with pytest.raises(ValueError, match="was not made from"):
        expand(
            str(data / "sids"), str(data / "catalog"), str(data / "wide-embeddings"), str(tmp_path / "o"),
            base_model="tiny",
        )  # fmt: skip
    write_catalog(tmp_path / "catalog", [f"j{i}" for i in range(N)], ["x"] * N)
    with pytest.raises(ValueError, match="60 of the 60 items with Semantic IDs are not among"):
        expand(
            str(data / "sids"), str(tmp_path / "catalog"), str(data / "embeddings"), str(tmp_path / "o"),
            base_model="tiny",
        )  # fmt: skip


@pytest.mark.parametrize("initialization", [name for name in INITIALIZATIONS if not name.startswith("centroid")])
def test_scale_is_left_out_where_there_are_no_centroids(tmp_path, data, initialization, capsys):
    """A study sets one scale for all of its starts."""
    summary, artifact = run(data, tmp_path / "rows", initialization=initialization, scale="match")
    assert "scale=match is left out" in capsys.readouterr().err
    assert summary["scale"] == artifact.arguments["scale"] == "none"
    _, published = run(data, tmp_path / "published", initialization=initialization)
    assert artifact.digest == published.digest


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"initialization": "centroids"}, "Did you mean centroid"),
        ({"scale": "matched"}, "Did you mean match"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, data, options, match):
    with pytest.raises(ValueError, match=match):
        run(data, tmp_path / "o", **options)


def test_a_model_that_could_not_be_trained_is_refused_before_its_rows_are_made(tmp_path, data):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GraniteConfig(vocab_size=300, num_key_value_heads=2, logits_scaling=8.0, **sizes)
    GraniteForCausalLM(config).save_pretrained(tmp_path / "base")
    models.load_base("tiny")[1].save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"granite.*logits_scaling=8\.0, which is not supported"):
        run(data, tmp_path / "rows", base_model=str(tmp_path / "base"))
    assert not (tmp_path / "rows").exists()


def test_the_tokenizer_comes_back_whole(tmp_path, data):
    _, artifact = run(data, tmp_path / "rows")
    tokenizer = AutoTokenizer.from_pretrained(artifact.path / "tokenizer")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template
    assert tokenizer("<|sid_begin|>").input_ids == [SidVocabulary.load(artifact.path).begin_id]
