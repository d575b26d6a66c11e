"""Fine-tuning against a sample for every prefix, and against padded rows. Run: python benchmarks/finetune.py [--quick].

SmolLM2-135M, float32 weights under bfloat16 autocast, real histories. Peers, both with the model's own loss: one sample
a prefix of each history, padded (how MiniOneRec and LC-Rec train), and one sequence a user, padded. What counts is
supervised items a second; a prefix sample supervises one item, a user's sequence all of its items.
"""

from __future__ import annotations

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


def main() -> None:
    args = options(__doc__)
    layers, users, batches, rounds = (4, 16, 2, 2) if args.quick else (30, 32, 4, 3)
    data = real.inputs()
    ours, tokenizer, vocabulary = real.model(data["token_rows"], torch.float32, layers)
    theirs, _, _ = real.model(data["token_rows"], torch.float32, layers)
    supervise(ours)
    items = data["semantic_ids"].read_table("semantic_ids.parquet")
    tokens_NS = vocabulary.item_tokens(codes_array(items))
    prompts = NextItem(tokenizer, vocabulary, 1024)
    histories = read_sequences(data["interactions"], items["item_id"].to_pylist()).training()
    order = np.random.default_rng(0).permutation(len(histories))[:users]
    whole = [prompts.sample(tokens_NS[histories[u]]) for u in order]
    # A prefix sample supervises the last item alone: the targets before the assistant's turn are taken out.
    prefixes = [
        last_item(prompts.sample(tokens_NS[histories[u][: n + 1]]), prompts)
        for u in order
        for n in range(1, len(histories[u]))
    ]
    prefixes = [prefixes[i] for i in np.random.default_rng(1).permutation(len(prefixes))[: batches * BATCH]]
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
    seconds = medians(
        {
            "sidgraft": lambda: train(ours, optimizers[0], packed_loss, whole),
            "a sequence a user, padded": lambda: train(theirs, optimizers[1], padded_loss, whole),
            "a sample a prefix, padded": lambda: train(theirs, optimizers[1], padded_loss, prefixes),
        },
        rounds,
    )
    per_item = {
        "sidgraft": seconds["sidgraft"] / supervised,
        "a sequence a user, padded": seconds["a sequence a user, padded"] / supervised,
        "a sample a prefix, padded": seconds["a sample a prefix, padded"] / len(prefixes),
    }
    weights = sum(p.numel() for p in ours.model.layers.parameters())
    flops = 6 * weights * sum(map(len, whole)) + 6 * ours.get_output_embeddings().weight.numel() * sum(
        int(s.target_S.sum()) for s in whole
    )
    mine = per_item["sidgraft"]
    report(
        args,
        "finetune",
        {
            "a sample a prefix, padded": (per_item["a sample a prefix, padded"] / mine, 4),
            "a sequence a user, padded": (per_item["a sequence a user, padded"] / mine, 1.3),
        },
        equal={"loss difference in float32": difference},
        roof={"share of bf16 matrix products": flops / seconds["sidgraft"] / flops_roof(torch.bfloat16)},
        seconds=per_item,
        about=f"SmolLM2-135M, {layers} layers, {users} users, {supervised} items, seconds per supervised item",
    )


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
