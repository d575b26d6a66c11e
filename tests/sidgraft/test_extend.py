"""Going on from a published version: extend, quantize with previous, and expand from its model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.numpy import load_file
from scipy.optimize import linear_sum_assignment
from transformers import AutoModelForCausalLM

from sidgraft import artifacts, bundles, models, quantizers
from sidgraft.sids import SidVocabulary, codes_array, token_texts
from sidgraft.stages.embed import embed
from sidgraft.stages.expand import expand
from sidgraft.stages.extend import extend
from sidgraft.stages.publish import publish
from sidgraft.stages.quantize import quantize

SAME = {"levels": 2, "codebook_size": 4, "dedup_size": 16, "fit": "lloyd"}  # as the fixture shop has them


@pytest.fixture(scope="module")
def version(good, tmp_path_factory):
    """The place of a published version of the shop."""
    root = tmp_path_factory.mktemp("published")
    summary = publish(**good, bundles=str(root / "bundles"), out=str(root / "out"))
    return bundles.version_uri(str(root / "bundles"), summary["version"])


@pytest.fixture
def rows(good):
    return artifacts.load(good["catalog"], "catalog/v1").read_table("catalog.parquet").to_pylist()


def embedded(folder, rows, encoder="hashing"):
    """A catalog of these rows and its embeddings."""
    schema = artifacts.SCHEMAS["catalog/v1"]["catalog.parquet"]
    with artifacts.create(folder / "catalog", "catalog/v1", stage="prepare", arguments={}) as draft:
        draft.write_table("catalog.parquet", pa.Table.from_pylist(rows, schema))
    embed(str(folder / "catalog"), str(folder / "vectors"), encoder=encoder, dtype="float32")
    return str(folder / "catalog"), str(folder / "vectors")


def sids(place):
    """item_id -> Semantic ID of an artifact."""
    table = artifacts.load(place, "semantic_ids/v1").read_table("semantic_ids.parquet")
    return dict(zip(table["item_id"].to_pylist(), map(tuple, codes_array(table).tolist()), strict=True))


def grown(rows):
    """A catalog from which two items left, in which one became the twin of another, and to which two came."""
    twin = dict(rows[3], text=rows[7]["text"])
    new = [dict(rows[9], item_id="n2"), dict(rows[5], item_id="n1")]
    return [new[0], *rows[2:3], twin, *rows[4:], new[1]]


def test_old_items_keep_their_ids_and_new_and_changed_ones_are_encoded(version, rows, tmp_path):
    before = sids(f"{version}/semantic_ids")
    catalog, vectors = embedded(tmp_path, grown(rows))
    summary = extend(catalog, vectors, version, str(tmp_path / "ids"))
    found = sids(tmp_path / "ids")
    assert list(found) == [row["item_id"] for row in grown(rows)]
    assert len(set(found.values())) == len(found)
    kept = found.keys() & before.keys() - {"i03"}
    assert {item: found[item] for item in kept} == {item: before[item] for item in kept}
    assert len(kept) == 21
    # Twins have the vectors, so the codes, of those they resemble, and a deduplication code nobody has or had.
    for item, like in (("n1", "i05"), ("n2", "i09"), ("i03", "i07")):
        assert found[item][:2] == before[like][:2]
        if item != "i03" or before["i03"][:2] != before["i07"][:2]:
            assert found[item] not in before.values()
    assert (summary["encoded"], summary["kept"]) == (3, 21)

    artifact = artifacts.load(tmp_path / "ids", "semantic_ids/v1")
    lost = {(r["item_id"], *r["codes"]) for r in artifact.read_table("retired.parquet").to_pylist()}
    wanted = {(item, *sid) for item, sid in before.items() if found.get(item) != sid}
    assert lost == wanted >= {("i00", *before["i00"]), ("i01", *before["i01"])}
    assert summary["retired"] == len(lost)
    for name in ("codebooks.safetensors", "quantizer.json"):
        assert json.dumps(tensors_or_json(artifact.path / name)) == json.dumps(
            tensors_or_json(Path(version) / "semantic_ids" / name)
        )
    sizes = [sum(found[item][:2] == other[:2] for other in found.values()) for item in found]
    assert summary["collision_rate"] == pytest.approx(np.mean([size > 1 for size in sizes]), abs=1e-6)
    assert summary["largest_bucket"] == max(sizes)


def test_an_increment_has_the_figures_of_a_quantization_by_the_decoder_of_the_fit(version, shop, rows, tmp_path):
    """METHOD 4 in float64: û is c_1 + m c_2, m the mean length that the first level left of the items of the fit."""
    catalog, vectors = embedded(tmp_path, grown(rows))
    summary = extend(catalog, vectors, version, str(tmp_path / "ids"))
    artifact, found = artifacts.load(tmp_path / "ids", "semantic_ids/v1"), sids(tmp_path / "ids")
    tensors = load_file(artifact.path / "codebooks.safetensors")
    first, second = (tensors[f"codebook_{level}"].astype(float) for level in (0, 1))
    at_fit = sids(f"{version}/semantic_ids")
    rests = {item: unit - first[at_fit[item][0]] for item, unit in units(shop["item_embeddings"]).items()}
    m = np.mean([np.linalg.norm(rest) for rest in rests.values()])
    errors, left = {}, []
    for item, unit in units(vectors).items():
        a, b, _ = found[item]
        errors[item] = ((unit - first[a] - m * second[b]) ** 2).sum()
        length = np.linalg.norm(unit - first[a])
        rest = (unit - first[a]) / length if length > 1e-6 else np.zeros_like(unit)
        left.append([length, np.linalg.norm(rest - second[b])])
    figures = artifact.read_json("quality.json")
    encoded = [errors[item] for item in ("n1", "n2", "i03")]
    assert figures["relative_squared_error"] == pytest.approx(np.mean(list(errors.values())), rel=1e-5)
    assert figures["relative_squared_error_encoded"] == pytest.approx(np.mean(encoded), rel=1e-5)
    fitted = artifacts.load(shop["semantic_ids"], "semantic_ids/v1").read_json("quality.json")
    assert figures["relative_squared_error_at_fit"] == fitted["relative_squared_error"]
    assert [level["mse"] for level in figures["levels"]] == pytest.approx(np.square(left).mean(axis=0), rel=1e-5)
    used = [len({sid[level] for sid in found.values()}) / 4 for level in (0, 1)]
    assert [level["utilisation"] for level in figures["levels"]] == used
    assert figures.keys() - {"levels"} <= figures["definitions"].keys() | {"definitions"}
    flat = {"relative_squared_error": figures["relative_squared_error"], "mse_level_1": np.square(left).mean(axis=0)[1]}
    assert {name: summary[name] for name in flat} == pytest.approx(flat, abs=2e-6)


def units(embeddings):
    """item_id -> its vector at unit length, float64."""
    rows = artifacts.load(embeddings, "item_embeddings/v1").read_table("embeddings.parquet").to_pylist()
    return {row["item_id"]: np.array(row["embedding"]) / np.linalg.norm(row["embedding"]) for row in rows}


def test_the_largest_bucket_counts_the_items_that_are_there(version, rows, tmp_path):
    """An item keeps its deduplication code when those before it have left, so that codes say more than there are."""
    before = sids(f"{version}/semantic_ids")
    last: dict = {}
    for item, sid in sorted(before.items(), key=lambda entry: entry[1]):
        last[sid[:2]] = item
    assert max(before[item][2] for item in last.values()) > 0, "the test would say nothing"
    catalog, vectors = embedded(tmp_path, [row for row in rows if row["item_id"] in last.values()])
    summary = extend(catalog, vectors, version, str(tmp_path / "ids"))
    assert (summary["largest_bucket"], summary["collision_rate"], summary["encoded"]) == (1, 0.0, 0)
    assert "relative_squared_error_encoded" not in summary


def tensors_or_json(file):
    if file.suffix == ".json":
        return json.loads(file.read_text())
    return {name: tensor.tolist() for name, tensor in sorted(load_file(file).items())}


def test_the_same_catalog_gives_the_same_ids_in_any_order(version, rows, tmp_path):
    extend(*embedded(tmp_path / "a", rows), version, str(tmp_path / "a" / "ids"))
    extend(*embedded(tmp_path / "b", grown(rows)), version, str(tmp_path / "b" / "ids"))
    extend(*embedded(tmp_path / "c", grown(rows)[::-1]), version, str(tmp_path / "c" / "ids"))
    assert sids(tmp_path / "a" / "ids") == sids(f"{version}/semantic_ids")
    assert sids(tmp_path / "b" / "ids") == sids(tmp_path / "c" / "ids")


def test_an_increment_starts_from_the_last_model_and_all_of_its_rows(version, rows, tmp_path):
    catalog, vectors = embedded(tmp_path, grown(rows))
    extend(catalog, vectors, version, str(tmp_path / "ids"))
    summary = expand(
        str(tmp_path / "ids"), catalog, vectors, str(tmp_path / "rows"), base_model="tiny", previous=f"{version}/"
    )
    artifact = artifacts.load(tmp_path / "rows", "token_rows/v1")
    assert summary["kept_rows"] == summary["n_new"] == 4 + 4 + 16 + 2
    model, tokenizer, vocabulary = models.load_grafted(artifact, torch.float32)
    last = AutoModelForCausalLM.from_pretrained(f"{version}/model", dtype=torch.float32)
    for name, tensor in last.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert vocabulary == SidVocabulary.load(Path(version) / "model")
    texts = token_texts([4, 4, 16])
    assert tokenizer.convert_tokens_to_ids(texts) == list(range(vocabulary.first_id, vocabulary.first_id + len(texts)))
    base = models.BaseModel.load(artifact.path)
    assert base.previous == Path(version).name
    assert base.origin == ("tiny", "")
    assert str(tmp_path) not in json.dumps(artifact.arguments)


def test_new_codes_take_the_numbers_of_old_ones_and_keep_their_rows(version, rows, tmp_path):
    """The oracle is a fit of its own without previous, matched here by counting."""
    moved = [dict(row, text=row["text"].replace("Soap number", "Lotion of")) for row in rows[1:]]
    catalog, vectors = embedded(tmp_path, moved)
    settings = SAME | {"dedup_size": 20, "seed": 3}
    quantize(vectors, str(tmp_path / "plain"), **settings)
    summary = quantize(vectors, str(tmp_path / "ids"), **settings, previous=version)
    before, plain, found = (sids(p) for p in (f"{version}/semantic_ids", tmp_path / "plain", tmp_path / "ids"))
    kept = []
    for level in (0, 1):
        shared = np.zeros((4, 4))
        for item in plain:
            shared[plain[item][level], before[item][level]] += 1
        jaccard = shared / (shared.sum(0) + shared.sum(1)[:, None] - shared).clip(1)
        new, number = linear_sum_assignment(-jaccard)
        best = jaccard[new, number].sum()
        renamed = {(plain[item][level], found[item][level]) for item in plain}
        used = dict(renamed)
        assert len(renamed) == len(used) == len(set(used.values())), "codes are renamed one to one"
        assert sum(jaccard[a, b] for a, b in renamed) == pytest.approx(best)
        kept.append([any(b == code and jaccard[a, b] >= 1 / 3 for a, b in renamed) for code in range(4)])
        assert summary[f"kept_codes_level_{level}"] == sum(kept[-1])
    artifact = artifacts.load(tmp_path / "ids", "semantic_ids/v1")
    assert artifact.read_json("continuity.json")["kept"] == kept
    assert np.any(kept), "the test would say nothing"
    assert not np.all(kept), "the test would say nothing"
    items = artifacts.load(vectors, "item_embeddings/v1").read_table("embeddings.parquet")
    encoded = quantizers.load(artifact).encode(np.array(items["embedding"].to_pylist(), np.float32))
    assert [found[item][:2] for item in items["item_id"].to_pylist()] == list(map(tuple, encoded.tolist()))

    where = str(tmp_path / "ids"), catalog, vectors
    summary = expand(*where, str(tmp_path / "rows"), base_model="tiny", initialization="mean", previous=version)
    tensors = models.load_rows(artifacts.load(tmp_path / "rows", "token_rows/v1"))
    model, _, old = models.load_model(artifacts.load(f"{version}/model", "model/v1"), torch.float32)
    matrix = model.get_input_embeddings().weight.detach()
    mean = matrix[: old.first_id].double().mean(dim=0).float()
    new = SidVocabulary((4, 4, 20), old.first_id)
    expected = mean.repeat(new.n_new, 1)
    for level in (0, 1):
        for code in (code for code in range(4) if kept[level][code]):
            expected[4 * level + code] = matrix[old.first_id + 4 * level + code]
    expected[8:24] = matrix[old.first_id + 8 : old.first_id + 24]  # deduplication, 16 of 20
    expected[-2:] = matrix[old.begin_id : old.end_id + 1]
    torch.testing.assert_close(tensors["rows"], expected)
    assert summary["kept_rows"] == np.sum(kept) + 16 + 2
    grafted, tokenizer, vocabulary = models.load_grafted(
        artifacts.load(tmp_path / "rows", "token_rows/v1"), torch.float32
    )
    assert vocabulary == new
    assert tokenizer.convert_tokens_to_ids("<|sid_end|>") == new.end_id
    assert torch.equal(grafted.get_input_embeddings().weight[: old.first_id], matrix[: old.first_id])
    assert torch.equal(grafted.get_input_embeddings().weight[new.first_id :], tensors["rows"])


def test_an_rq_vae_with_other_numbers_is_the_same_rq_vae(tmp_path, rows):
    _, vectors = embedded(tmp_path, rows)
    settings = {"levels": 2, "codebook_size": 4, "hidden": "8", "code_dim": 3, "epochs": 2, "method": "rq-vae"}
    quantize(vectors, str(tmp_path / "ids"), **settings)
    quantizer = quantizers.load(artifacts.load(tmp_path / "ids", "semantic_ids/v1"))
    x = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    numbers = [np.array([2, 0, 3, 1]), np.array([1, 2, 3, 0])]
    other = quantizer.renumbered(numbers)
    expected = np.stack([numbers[level][quantizer.encode(x)[:, level]] for level in (0, 1)], axis=1)
    assert np.array_equal(other.encode(x), expected)
    for level, number in enumerate(numbers):
        for name in ("codebooks", "means", "counts"):
            assert np.array_equal(getattr(other, name)[level][number], getattr(quantizer, name)[level])


def test_what_does_not_go_on_from_the_version_is_refused(version, rows, tmp_path, shop):
    catalog, vectors = embedded(tmp_path, rows)
    other = str(tmp_path / "other")
    settings = {"encoder": "another", "max_tokens": 1}
    source = artifacts.load(vectors, "item_embeddings/v1")
    inputs = {"catalog": artifacts.load(catalog, "catalog/v1")}
    for name, arguments, width in (("id", settings, 64), ("width", source.arguments, 8)):
        table = source.read_table("embeddings.parquet")
        flat = pa.array(np.array(table["embedding"].to_pylist(), np.float32)[:, :width].ravel())
        cut = pa.table({"item_id": table["item_id"], "embedding": pa.FixedSizeListArray.from_arrays(flat, width)})
        with artifacts.create(
            f"{other}-{name}", "item_embeddings/v1", stage="embed", arguments=arguments, inputs=inputs
        ) as draft:
            draft.write_table("embeddings.parquet", cut)
            draft.metadata["width"] = width
    out = str(tmp_path / "ids")
    with pytest.raises(
        ValueError, match=r"embedded by another, the published bundle by hashing\. Embed with that enco"
    ):
        extend(catalog, f"{other}-id", version, out)
    with pytest.raises(ValueError, match=r"have 8 dimensions, the published quantizer takes 64\. Embed with that enco"):
        extend(catalog, f"{other}-width", version, out)
    with pytest.raises(ValueError, match=r"has the codes \[4, 4\] in its semantic levels, these .* \[4, 4, 4\]: give"):
        quantize(vectors, out, **(SAME | {"levels": 3}), previous=version)
    changed, _ = embedded(tmp_path / "changed", [dict(rows[0], text="Another"), *rows[1:]])
    with pytest.raises(ValueError, match="the embeddings were made from another catalog than the one given"):
        extend(changed, vectors, version, out)
    twins = [dict(rows[0], item_id=f"n{i:02d}") for i in range(17)]
    with pytest.raises(ValueError, match=r"items have or had the codes .* tells only 16 apart: .* watch_force=full"):
        extend(*embedded(tmp_path / "twins", [*rows, *twins]), version, out)
    assert not Path(out).exists()

    extend(catalog, vectors, version, out)
    where = out, catalog, vectors, str(tmp_path / "rows")
    with pytest.raises(ValueError, match=r"made from the base model tiny, .* say Qwen/Qwen3-0.6B: give those of the"):
        expand(*where, previous=version)
    with pytest.raises(ValueError, match=r"the base model tiny, .* say tiny at main: give"):
        expand(*where, base_model="tiny", base_revision="main", previous=version)
    with pytest.raises(ValueError, match=r"the Semantic IDs go on from v-\w+, expand from none: give both the same"):
        expand(*where, base_model="tiny")
    made = shop["semantic_ids"], shop["catalog"], shop["item_embeddings"], str(tmp_path / "rows")
    with pytest.raises(ValueError, match=r"the Semantic IDs go on from no version, expand from v-\w+: give both"):
        expand(*made, base_model="tiny", previous=version)
    assert not (tmp_path / "rows").exists()


def test_a_version_of_a_newer_format_is_refused(version, rows, tmp_path):
    newer = tmp_path / Path(version).name
    shutil.copytree(version, newer)
    manifest = json.loads((newer / "artifact.json").read_text())
    (newer / "artifact.json").write_text(json.dumps(manifest | {"kind": "bundle/v2"}))
    where = embedded(tmp_path, rows)
    for go_on in (
        lambda: extend(*where, str(newer), str(tmp_path / "ids")),
        lambda: quantize(where[1], str(tmp_path / "ids"), **SAME, previous=str(newer)),
    ):
        with pytest.raises(artifacts.ArtifactError, match="bundle/v2, a newer format than the bundle/v1"):
            go_on()
