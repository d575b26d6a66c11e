"""What `gpu_speed.sh` runs: fine-tuning, decoding and grounding of a 0.6B model on one GPU, as JSON lines.

Goals on an H200 (BENCHMARKS): fine-tuning packed at 2048 at 100,000 tokens a second, a search of 50 beams behind a
prompt of 512 in 3 ms and 30 times as fast as `generate`, grounding 3 times as fast as PEFT. Both trainings are the
stages' steps (`steps.py`), without what a Trainer adds between them.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import padded
from decode import agreement, catalog, peer, product
from peft import TrainableTokensConfig, get_peft_model
from steps import batch, stage_step, trainer, update
from transformers import Qwen3Config, Qwen3ForCausalLM

from sidgraft.prompts import Sample
from sidgraft.sids import SidVocabulary
from sidgraft.training import GraftTrainer, GroundingModel, PartsTrainer, supervise

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
CARD = torch.cuda.get_device_name() if CUDA else "none: tiny form on a CPU"
SIZES = (256, 256, 256) if CUDA else (64, 64, 64)
ROW = 2048 if CUDA else 128  # tokens of a packed row
ROWS = 8 if CUDA else 2  # of a step of fine-tuning
ROUNDS = 10 if CUDA else 2
LOSS = 0.01  # of the loss: what bfloat16 may make of it on the way through the layers


def main() -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model, vocabulary = small_model()
    with Path(sys.argv[1]).open("a", encoding="utf-8") as file:
        for part in (decoding, grounding, fine_tuning):  # the last one changes the weights
            result = {"name": part.__name__, "card": CARD, "torch": torch.__version__} | part(model, vocabulary)
            print(json.dumps(result), flush=True)
            file.write(json.dumps(result) + "\n")


def small_model() -> tuple[Any, SidVocabulary]:
    """Qwen3-0.6B's shape with random weights in float32 (without a GPU two narrow layers), and the new tokens."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}  # fmt: skip
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2000}  # fmt: skip
    config = Qwen3Config(**(shape if CUDA else tiny), tie_word_embeddings=True)
    vocabulary = SidVocabulary(SIZES, config.vocab_size - sum(SIZES) - 2)
    model: Any = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():  # larger new rows spread the items' scores as a trained model does
        model.get_input_embeddings().weight[vocabulary.first_id :] *= 5
    return model.to(DEVICE), vocabulary


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """Median seconds of a run after two that do not count, the device's work included."""
    times = []
    for _ in range(rounds + 2):
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def decoding(model: Any, vocabulary: SidVocabulary) -> dict[str, Any]:
    """One search of 50 beams, and generate with the same constraint and with its prefill given.

    Raises SystemExit where the beams differ from generate's by more than rounding, in float32 or in bfloat16.
    """
    model = copy.deepcopy(model).to(torch.bfloat16)
    codes_NL = catalog(12_000 if CUDA else 300) % SIZES[0]
    codes_NL = np.unique(codes_NL, axis=0)
    prompt = np.append(np.random.default_rng(0).integers(0, 800, 511 if CUDA else 31), vocabulary.begin_id)
    tokens_NL = codes_NL + np.asarray(vocabulary.level_first_ids)
    ours = product(model, codes_NL, vocabulary, prompt)
    theirs, prefilled = peer(model, tokens_NL, prompt)
    mine = seconds(ours["exact"], ROUNDS)
    others = {"generate": seconds(theirs, 2), "generate, prefilled": seconds(prefilled, 2)}
    answers = {"mine": ours["exact"](), "its": theirs()}
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    model.float()
    found = agreement(**answers, mine_wide=ours["exact"](), its_wide=theirs())
    torch.set_float32_matmul_precision(precision)
    stop_unless(all(value is not False for value in found.values()), "decoding", found)
    return {
        "milliseconds": round(1000 * mine, 3),
        "goal_milliseconds": 3,
        "ratios": {name: round(value / mine, 2) for name, value in others.items()},
        "goal_ratio": 30,
        "beams_shared": round(found["beams shared in bfloat16"], 4),
        "beams_shared_float32": round(found["beams shared in float32"], 4),
        "float32_beams_kept": round(found["float32 beams that our bfloat16 keeps"], 4),
        "float32_beams_the_peer_keeps": round(found["float32 beams that the peer's bfloat16 keeps"], 4),
    }


def stop_unless(same: bool, part: str, found: dict[str, Any]) -> None:
    """A faster answer that differs is not an answer: nothing is written of it, and the script fails."""
    if not same:
        raise SystemExit(f"gpu_speed: {part} is not the same as the peer: {found}")


