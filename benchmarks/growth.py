"""Time and memory as the catalog grows. Run: python benchmarks/growth.py [--quick] [--json] [--largest N].

prepare, embed (hashing encoder), quantize, the trie and a search with a small model, at 10 thousand items and tenfold
up to 1 million (prepare, the assignment to fitted codes and the trie: 10 million), each in a process of its own, whose
peak of memory is counted anew once its inputs are made. The ratio of a stage is the inverse of its exponent between the
two largest sizes: 1 is linear growth, less is worse. `all.py` draws what it records as growth.svg.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import threads

LARGEST = {
    "prepare": 10_000_000, "embed": 1_000_000, "quantize": 1_000_000, "assign": 10_000_000, "trie": 10_000_000,
    "decode": 1_000_000,
}  # fmt: skip
LINEAR = 0.9  # goal: an exponent of at most 1.11, which leaves room for sorting and caches
LEAST = {"seconds": 1e-3, "megabytes": 1.0}  # what is less is noise
WIDTH = 384


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1, 3 and 10 thousand items")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--largest", type=int, default=10_000_000, help="go no further than so many items")
    parser.add_argument("--part", nargs=3, metavar=("STAGE", "ITEMS", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        stage, items, folder = args.part
        print(json.dumps(measure(PARTS[stage], int(items), Path(folder))))
        return
    sizes = [1_000, 3_000, 10_000] if args.quick else [10_000, 100_000, 1_000_000, 10_000_000]
    rows = []
    for stage, largest in LARGEST.items():
        for items in sizes:
            if items <= min(largest, args.largest):
                with tempfile.TemporaryDirectory() as folder:
                    command = [sys.executable, __file__, "--part", stage, str(items), folder]
                    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                rows.append({"stage": stage, "items": items} | json.loads(out.splitlines()[-1]))
                print("  {stage:<9} {items:>10,} items  {seconds:9.2f} s  {megabytes:8.0f} MB".format(**rows[-1]))
    exponents = {
        stage: {what: exponent([r for r in rows if r["stage"] == stage], what) for what in ("seconds", "megabytes")}
        for stage in LARGEST
    }
    for stage, found in exponents.items():
        print(f"  {stage}: time grows as N^{found['seconds']:.2f}, memory as N^{found['megabytes']:.2f}")
    if args.json:
        ratios = {stage: [round(1 / max(e["seconds"], 0.5), 3), LINEAR] for stage, e in exponents.items()}
        worst = min(ratio for ratio, _ in ratios.values())
        print(
            json.dumps(
                {
                    "name": "growth",
                    "ratio": worst,
                    "goal": LINEAR,
                    "ratios": {f"linear growth of {stage}": value for stage, value in ratios.items()},
                    "equal": {
                        f"memory of {stage} grows as N^": round(e["megabytes"], 3) for stage, e in exponents.items()
                    },
                    "roof": {"largest trie and table, bytes an item": bytes_an_item(rows)},
                    "seconds": {f"{r['stage']}, {r['items']:,} items": r["seconds"] for r in rows},
                    "sizes": [{k: r[k] for k in ("stage", "items", "seconds", "megabytes")} for r in rows],
                    "about": "inverse of the exponent of time between the two largest sizes",
                    "quick": args.quick,
                    "threads": threads(),
                }
            )
        )


def exponent(rows: list[dict[str, Any]], what: str) -> float:
    """p of N^p between the two largest sizes; 0 where less than a megabyte or a millisecond was used."""
    small, large = rows[-2:]
    if min(small[what], large[what]) <= LEAST[what]:
        return 0.0
    return math.log(large[what] / small[what]) / math.log(large["items"] / small["items"])


def bytes_an_item(rows: list[dict[str, Any]]) -> float:
    largest = [row for row in rows if row["stage"] == "trie"][-1]
    return round(largest["bytes"] / largest["items"], 1)


def measure(part: Callable[[int, Path], tuple[Callable[[], Any], dict[str, Any]]], items: int, folder: Path) -> Any:
    """Seconds of a part and the memory that it adds to what its inputs and imports hold, with its own facts."""
    import pyarrow as pa

    run, facts = part(items, folder)
    gc.collect()
    pa.default_memory_pool().release_unused()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is held now (Linux)
    before = peak_kilobytes()
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    return {"seconds": round(seconds, 4), "megabytes": round((peak_kilobytes() - before) / 1024, 1)} | facts


def peak_kilobytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def prepare_part(items: int, folder: Path) -> Any:
    """A catalog with titles, brands and categories, and half as many users of eight interactions each."""
    make_tables(items, folder)

    def run() -> None:
        from sidgraft.stages.prepare import prepare

        prepare(*(str(folder / name) for name in ("catalog.parquet", "log.parquet", "catalog", "interactions")))

    return run, {}


def embed_part(items: int, folder: Path) -> Any:
    from sidgraft.stages.embed import embed

    catalog(items, folder / "catalog")
    return lambda: embed(str(folder / "catalog"), str(folder / "out"), encoder="hashing"), {}


def quantize_part(items: int, folder: Path) -> Any:
    """fit=sampled with 64 codes at every size, so that the fit's cost is bounded and the rest grows."""
    from sidgraft.stages.quantize import quantize

    embeddings(items, folder / "embeddings")
    settings = {"codebook_size": 64, "fit": "sampled", "dedup_size": items}
    return lambda: quantize(str(folder / "embeddings"), str(folder / "out"), **settings), {}


