"""Fine-tuning against a sample for every prefix, and against padded rows. Run: python benchmarks/finetune.py [--quick].

SmolLM2-135M, float32 weights under bfloat16 autocast, real histories. Peers, both with the model's own loss: one sample
a prefix of each history, padded (how MiniOneRec and LC-Rec train), and one sequence a user, padded. What counts is
supervised items a second; a prefix sample supervises one item, a user's sequence all of its items. Nearly all
histories of The Complete Journey are as long as is kept of any; with --data those of another log count, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import real
import torch
from batches import padded
from measure import flops_roof, medians, options, report

from sidgraft.prompts import NextItem, Sample
from sidgraft.sequences import read_sequences
from sidgraft.sids import codes_array
from sidgraft.training import pack, supervise

BATCH = 16
PREFIX, PADDED = "a sample a prefix, padded", "a sequence a user, padded"


def main() -> None:
    args = options(__doc__, data=True)
    layers, users, prefixes, rounds = (4, 16, 32, 2) if args.quick else (30, 32, 48, 2)
    ratios: dict[str, tuple[float, float]] = {}
    equal: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    shares, abouts = {}, []
    for folder in ("", args.data) if args.data else ("",):
        name = f", {Path(folder).name}" if folder else ""
        found = compare(real.inputs(folder), layers, users, 0 if folder else prefixes, rounds)
        seconds |= {f"{who}{name}": value for who, value in found["seconds"].items()}
        for who, goal in ((PREFIX, 4), (PADDED, 1.3)):
            if who in found["seconds"]:
                ratios[f"{who}{name}"] = (found["seconds"][who] / found["seconds"]["sidgraft"], goal)
        equal[f"same loss in float32{name}"] = found["difference"] < 1e-4
        equal[f"loss difference in float32{name}"] = found["difference"]
        shares[f"share of bf16 matrix products{name}"] = found["share"]
        shares[f"share of padding in the peer's rows{name}"] = found["padding"]
        shares[f"limit of the ratio, from the products{name}"] = found["limit"]
        abouts.append(f"{found['supervised']} items{name}")
    report(
        args,
        "finetune",
        ratios,
        equal=equal,
        roof=shares,
        seconds=seconds,
        about=f"SmolLM2-135M, {layers} layers, {users} users, {'; '.join(abouts)}, seconds per supervised item",
    )


def compare(data: dict[str, Any], layers: int, users: int, prefixes: int, rounds: int) -> dict[str, Any]:
    """Seconds per supervised item of ours and of the peers (that by prefixes, where there are to be any)."""
    ours, tokenizer, vocabulary = real.model(data["token_rows"], torch.float32, layers)
    theirs, _, _ = real.model(data["token_rows"], torch.float32, layers)
    supervise(ours)
    items = data["semantic_ids"].read_table("semantic_ids.parquet")
    tokens_NS = vocabulary.item_tokens(codes_array(items))
    prompts = NextItem(tokenizer, vocabulary, 1024)
    histories = read_sequences(data["interactions"], items["item_id"].to_pylist()).training()
    order = np.random.default_rng(0).permutation([u for u, h in enumerate(histories) if len(h) > 1])[:users]
    whole = [prompts.sample(tokens_NS[histories[u]]) for u in order]
    supervised = sum(len(histories[u]) for u in order)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-5, fused=True) for m in (ours, theirs)]

    def train(model: Any, optimizer: Any, loss_of: Any, samples: list[Sample]) -> None:
        for start in range(0, len(samples), BATCH):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, samples[start : start + BATCH])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    difference = abs(packed_loss(ours, whole[:BATCH]).item() - padded_loss(theirs, whole[:BATCH]).item())
    runs = {
        "sidgraft": lambda: train(ours, optimizers[0], packed_loss, whole),
        PADDED: lambda: train(theirs, optimizers[1], padded_loss, whole),
    }
    counts = {"sidgraft": supervised, PADDED: supervised}
    if prefixes:
        # A prefix sample supervises the last item alone: the targets before the assistant's turn are taken out.
        each = [last_item(prompts.sample(tokens_NS[histories[u][: n + 1]]), prompts)
                for u in order for n in range(1, len(histories[u]))]  # fmt: skip
        each = [each[i] for i in np.random.default_rng(1).permutation(len(each))[:prefixes]]
        runs[PREFIX], counts[PREFIX] = (lambda: train(theirs, optimizers[1], padded_loss, each)), len(each)
    measured = medians(runs, rounds)

    layer_weights = sum(p.numel() for p in ours.model.layers.parameters())
    head_weights = ours.get_output_embeddings().weight.numel()
    groups = [whole[i : i + BATCH] for i in range(0, len(whole), BATCH)]
    mine = [pack(group) for group in groups]
    flops = 6 * layer_weights * sum(row["input_ids"].numel() for row in mine)
    flops += 6 * head_weights * sum(len(row["targets"]) for row in mine)
    tokens = sum(padded(group)["input_ids"].numel() for group in groups)
    return {
        "seconds": {who: value / counts[who] for who, value in measured.items()},
        "difference": difference,
        "share": flops / measured["sidgraft"] / flops_roof(torch.bfloat16),
        "padding": 1 - sum(map(len, whole)) / tokens,
        "limit": 6 * (layer_weights + head_weights) * tokens / flops,
        "supervised": supervised,
    }


def last_item(sample: Sample, prompts: NextItem) -> Sample:
    """The same sequence with the assistant's turn as the only target."""
    answer = prompts.item_tokens + len(prompts.after)
    return Sample(sample.ids_S, sample.target_S & (np.arange(len(sample)) >= len(sample) - answer))


def packed_loss(model: Any, group: list[Sample]) -> torch.Tensor:
    """Our loss: packed rows, logits at supervised positions alone."""
    batch = pack(group)
    model.get_output_embeddings().targets = batch.pop("targets")
    return model(**batch_arguments(batch), use_cache=False).logits


def batch_arguments(batch: dict[str, Any]) -> dict[str, Any]:
    """The supervised positions under the name that the model takes them by."""
    return {("logits_to_keep" if name == "supervised" else name): value for name, value in batch.items()}


def padded_loss(model: Any, group: list[Sample]) -> torch.Tensor:
    """The model's own loss on a padded batch."""
    return model(**padded(group), use_cache=False).loss


if __name__ == "__main__":
    main()