def samples(vocabulary: SidVocabulary, tokens: int, text: int, items: int) -> list[Sample]:
    """Sequences of about ``text`` words and ``items`` items each, that supervise the items, ``tokens`` in all."""
    rng, made, total = np.random.default_rng(0), [], 0
    while total < tokens:
        words = rng.integers(0, 800, int(rng.integers(text // 2, text * 3 // 2 + 1)))
        codes = rng.integers(0, SIZES[0], (items, len(SIZES)))
        ids = np.concatenate([words, vocabulary.item_tokens(codes).ravel()])[: max(tokens - total, 8)]
        made.append(Sample(ids, np.arange(len(ids)) >= min(len(words), len(ids) - 1)))
        total += len(ids)
    return made


def fine_tuning(model: Any, vocabulary: SidVocabulary) -> dict[str, Any]:
    """The stage's steps of the whole model, in packed rows of at most ROW tokens: float32 weights, bfloat16 autocast.

    Raises SystemExit where the loss is not that of the model as transformers has it, padded: in float32 before any
    step, and under autocast what the first step gives.
    """
    group = samples(vocabulary, ROW * ROWS, 20, 8)
    few = group[: max(len(group) // ROWS, 1)]
    model.train().requires_grad_(True)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    expected = {"float32": stock_loss(model, few, autocast=False), "autocast": stock_loss(model, few, autocast=True)}
    supervise(model)
    graft = trainer(GraftTrainer, model, bf16=True)
    with torch.no_grad():  # float32: not prepared yet
        found = {"float32": sum(graft.compute_loss(model, part).item() for part in batch(graft, few, ROW)["parts"])}
    torch.set_float32_matmul_precision(precision)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    step = stage_step(graft)
    found["autocast"] = step(batch(graft, few, ROW))
    optimizer.zero_grad()
    differences = {how: abs(found[how] - expected[how]) for how in expected}
    same = differences["float32"] <= 1e-4 and differences["autocast"] <= LOSS * expected["autocast"]
    stop_unless(same, "fine_tuning", {"found": found, "expected": expected})
    given = batch(graft, group, ROW)  # beside a GPU a worker of the loader packs them

    def run() -> None:
        step(given)
        update(model, optimizer)

    tokens = sum(map(len, group))
    return {
        "tokens_per_second": round(tokens / seconds(run, ROUNDS)),
        "goal": 100_000,
        "first_loss_difference": round(differences["autocast"], 4),
        "first_loss_difference_float32": round(differences["float32"], 7),
    }


def stock_loss(model: Any, group: list[Sample], *, autocast: bool) -> float:
    """The model's own loss on the padded batch, with or without bfloat16 autocast."""
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        return model(**on_device(padded(group)), use_cache=False).loss.item()


def on_device(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(DEVICE) for name, value in tensors.items()}


def grounding(model: Any, vocabulary: SidVocabulary) -> dict[str, Any]:
    """The stage's step of the new rows against PEFT's trainable_token_indices on padded batches, both in bfloat16.

    Raises SystemExit where the losses of the first step differ by more than bfloat16 rounds.
    """
    first, end = vocabulary.first_id, vocabulary.first_id + vocabulary.n_new
    rows = {"rows": model.get_input_embeddings().weight[first:end].detach().float().clone()}
    mine = GroundingModel(copy.deepcopy(model).to(torch.bfloat16), vocabulary, rows)
    config = TrainableTokensConfig(token_indices=list(range(first, end)), target_modules=["embed_tokens"])
    theirs = get_peft_model(copy.deepcopy(model).to(torch.bfloat16), config)
    group = samples(vocabulary, ROW, 60, 1)
    parts = trainer(PartsTrainer, mine)
    step, ours, its = stage_step(parts), batch(parts, group), on_device(padded(group))

    def their_step() -> float:
        loss = theirs(**its)["loss"]
        loss.backward()
        return loss.item()

    models: dict[str, tuple[Any, Callable[[], float]]] = {
        "mine": (mine, lambda: step(ours)),
        "theirs": (theirs, their_step),
    }
    optimizers = {
        name: torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], 1e-3, fused=True)
        for name, (one, _) in models.items()
    }

    def run(name: str) -> float:
        one, its_step = models[name]
        loss = its_step()
        update(one, optimizers[name])
        return loss

    losses = {name: run(name) for name in models}
    difference = abs(losses["mine"] - losses["theirs"])
    stop_unless(difference <= LOSS * abs(losses["theirs"]), "grounding", losses)
    times = {name: seconds(lambda name=name: run(name), ROUNDS) for name in models}
    return {
        "tokens_per_second": round(sum(map(len, group)) / times["mine"]),
        "ratio": round(times["theirs"] / times["mine"], 2),
        "goal_ratio": 3,
        "first_loss_difference": round(difference, 4),
    }


if __name__ == "__main__":
    main()
