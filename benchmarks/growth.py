"""Time and memory as the catalog grows. Run: python benchmarks/growth.py [--quick] [--json] [--stages A,B].

prepare, embed (hashing encoder), quantize, the assignment to fitted codes, the trie and a search with a small model, at
10 thousand items and tenfold up to 10 million (embed and quantize: 1 million), each in a process of its own, whose peak
of memory is counted anew once its inputs are made. Growth is the exponent p of N^p that fits best, in logarithms, the
sizes whose figures are above noise; the ratio of a stage is its inverse: 1 is linear, less is worse. Beside it stands
the exponent between the two largest sizes. The trie and the table of 10 million Semantic IDs of 8192 codes a level are
held to 2 GB. "Bytes of memory that a stage adds an item" are by how much its peak is higher, between the two largest
sizes. `quantize` has fit=sampled, the only fit that streams: the others hold all vectors as float32, 15 GB of 10
million of width 384. `assign` is what is left of quantize once codes are fitted, at 10 million items. `all.py` draws
what it records as growth.svg, and with --stages keeps what is recorded of the others.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from checks import CHECKS, checked
from measure import threads

LARGEST = {
    "prepare": 10_000_000, "embed": 1_000_000, "quantize": 1_000_000, "assign": 10_000_000, "trie": 10_000_000,
    "decode": 10_000_000,
}  # fmt: skip
LINEAR = 0.9  # goal: an exponent of at most 1.11, which leaves room for sorting and caches
GOALS = {"decode": 3.33}  # of others than LINEAR: an exponent of at most 0.3, as a search reads little of its catalog
NOISE = {"seconds": 0.05, "megabytes": 10.0}  # sizes with figures below are left out of the fit
SLOWEST = 0.1  # exponents below count as this: that is as good as no growth
FITS = 2_000_000_000  # bytes for the trie and the table of ITEMS
ITEMS = 10_000_000
CODES = 8192  # of a level
RUNS = {"trie": 5}  # of parts so short that one run tells little: the shortest counts
WIDTH = 384
FILE_ITEMS = 500_000  # most vectors that assign has in its file


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1, 3 and 10 thousand items")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--largest", type=int, default=10_000_000, help="go no further than so many items")
    parser.add_argument("--stages", default=",".join(LARGEST), metavar="A,B", help=f"some of {', '.join(LARGEST)}")
    parser.add_argument("--part", nargs=3, metavar=("STAGE", "ITEMS", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        stage, items, folder = args.part
        print(json.dumps(measure(PARTS[stage], int(items), Path(folder), runs=RUNS.get(stage, 1))))
        return
    stages = args.stages.split(",")
    if unknown := set(stages) - set(LARGEST):
        parser.error(f"no stage is called {', '.join(sorted(unknown))}; they are {', '.join(LARGEST)}")
    sizes = [1_000, 3_000, 10_000] if args.quick else [10_000, 100_000, 1_000_000, 10_000_000]
    rows = []
    for stage in stages:
        for items in sizes:
            if items <= min(LARGEST[stage], args.largest):
                with tempfile.TemporaryDirectory() as folder:
                    command = [sys.executable, __file__, "--part", stage, str(items), folder]
                    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                rows.append({"stage": stage, "items": items} | json.loads(out.splitlines()[-1]))
                print(
                    "  {stage:<9} {items:>10,} items  {seconds:9.2f} s  {megabytes:8.0f} MB".format(**rows[-1]),
                    flush=True,
                )
    result = summary(rows) | {"quick": args.quick, "threads": threads()}
    for name, (ratio, goal) in result["ratios"].items():
        print(f"  {name}: {ratio:.2f} (goal {goal:g}{'' if ratio >= goal else ', not reached'})")
    print("  " + ", ".join(f"{name} {value:g}" for name, value in result["roof"].items()))
    if args.json:
        print(json.dumps(result))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of these rows, as `all.py` records it. Raises SystemExit where a part did not do its whole work."""
    lost = [f"{row['stage']} of {row['items']:,} items" for row in rows if not row["whole"]]
    if lost:
        raise SystemExit(f"growth: items are missing from what came out of {', '.join(lost)}.")
    ratios: dict[str, tuple[float, float]] = {}
    slopes: dict[str, float] = {}
    for stage in dict.fromkeys(row["stage"] for row in rows):
        mine = [row for row in rows if row["stage"] == stage]
        for what, name in (("seconds", "time"), ("megabytes", "memory")):
            ratio = round(1 / max(exponent(mine, what), SLOWEST), 3)
            ratios[f"linear growth of {stage}, {name}"] = (ratio, GOALS.get(stage, LINEAR))
            slopes[f"exponent of {stage}'s {name} between the two largest sizes"] = round(last_slope(mine, what), 3)
        slopes[f"bytes of memory that {stage} adds an item"] = round(bytes_an_item(mine), 1)
    if tries := [row for row in rows if row["stage"] == "trie"]:
        of = f"from {tries[-1]['items']:,}" if tries[-1]["items"] != ITEMS else "counted"
        needed = tries[-1]["bytes"] / tries[-1]["items"] * ITEMS
        name = f"2 GB, for the trie and table of {ITEMS:,} items of {CODES} codes a level ({of})"
        ratios[name] = (round(FITS / needed, 3), 1)
        slopes["bytes an item of trie and table"] = round(needed / ITEMS, 1)
    equal = {f"every item came through, {stage}": True for stage in dict.fromkeys(row["stage"] for row in rows)}
    assert checked(equal) == set(CHECKS["growth"])
    absent = [stage for stage in LARGEST if stage not in {row["stage"] for row in rows}]
    worst = min(ratios.values(), key=lambda found: found[0] / found[1])
    return {
        "name": "growth",
        "ratio": worst[0],
        "goal": worst[1],
        "ratios": {name: list(value) for name, value in ratios.items()},
        "equal": equal,
        "roof": slopes,
        "seconds": {f"{row['stage']}, {row['items']:,} items": row["seconds"] for row in rows},
        "sizes": rows,
        "about": "inverse of the exponent that fits sizes above {seconds:g} s and {megabytes:g} MB".format(**NOISE)
        + (f"; not measured: {', '.join(absent)}" if absent else ""),
    }


