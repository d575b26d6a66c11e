"""Retraining with the real stages: a shop whose catalog stays, grows and moves away, over six runs on one machine."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
KINDS = ("Soap", "Comb", "Towel", "Brush")
SMALL = ("quantize_levels=2", "quantize_codebook_size=4", "quantize_dedup_size=32")


class Shop:
    """The shop's files, its runs and what it has published."""

    def __init__(self, folder):
        self.folder, self.root, self.bundles = folder, folder / "run", folder / "bundles"

    def write(self, items, users=30):
        """Write the catalog and histories: each user walks the ring of items from a start of her own."""
        rows = [{"item_id": i, "title": title, "categories": kind} for i, title, kind in items]
        self.ids = [row["item_id"] for row in rows]
        walks = [[self.ids[(5 * user + step) % len(rows)] for step in range(6)] for user in range(users)]
        for name, lines in (
            ("items", rows),
            ("users", [{"user_id": f"u{n}", "items": walk} for n, walk in enumerate(walks)]),
        ):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")

    def run(self, *assignments):
        given = (
            f"catalog={self.folder / 'items.jsonl'}",
            f"interactions={self.folder / 'users.jsonl'}",
            f"bundles={self.bundles}",
            *SMALL,
            *assignments,
        )
        settings = [part for assignment in given for part in ("--set", assignment)]
        command = [sys.executable, "-m", "pipelines", "run", "--preset", "smoke-retrain", "--root", str(self.root)]
        return subprocess.run(command + settings, cwd=CHECKOUT, capture_output=True, text=True, timeout=1500)

    def latest(self):
        return json.loads((self.bundles / "latest.json").read_text())["version"]

    def part(self, version, *names):
        return self.bundles.joinpath("versions", version, *names)

    def sids(self, version):
        rows = pq.read_table(self.part(version, "semantic_ids", "semantic_ids.parquet")).to_pylist()
        return {row["item_id"]: row["codes"] for row in rows}


def stages(output):
    """Return {stage: 'reused' or what it did}, by the console's lines that are no notes."""
    lines = re.findall(r"^ {2}[ \d:]{7} {2}(\w+) +(\S.*)$", output, re.MULTILINE)
    return {stage: text for stage, text in lines if not text.startswith(("watch: ", "publish: ", "epoch "))}


def page(output):
    """The page that the output names, and the tables of its report."""
    (file,) = re.findall(r"^Report: (.*)$", output, re.MULTILINE)
    rows = pq.read_table((CHECKOUT / file).with_name("metrics.parquet")).to_pylist()
    return (CHECKOUT / file).read_text(encoding="utf-8"), rows


def done(process, code=0):
    assert process.returncode == code, process.stdout + process.stderr
    return process.stdout


def test_nothing_an_increment_a_refusal_and_a_full_training(tmp_path):
    shop = Shop(tmp_path)
    items = [(f"i{n:02d}", f"{KINDS[n % 4]} number {n}", KINDS[n % 4]) for n in range(24)]
    shop.write(items)
    first = done(shop.run())
    assert "watch: full. Nothing is published yet." in first
    trained = {"baselines", "expand", "ground", "finetune", "evaluate", "publish", "diagnose", "report"}
    assert stages(first).keys() == {"prepare", "embed", "watch", "quantize"} | trained
    html, rows = page(first)
    assert "<html" in html
    assert "Singular values" in html  # the geometry of what was trained
    assert {row["variant"] for row in rows} == {"full training"}
    one = shop.latest()
    assert shop.sids(one).keys() == set(shop.ids)

    nothing = done(shop.run())
    assert "watch: none." in nothing
    assert "Report: " not in nothing
    assert stages(nothing).keys() == {"prepare", "embed", "watch"}
    assert stages(nothing)["prepare"] == stages(nothing)["embed"] == "reused"
    assert shop.latest() == one
    assert len(list((shop.bundles / "versions").iterdir())) == 1

    new = [("n1", "Soap number 4, large", "Soap"), ("n2", "Comb number 5, small", "Comb")]
    shop.write([*new, *items[1:]])  # and i00 is gone
    third = done(shop.run())
    assert "watch: incremental. 2 items are new, 0 have another text, 1 are gone." in third
    assert stages(third).keys() == {"prepare", "embed", "watch", "extend"} | trained
    assert {row["variant"] for row in page(third)[1]} == {"increment"}
    two = shop.latest()
    assert two != one
    before, after = shop.sids(one), shop.sids(two)
    assert {item: after[item] for item in after if item in before} == {i: before[i] for i in before if i != "i00"}
    assert after.keys() == set(shop.ids)
    assert not {tuple(after[item]) for item in ("n1", "n2")} & set(map(tuple, before.values()))
    base = json.loads(shop.part(two, "model", "base_model.json").read_text())
    assert (base["previous"], base["first_name"]) == (one, "tiny")

    histories = pa.table({"user_id": ["u"], "item_ids": pa.array([["n1", "i04"]], pa.list_(pa.string()))})
    pq.write_table(histories, tmp_path / "h.parquet")
    command = ["recommend", "--bundles", shop.bundles, "--histories", tmp_path / "h.parquet", "--out", tmp_path / "r"]
    command = [sys.executable, "-m", "sidgraft.cli", *map(str, command), "--items", "25", "--beams", "25"]
    subprocess.run([*command, "--precision", "float32"], check=True, capture_output=True, timeout=300)
    (row,) = pq.read_table(tmp_path / "r" / "recommendations.parquet").to_pylist()
    assert sorted(row["item_ids"]) == sorted(shop.ids), "every item of the catalog, the new ones too, and no other"

    moved = [(f"m{n:02d}", f"Engine oil {n * 7} W", "Garage") for n in range(12)]
    shop.write([*items[8:], *moved])
    refused = done(shop.run("publish_popularity_floor=1000000"), code=3)
    assert "watch: full. The changed share is" in refused
    assert re.search(r"publish: v-\w+ is refused: ndcg@10", refused)
    assert shop.latest() == two

    left_alone = done(shop.run())
    assert "watch: none. A model of this catalog was refused at " in left_alone
    assert stages(left_alone).keys() == {"prepare", "embed", "watch"}
    assert shop.latest() == two

    fifth = done(shop.run("watch_force=full"))
    assert {text for stage, text in stages(fifth).items() if stage not in ("watch", "publish")} == {"reused"}
    three = shop.latest()
    assert not (shop.bundles / "refused.json").exists()
    assert three not in (one, two)
    assert shop.sids(three).keys() == set(shop.ids)
    assert json.loads(shop.part(three, "semantic_ids", "continuity.json").read_text())["version"] == two
    decisions = [json.loads(file.read_text()) for file in shop.root.glob("artifacts/*/watch/out/decision.json")]
    assert sorted(d["decision"] for d in decisions) == ["full", "full", "full", "incremental", "none", "none"]