def assign_part(items: int, folder: Path) -> Any:
    """Codes of vectors that come a batch at a time, by a fitted quantizer."""
    from synthetic import clustered

    from sidgraft import residual

    batch_Bd = clustered(min(items, 50_000), WIDTH)
    codebooks, _, _ = residual.fit_residual(batch_Bd[:10_000], [64] * 3, fit="sampled")
    return lambda: [residual.encode(batch_Bd, codebooks) for _ in range(items // len(batch_Bd))], {}


def trie_part(items: int, folder: Path) -> Any:
    from sidgraft.trie import build_trie

    codes_NL = unique_codes(items)
    built = build_trie(codes_NL)
    arrays = [*built.first_child, *built.codes, built.item_N]
    size = sum(array.numel() * array.element_size() for array in arrays) + 4 * codes_NL.size  # codes are int32 on disk
    del built, arrays
    return lambda: build_trie(codes_NL), {"bytes": size}


def decode_part(items: int, folder: Path) -> Any:
    """Eight histories, 50 beams, a model of two layers: what the catalog's size adds."""
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
    decode(model, trie, vocabulary, prompts, beams=50)
    return lambda: [decode(model, trie, vocabulary, prompts, beams=50) for _ in range(5)], {}


PARTS: dict[str, Any] = {
    "prepare": prepare_part, "embed": embed_part, "quantize": quantize_part, "assign": assign_part,
    "trie": trie_part, "decode": decode_part,
}  # fmt: skip


def unique_codes(items: int) -> np.ndarray:
    """Distinct codes [N, 4] of up to 8192 a level, the last telling apart what shares the others."""
    size = 8192 if items >= 1_000_000 else 256
    rng = np.random.default_rng(0)
    codes_NL = np.minimum(rng.gamma(2.0, size / 6, (items, 3)).astype(np.int64), size - 1)
    from sidgraft.quantizers import deduplicate

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
    users = np.repeat(np.arange(max(items // 2, 10)), 8)
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
    import pyarrow as pa
    from synthetic import clustered

    from sidgraft import artifacts

    ids = pa.array([f"item-{n:08d}" for n in range(items)])
    values = pa.array(clustered(items, WIDTH).astype(np.float16).ravel())
    table = pa.table({"item_id": ids, "embedding": pa.FixedSizeListArray.from_arrays(values, WIDTH)})
    with artifacts.create(path, "item_embeddings/v1", stage="embed", arguments={}) as draft:
        draft.write_table("embeddings.parquet", table)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Time and peak memory of each stage against items, both logarithmic, and the exponents in the legends."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, what in zip(axes, ("seconds", "megabytes"), strict=True):
        for stage in dict.fromkeys(row["stage"] for row in rows):
            mine = [row for row in rows if row["stage"] == stage]
            values = [max(row[what], LEAST[what]) for row in mine]
            label = f"{stage}: N^{exponent(mine, what):.2f}"
            axis.plot([row["items"] for row in mine], values, marker="o", label=label)
        axis.set(xscale="log", yscale="log", xlabel="items", ylabel=what)
        axis.legend(fontsize=7, title="between the two largest sizes", title_fontsize=7)
    figure.savefig(file)
    plt.close(figure)


if __name__ == "__main__":
    main()