def joined(earlier: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """A result of all stages: those just measured, each row with its commit, and of the others what there was."""
    fresh = [row | {"commit": new["commit"]} for row in new["sizes"]]
    measured = {row["stage"] for row in fresh}
    kept = [row for row in (earlier or {}).get("sizes", []) if row["stage"] not in measured]
    rows = sorted([*kept, *fresh], key=lambda row: (list(LARGEST).index(row["stage"]), row["items"]))
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return new | summary(rows) | {"commit": commits}


def above_noise(rows: list[dict[str, Any]], what: str) -> list[tuple[int, float]]:
    """Items and figures that are no noise; before a single one stands the size below it, with the limit of noise."""
    kept = [(row["items"], row[what]) for row in rows if row[what] >= NOISE[what]]
    if len(kept) == 1 and len(rows) > 1:
        return [(max((row["items"] for row in rows if row[what] < NOISE[what]), default=1), NOISE[what]), *kept]
    return kept


def exponent(rows: list[dict[str, Any]], what: str) -> float:
    """p of the N^p that fits the sizes above noise best, by least squares in logarithms; 0 where none is above it."""
    return slope(above_noise(rows, what))


def slope(points: list[tuple[int, float]]) -> float:
    """p of the N^p through these points by least squares in logarithms; 0 of fewer than two."""
    if len(points) < 2:
        return 0.0
    items, figures = np.log(np.array(points)).T
    return float(np.polyfit(items, figures, 1)[0])


def last_slope(rows: list[dict[str, Any]], what: str) -> float:
    """p of N^p between the two largest sizes above noise; 0 where none is above it."""
    return slope(above_noise(rows, what)[-2:])


def bytes_an_item(rows: list[dict[str, Any]]) -> float:
    """By how much the peak of memory grows with each item, between the two largest sizes; of one size all of it."""
    before, last = rows[-2] if len(rows) > 1 else {"items": 0, "megabytes": 0}, rows[-1]
    return (last["megabytes"] - before["megabytes"]) * 2**20 / (last["items"] - before["items"])


def measure(part: Callable[[int, Path], Any], items: int, folder: Path, *, runs: int = 1) -> Any:
    """Seconds of a part's quickest run and the memory that its first adds to what inputs and imports hold.

    With its own facts. A part gives what is measured, a check that its result has all items, and facts.
    """
    import pyarrow as pa

    run, whole, facts = part(items, folder)
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)  # what the inputs have left in the allocator would hide what the part takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is held now (Linux)
    before = peak_kilobytes()
    result, seconds = timed(run)
    megabytes = round((peak_kilobytes() - before) / 1024, 1)
    seconds = min([seconds, *(timed(run)[1] for _ in range(runs - 1))])
    return {"seconds": round(seconds, 4), "megabytes": megabytes, "whole": bool(whole(result))} | facts


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """What a run gives, and its seconds."""
    started = time.perf_counter()
    result = run()
    return result, time.perf_counter() - started


