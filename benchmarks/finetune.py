"""Fine-tuning against a sample for every prefix, and against padded rows. Run: python benchmarks/finetune.py [--quick].

SmolLM2-135M, float32 weights under bfloat16 autocast, real histories. Peers, both with the model's own loss: one sample
a prefix of each history, padded (how MiniOneRec and LC-Rec train), and one sequence a user, padded. What counts is
supervised items a second; a prefix sample supervises one item, a user's sequence all of its items. Ours is the stage's
step: `pack_step`, and `training_step` of the Trainer that the stage runs; around it, and for the peers, stands one loop
of clipping and AdamW, without what a Trainer adds between steps. The process keeps what it frees, as the stage's does
(`memory.py`): so the peers have that, too. Nearly all histories of The Complete Journey are as long as is kept of any;
with --data those of another log count, too. The first run makes its inputs in build/benchmarks/real.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import real
import torch
from batches import padded
from measure import flops_roof, medians, options, report
from steps import batch, stage_step, trainer, update

from sidgraft.prompts import NextItem, Sample
from sidgraft.sequences import read_sequences
from sidgraft.sids import codes_array
from sidgraft.training import GraftTrainer, supervise

BATCH = 16
PREFIX, PADDED = "a sample a prefix, padded", "a sequence a user, padded"


def main() -> None:
    args = options(__doc__, data=True)
    layers, users, prefixes, rounds = (4, 16, 16, 2) if args.quick else (30, 32, 48, 2)
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
        shares[f"the padded peer's share of them{name}"] = found["their share"]
        shares[f"its products by ours{name}"] = found["products"]
        shares[f"share of padding in its rows{name}"] = found["padding"]
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

    graft = trainer(GraftTrainer, ours, bf16=True)
    first = batch(graft, whole[:BATCH])
    packed = sum(graft.compute_loss(ours, part).item() for part in first["parts"])  # float32: not prepared yet
    difference = abs(packed - padded_loss(theirs, whole[:BATCH]).item())
    step_of_ours = stage_step(graft)

    def our_step(group: list[Sample]) -> None:
        step_of_ours(batch(graft, group))

    def their_step(group: list[Sample]) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = padded_loss(theirs, group)
        loss.backward()

    def train(model: Any, optimizer: Any, step: Any, samples: list[Sample]) -> None:
        for start in range(0, len(samples), BATCH):
            step(samples[start : start + BATCH])
            update(model, optimizer)

    runs = {
        "sidgraft": lambda: train(ours, optimizers[0], our_step, whole),
        PADDED: lambda: train(theirs, optimizers[1], their_step, whole),
    }
    counts = {"sidgraft": supervised, PADDED: supervised}
    if prefixes:
        # A prefix sample supervises the last item alone: the targets before the assistant's turn are taken out.
        each = [last_item(prompts.sample(tokens_NS[histories[u][: n + 1]]), prompts)
                for u in order for n in range(1, len(histories[u]))]  # fmt: skip
        each = [each[i] for i in np.random.default_rng(1).permutation(len(each))[:prefixes]]
        runs[PREFIX], counts[PREFIX] = (lambda: train(theirs, optimizers[1], their_step, each)), len(each)
    measured = medians(runs, rounds)

    layer_weights = sum(p.numel() for p in ours.model.layers.parameters())
    head_weights = ours.get_output_embeddings().weight.numel()
    groups = [whole[i : i + BATCH] for i in range(0, len(whole), BATCH)]
    mine = [part for group in groups for part in batch(graft, group)["parts"]]
    # a packed row holds once what its sequences begin with alike
    flops = 6 * layer_weights * sum(row["input_ids"].numel() for row in mine)
    flops += 6 * head_weights * sum(len(row["targets"]) for row in mine)
    tokens = sum(padded(group)["input_ids"].numel() for group in groups)
    their_flops = 6 * (layer_weights + head_weights) * tokens
    roof = flops_roof(torch.bfloat16)
    return {
        "seconds": {who: value / counts[who] for who, value in measured.items()},
        "difference": difference,
        "share": flops / measured["sidgraft"] / roof,
        "their share": their_flops / measured[PADDED] / roof,
        "products": their_flops / flops,
        "padding": 1 - sum(map(len, whole)) / tokens,
        "supervised": supervised,
    }


def last_item(sample: Sample, prompts: NextItem) -> Sample:
    """The same sequence with the assistant's turn as the only target."""
    answer = prompts.item_tokens + len(prompts.after)
    return Sample(sample.ids_S, sample.target_S & (np.arange(len(sample)) >= len(sample) - answer))


def padded_loss(model: Any, group: list[Sample]) -> torch.Tensor:
    """The model's own loss on a padded batch."""
    return model(**padded(group), use_cache=False).loss


if __name__ == "__main__":
    main()
