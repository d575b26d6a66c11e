"""Grounding against PEFT's trainable_token_indices. Run: python benchmarks/ground.py [--quick] [--json].

SmolLM2-135M in bfloat16 on the GTI corpus of real products, batch 16. The peer trains the new rows as its users do:
padded batches, the model's own loss over all positions' logits. Ours is the stage's step: `pack_step`, and
`training_step` of the Trainer that the stage runs. Around both stands one loop of clipping and fused AdamW, without
what a Trainer adds between steps. The process keeps what it frees, as the stage's does (`memory.py`): so the peer has
that, too. The first run makes its inputs in build/benchmarks/real.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import real
import torch
from batches import padded
from measure import flops_roof, medians, options, report
from peft import TrainableTokensConfig, get_peft_model
from steps import batch, stage_step, trainer, update

from sidgraft import corpora
from sidgraft.models import load_rows
from sidgraft.prompts import Sample
from sidgraft.sids import codes_array
from sidgraft.training import GroundingModel, PartsTrainer

BATCH = 16


def main() -> None:
    args = options(__doc__)
    layers, batches, rounds = (4, 2, 2) if args.quick else (30, 6, 3)
    found = compare(real.inputs(), layers, batches, rounds)
    seconds, tokens = found["seconds"], found["tokens"]
    report(
        args,
        "ground",
        {"PEFT trainable_token_indices": (seconds["PEFT"] / seconds["sidgraft"], 2.5)},
        equal=found["equal"],
        roof={"share of bf16 matrix products": found["flops"] / seconds["sidgraft"] / flops_roof(torch.bfloat16)},
        seconds=seconds,
        about=f"SmolLM2-135M, {layers} layers, GTI corpus, {batches} batches of {BATCH}, {tokens} tokens, bf16",
    )


def compare(data: dict[str, Any], layers: int, batches: int, rounds: int) -> dict[str, Any]:
    """Seconds of both for so many batches, how their gradients differ, our products and the tokens of the batches."""
    ours, tokenizer, vocabulary = real.model(data["token_rows"], torch.bfloat16, layers)
    theirs, _, _ = real.model(data["token_rows"], torch.bfloat16, layers)
    items = data["catalog"].read_table("catalog.parquet")
    tokens_NS = vocabulary.item_tokens(codes_array(data["semantic_ids"].read_table("semantic_ids.parquet")))
    samples = list(corpora.corpus("gti", tokenizer, items, [], tokens_NS, max_length=1024))
    order = np.random.default_rng(0).permutation(len(samples))
    groups = [[samples[i] for i in order[b * BATCH : (b + 1) * BATCH]] for b in range(batches)]
    tokens = sum(len(s) for group in groups for s in group)

    grounding = GroundingModel(ours, vocabulary, load_rows(data["token_rows"]))
    new_ids = list(range(vocabulary.first_id, vocabulary.first_id + vocabulary.n_new))
    peer = get_peft_model(
        theirs, TrainableTokensConfig(token_indices=new_ids, target_modules=["embed_tokens"], task_type="CAUSAL_LM")
    )
    models = {"sidgraft": grounding, "PEFT": peer}
    optimizers = {
        who: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3, fused=True)
        for who, model in models.items()
    }
    steps = {"sidgraft": our_step(grounding), "PEFT": their_step(peer)}
    equal = same_gradient(grounding, peer, groups[0])

    def train(who: str) -> None:
        for group in groups:
            steps[who](group)
            update(models[who], optimizers[who])

    seconds = medians({who: lambda who=who: train(who) for who in models}, rounds)
    flops = sum(products(steps["sidgraft"], ours, group) for group in groups)
    return {"seconds": seconds, "equal": equal, "flops": flops, "tokens": tokens}


def our_step(grounding: GroundingModel) -> Callable[[list[Sample]], float]:
    """Forward and backward of a batch of samples, as the stage does them; gives the loss."""
    made = trainer(PartsTrainer, grounding)
    step = stage_step(made)
    return lambda group: step(batch(made, group))


def their_step(peer: Any) -> Callable[[list[Sample]], float]:
    def step(group: list[Sample]) -> float:
        loss = peer(**padded(group))["loss"]
        loss.backward()
        return loss.item()

    return step


def same_gradient(ours: GroundingModel, peer: Any, group: list[Sample]) -> dict[str, Any]:
    """Whether the two gradients of the new rows on one batch are one in float32, and how they differ in bfloat16."""
    found: dict[str, Any] = {}
    gradients: dict[str, list[torch.Tensor]] = {}
    wide = copy.deepcopy(ours)
    wide.rows.data = wide.rows.data.bfloat16().float()  # the peer holds its rows in the model's dtype
    for part in (wide._frozen[0], wide._frozen[2]):
        part.float()
    for name, mine, theirs in (("bfloat16", ours, peer), ("float32", wide, copy.deepcopy(peer).float())):
        losses, gradients[name] = [], []
        for model, step in ((mine, our_step(mine)), (theirs, their_step(theirs))):
            losses.append(step(group))
            (rows,) = [p for p in model.parameters() if p.requires_grad]
            gradients[name].append(rows.grad.double().flatten())
            model.zero_grad()
        found |= {
            f"gradient cosine in {name}": cosine(*gradients[name]),
            f"loss difference in {name}": abs(losses[0] - losses[1]),
        }
    for who, narrow, exact in zip(("ours", "the peer's"), gradients["bfloat16"], gradients["float32"], strict=True):
        found[f"gradient cosine of {who} in bfloat16 with float32"] = cosine(narrow, exact)
    return {"same gradient in float32": found["gradient cosine in float32"] > 0.99999} | found


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def products(step: Callable[[list[Sample]], float], model: Any, group: list[Sample]) -> int:
    """Floating point operations of our step in products by weights: two passes back to what trains, none elsewhere."""
    counts: list[int] = []
    hook = model.model.layers[0].register_forward_hook(
        lambda _, args, out: counts.append(args[0].shape[1] * (4 if out.requires_grad else 2))
    )
    step(group)
    hook.remove()
    weights = sum(p.numel() for p in model.model.layers.parameters())
    supervised = sum(int(s.target_S.sum()) for s in group)
    return weights * sum(counts) + 4 * model.get_output_embeddings().weight.numel() * supervised


if __name__ == "__main__":
    main()