def peak_kilobytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def prepare_part(items: int, folder: Path) -> Any:
    """A catalog with titles, brands and categories, and a third as many users of eight interactions each."""
    from sidgraft.stages.prepare import prepare

    make_tables(items, folder)

    def run() -> dict[str, Any]:
        return prepare(*(str(folder / name) for name in ("catalog.parquet", "log.parquet", "catalog", "interactions")))

    return run, lambda summary: summary["items"] == items, {}


def embed_part(items: int, folder: Path) -> Any:
    from sidgraft.stages.embed import embed

    catalog(items, folder / "catalog")
    run = lambda: embed(str(folder / "catalog"), str(folder / "out"), encoder="hashing")  # noqa: E731
    return run, lambda summary: summary["items"] == items, {}


def quantize_part(items: int, folder: Path) -> Any:
    """fit=sampled with 64 codes at every size, so that the fit's cost is bounded and the rest grows."""
    from sidgraft.stages.quantize import quantize

    embeddings(items, folder / "embeddings")
    settings = {"codebook_size": 64, "fit": "sampled", "dedup_size": items}
    run = lambda: quantize(str(folder / "embeddings"), str(folder / "out"), **settings)  # noqa: E731
    return run, lambda summary: summary["items"] == items, {}


def assign_part(items: int, folder: Path) -> Any:
    """Codes of vectors in a Parquet file by a fitted quantizer, a batch at a time, and what tells equal ones apart.

    It is the second half of quantize. Of more than FILE_ITEMS items the file of so many is read again and again (from
    the system's cache, where memory allows): 10 million of float32 would be 15 GB on disk. Its ids are not held.
    """
    from sidgraft import artifacts, residual
    from sidgraft.embeddings import in_item_order
    from sidgraft.quantizers import deduplicate
    from sidgraft.vectors import Batches, Vectors

    embeddings(min(items, FILE_ITEMS), folder / "embeddings")
    file = in_item_order(artifacts.load(folder / "embeddings", "item_embeddings/v1"))[2]
    sample_SD = file.take(np.arange(min(file.items, 16_384)))
    codebooks, codes_SL, _ = residual.fit_residual(sample_SD, [64] * 3, fit="sampled")

    def read() -> Batches:
        for first in range(0, items, file.items):
            for rows_B, vectors_BD in file.batches():
                yield rows_B + first, vectors_BD

    def run() -> tuple[np.ndarray, np.ndarray]:
        codes_NL, lengths_NL = residual.encode_batches(Vectors(items, file.width, read), codebooks)
        return deduplicate(codes_NL, items), lengths_NL

    def whole(found: tuple[np.ndarray, np.ndarray]) -> bool:
        """In every reading the sample has the codes that the fit gave it, and all items are told apart."""
        codes, lengths_NL = found
        readings = codes.reshape(-1, file.items, 4)[:, : len(sample_SD), :3]
        return bool((readings == codes_SL).all()) and len(codes) == len(lengths_NL) == items and distinct(codes)

    return run, whole, {}


def distinct(codes: np.ndarray) -> bool:
    """Whether no two rows of codes [N, L+1] are the same."""
    numbers_N = np.sort(np.ravel_multi_index(tuple(codes.T), tuple(codes.max(axis=0) + 1)))
    return bool((numbers_N[1:] != numbers_N[:-1]).all())


def trie_part(items: int, folder: Path) -> Any:
    from sidgraft.trie import build_trie

    codes_NL = unique_codes(items)
    size = trie_and_table_bytes(codes_NL)
    return lambda: build_trie(codes_NL), lambda trie: len(trie.item_N) == items, {"bytes": size}


def trie_and_table_bytes(codes_NL: np.ndarray) -> int:
    """Bytes of the table of codes [N, L+1], as the stages hold it, and of all arrays of its trie."""
    from sidgraft.trie import build_trie

    built = build_trie(codes_NL)
    arrays = [*built.first_child, *built.codes, built.item_N]
    return codes_NL.nbytes + sum(array.numel() * array.element_size() for array in arrays)


