"""Constrained beam search against transformers' generate. Run: python benchmarks/decode.py [--quick] [--json].

A model of Qwen3-0.6B's shape with random weights, 50 beams, 12,000 items of three levels of 256 codes and one of
deduplication. Peers: `generate` with `prefix_allowed_tokens_fn` over a set-based trie, and the same given its prefill.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from measure import flops_roof, medians, options, report
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from sidgraft.attention import use_packed_attention
from sidgraft.beam import beam_search
from sidgraft.sids import SidVocabulary
from sidgraft.trie import build_trie

BEAMS = 50
SIZES = (256, 256, 256, 256)
NEAR_TIE = 0.05  # nats; bfloat16 hidden states move scores by about this much


def main() -> None:
    args = options(__doc__)
    torch.manual_seed(0)
    prompt_length, layers, rounds = (32, 2, 3) if args.quick else (128, 28, 3)
    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    vocabulary = SidVocabulary(SIZES, config.vocab_size - sum(SIZES) - 2)
    model: Any = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    # Random rows give all items nearly the same score; larger ones spread them as a trained model does.
    new = slice(vocabulary.first_id, None)
    with torch.no_grad():
        model.get_input_embeddings().weight[new] *= 5
    codes_NL = catalog(12_000)
    prompt = np.append(np.random.default_rng(0).integers(0, 1000, prompt_length - 1), vocabulary.begin_id)
    tokens_NL = codes_NL + np.asarray(vocabulary.level_first_ids)

    ours = product(model, codes_NL, vocabulary, prompt)
    theirs, prefilled = peer(model, tokens_NL, prompt)
    seconds = medians(
        {
            "sidgraft, exact": ours["exact"],
            "sidgraft, restricted": ours["restricted"],
            "generate": theirs,
            "generate, prefilled": prefilled,
        },
        rounds,
    )
    bfloat16 = overlap(ours["exact"](), theirs(), tokens_NL, NEAR_TIE)
    model = model.float()
    float32 = overlap(ours["exact"](), theirs(), tokens_NL, 1e-3)

    step_flops = 2 * sum(p.numel() for n, p in model.named_parameters() if "layers" in n)
    head_flops = 2 * config.vocab_size * config.hidden_size
    flops = (prompt_length + 3 * BEAMS) * step_flops + (1 + 3 * BEAMS) * head_flops
    mine = seconds["sidgraft, exact"]
    report(
        args,
        "decode",
        {
            "generate": (seconds["generate"] / mine, 20),
            "generate, prefilled": (seconds["generate, prefilled"] / mine, 1.5),
        },
        equal={"beams shared in bfloat16": bfloat16, "beams shared in float32": float32},
        roof={"share of bf16 matrix products": flops / mine / flops_roof(torch.bfloat16)},
        seconds=seconds,
        about=f"Qwen3-0.6B shape, {layers} layers, prompt {prompt_length}, {BEAMS} beams, 12,000 items, bf16",
    )


def catalog(items: int) -> np.ndarray:
    """Unique codes [N, 4]: clustered as real ones are (some codes much more used than others)."""
    rng = np.random.default_rng(0)
    draw = lambda: np.minimum(rng.gamma(2.0, 40.0, items).astype(np.int64), 255)  # noqa: E731
    codes_NL = np.stack([draw(), draw(), draw()], axis=1)
    _, group = np.unique(codes_NL, axis=0, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.r_[0, np.flatnonzero(np.diff(group[order])) + 1]
    rank = np.empty(items, np.int64)
    rank[order] = np.arange(items) - np.repeat(starts, np.diff(np.r_[starts, items]))
    return np.column_stack([codes_NL, rank])


def product(model: Any, codes_NL: np.ndarray, vocabulary: SidVocabulary, prompt: np.ndarray) -> dict[str, Any]:
    """Our search by score; each returns {item row: score}. Each side sets its attention, which takes no time."""
    trie = build_trie(codes_NL).to(model.device)

    def run(score: str) -> dict[int, float]:
        use_packed_attention(model)
        found = beam_search(model, trie, vocabulary, [prompt], beams=BEAMS, score=score)
        return dict(zip(found.items_BG[0].tolist(), found.scores_BG[0].tolist(), strict=True))

    return {score: lambda score=score: run(score) for score in ("exact", "restricted")}


def peer(model: Any, tokens_NL: np.ndarray, prompt: np.ndarray) -> tuple[Any, Any]:
    """transformers' generate, and the same with the prompt's keys and values given; each returns {tokens: score}."""
    children: dict[tuple[int, ...], set[int]] = {}
    for row in tokens_NL.tolist():
        for depth, token in enumerate(row):
            children.setdefault(tuple(row[:depth]), set()).add(token)
    allowed = {prefix: sorted(tokens) for prefix, tokens in children.items()}
    ids = torch.from_numpy(prompt)[None].to(model.device)

    def generate(cache: Any = None) -> dict[tuple[int, ...], float]:
        model.set_attn_implementation("sdpa")
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            prefix_allowed_tokens_fn=lambda _, sent: allowed[tuple(sent[len(prompt) :].tolist())],
            num_beams=BEAMS, num_return_sequences=BEAMS, max_new_tokens=4, min_new_tokens=4, do_sample=False,
            length_penalty=0.0, return_dict_in_generate=True, output_scores=True, pad_token_id=0,
            **({} if cache is None else {"cache": cache}),
        )  # fmt: skip
        keys = map(tuple, out.sequences[:, len(prompt) :].tolist())
        return dict(zip(keys, out.sequences_scores.tolist(), strict=True))

    filled: list[Any] = []

    def prefilled() -> dict[tuple[int, ...], float]:
        if not filled:
            model.set_attn_implementation("sdpa")
            with torch.no_grad():
                cache = model(ids[:, :-1], use_cache=True, cache=DynamicCache(config=model.config)).past_key_values
            cache.batch_repeat_interleave(BEAMS)
            filled.append(cache)
        return generate(copy.deepcopy(filled[0]))

    return generate, prefilled


def overlap(ours: dict[int, float], theirs: dict[tuple[int, ...], float], tokens_NL: np.ndarray, near: float) -> float:
    """Share of the peer's beams that we found too; those within ``near`` nats of the last place may differ."""
    last = min(theirs.values())
    mine = {tuple(tokens_NL[item].tolist()) for item in ours}
    certain = [tokens for tokens, score in theirs.items() if score > last + near]
    return sum(tokens in mine for tokens in certain) / max(len(certain), 1)


if __name__ == "__main__":
    main()