def decode_part(items: int, folder: Path) -> Any:
    """Eight histories, 50 beams, a model of two layers: what the catalog's size adds to a batch, as evaluate searches.

    Targets and the items that are left out are told by rows of the catalog: a trie's inverse for them is made once.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from sidgraft.attention import use_packed_attention
    from sidgraft.beam import decode
    from sidgraft.sids import SidVocabulary
    from sidgraft.trie import build_trie

    codes_NL = unique_codes(items)
    sizes = tuple(int(n) for n in codes_NL.max(axis=0) + 1)
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=100 + sum(sizes) + 2, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config).eval()
    use_packed_attention(model)
    vocabulary, trie = SidVocabulary(sizes, 100), build_trie(codes_NL)
    prompts = [np.append(np.arange(40) % 90, vocabulary.begin_id) for _ in range(8)]
    rows = np.arange(8 * 20).reshape(8, 20) * (items // 160)

    def search() -> Any:
        targets, excluded = rows[:, 0], list(rows[:, 1:])
        return decode(model, trie, vocabulary, prompts, beams=50, targets=targets, excluded=excluded)

    search()

    def distinct(found: list[Any]) -> bool:
        return all(len(set(row)) == 50 and min(row) >= 0 for row in found[-1].items_UG.tolist())

    return lambda: [search() for _ in range(5)], distinct, {}


PARTS: dict[str, Any] = {
    "prepare": prepare_part, "embed": embed_part, "quantize": quantize_part, "assign": assign_part,
    "trie": trie_part, "decode": decode_part,
}  # fmt: skip


def unique_codes(items: int) -> np.ndarray:
    """Distinct codes [N, 4], int64, of up to CODES a level, the last telling apart what shares the others."""
    from sidgraft.quantizers import deduplicate

    rng = np.random.default_rng(0)
    codes_NL = np.minimum(rng.gamma(2.0, CODES / 6, (items, 3)).astype(np.int64), CODES - 1)
    return deduplicate(codes_NL, items)


def make_tables(items: int, folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    ids = pa.array(np.char.add("item-", np.arange(items).astype("U9")))
    kind = rng.integers(0, 2000, items)
    names = pa.array([f"a kind of thing number {n} in colour {n % 7}" for n in range(2000)])
    rooms = pa.array([f"Department {n % 12} > Shelf {n % 40}" for n in range(2000)])
    table = {"item_id": ids, "title": names.take(kind), "brand": rooms.take(kind // 2), "categories": rooms.take(kind)}
    pq.write_table(pa.table(table), folder / "catalog.parquet")
    users = np.repeat(np.arange(max(items // 3, 10)), 8)
    bought = ids.take(np.minimum(rng.gamma(1.0, items / 5, len(users)).astype(np.int64), items - 1))
    log = {"user_id": pa.array(users), "item_id": bought, "timestamp": pa.array(np.arange(len(users)))}
    pq.write_table(pa.table(log), folder / "log.parquet")


def catalog(items: int, path: Path) -> None:
    import pyarrow as pa

    from sidgraft import artifacts

    ids = pa.array([f"item-{n:08d}" for n in range(items)])
    text = pa.array([f"thing {n % 5000} of kind {n % 77} in colour {n % 7}" for n in range(items)])
    nothing = {name: pa.nulls(items, pa.string()) for name in ("title", "brand", "description")}
    columns = {"item_id": ids, "text": text, **nothing, "category": pa.nulls(items, pa.list_(pa.string()))}
    columns["price"] = pa.nulls(items, pa.float64())
    order = ("item_id", "text", "title", "brand", "category", "price", "description")
    with artifacts.create(path, "catalog/v1", stage="prepare", arguments={}) as draft:
        draft.write_table("catalog.parquet", pa.table({name: columns[name] for name in order}))


def embeddings(items: int, path: Path) -> None:
    """As embed writes them."""
    import pyarrow as pa
    from synthetic import clustered

    from sidgraft import artifacts
    from sidgraft.embeddings import FILE
    from sidgraft.stages.embed import ROWS, _batch, _writer

    vectors_ND = clustered(items, WIDTH)
    ids = pa.array([f"item-{n:08d}" for n in range(items)])
    with (
        artifacts.create(path, "item_embeddings/v1", stage="embed", arguments={}) as draft,
        _writer(draft.path / FILE, WIDTH, vectors_ND.dtype) as writer,
    ):
        for first in range(0, items, ROWS):
            at = slice(first, first + ROWS)
            writer.write_batch(_batch(ids[at], vectors_ND[at], writer.schema))


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Time and peak memory of each stage against items, both logarithmic, and the exponents in the legends."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, what in zip(axes, ("seconds", "megabytes"), strict=True):
        for stage in dict.fromkeys(row["stage"] for row in rows):
            mine = [row for row in rows if row["stage"] == stage]
            values = [max(row[what], NOISE[what] / 10) for row in mine]
            label = f"{stage}: N^{exponent(mine, what):.2f}, last N^{last_slope(mine, what):.2f}"
            axis.plot([row["items"] for row in mine], values, marker="o", label=label)
        axis.set(xscale="log", yscale="log", xlabel="items", ylabel=what)
        axis.axhline(NOISE[what], color="grey", linewidth=0.5, linestyle="--")
        axis.legend(fontsize=7, title="fit above the dashed line; two largest sizes", title_fontsize=7)
    figure.savefig(file)
    plt.close(figure)


if __name__ == "__main__":
    main()
