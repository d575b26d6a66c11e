"""Constrained beam search against transformers' generate. Run: python benchmarks/decode.py [--quick] [--json].

A model of Qwen3-0.6B's shape with random weights, 50 beams, 12,000 items of three levels of 256 codes; and the same
items with a fourth code, as deduplication adds it. Peers: `generate` with `prefix_allowed_tokens_fn` over a set-based
trie, and the same given its prefill. Beams and scores are compared in float32, where both must agree but for ties, and
in bfloat16, where ours must keep as many of the float32 beams as the peer's bfloat16 does, but for two.
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
CODES = 256
LEAST = 0.98  # of the peer's beams that are no near-ties
FEWER = 2  # of the float32 beams, that our bfloat16 may keep less than the peer's: which are lost is chance
NEAR = 1e-3  # in float32: how far scores of one item may differ, and how near to the last one a beam is a tie


def main() -> None:
    args = options(__doc__)
    torch.manual_seed(0)
    prompt_length, layers, rounds = (32, 2, 3) if args.quick else (128, 28, 3)
    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    # Random rows give all items nearly the same score; larger ones spread them as a trained model does.
    with torch.no_grad():
        model.get_input_embeddings().weight[config.vocab_size - 4 * CODES - 2 :] *= 5
    codes_N3 = catalog(12_000)
    fourth_N = np.random.default_rng(1).integers(0, 3, len(codes_N3))

    ratios: dict[str, tuple[float, float]] = {}
    equal: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for label, codes_NL in (("", codes_N3), (", four codes", np.column_stack([codes_N3, fourth_N]))):
        found, answers = compare(model, codes_NL, prompt_length, rounds)
        seconds |= {f"{name}{label}": value for name, value in found.items()}
        equal |= {f"{name}{label}": value for name, value in agreement(**answers).items()}
        mine = found["sidgraft, exact"]
        ratios |= {
            f"generate{label}": (found["generate"] / mine, 20),
            f"generate, prefilled{label}": (found["generate, prefilled"] / mine, 1.5),
        }

    step_flops = 2 * sum(p.numel() for n, p in model.named_parameters() if "layers" in n)
    head_flops = 2 * config.vocab_size * config.hidden_size
    flops = (prompt_length + 2 * BEAMS) * step_flops + (1 + 2 * BEAMS) * head_flops
    report(
        args,
        "decode",
        ratios,
        equal=equal,
        roof={"share of bf16 matrix products": flops / seconds["sidgraft, exact"] / flops_roof(torch.bfloat16)},
        seconds=seconds,
        about=f"Qwen3-0.6B shape, {layers} layers, prompt {prompt_length}, {BEAMS} beams, 12,000 items, bf16",
    )


def catalog(items: int) -> np.ndarray:
    """Distinct codes [N, 3]: clustered as real ones are (some codes much more used than others)."""
    rng = np.random.default_rng(0)
    drawn = np.minimum(rng.gamma(2.0, 40.0, (2 * items, 3)).astype(np.int64), CODES - 1)
    return rng.permutation(np.unique(drawn, axis=0))[:items]


def compare(
    model: Any, codes_NL: np.ndarray, prompt_length: int, rounds: int
) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """Seconds of ours and of the peers for items of L codes, and what ours and `generate` found by dtype."""
    sizes = (CODES,) * codes_NL.shape[1]
    vocabulary = SidVocabulary(sizes, model.config.vocab_size - sum(sizes) - 2)
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
    answers = {"mine": ours["exact"](), "its": theirs()}
    model.float()
    answers |= {"mine_wide": ours["exact"](), "its_wide": theirs()}
    model.to(torch.bfloat16)
    return seconds, answers


def agreement(
    mine: dict[int, float], its: dict[int, float], mine_wide: dict[int, float], its_wide: dict[int, float]
) -> dict[str, Any]:
    """How two searches agree, of which each found {item row: score} in bfloat16 and (wide) in float32.

    In bfloat16 a beam is a near-tie within twice the most by which the peer's own scores differ between the two dtypes:
    how wrong ours are has no part in it. A near-tie at an early level decides for all that is below it, so even the
    peer does not keep all of its float32 beams.
    """
    wide, difference = overlap(mine_wide, its_wide, NEAR), largest_difference(mine_wide, its_wide)
    near = 2 * largest_difference(its, its_wide)
    sure = certain(its_wide, near)
    kept, its_kept = (sum(item in found for item in sure) for found in (mine, its))
    return {
        "same beams in float32": wide >= LEAST,
        "same scores in float32": difference < NEAR,
        "as many float32 beams kept in bfloat16 as the peer's but for two": kept >= its_kept - FEWER,
        "beams shared in float32": wide,
        "beams shared in bfloat16": overlap(mine, its, near),
        "float32 beams that our bfloat16 keeps": kept / len(sure),
        "float32 beams that the peer's bfloat16 keeps": its_kept / len(sure),
        "largest difference of scores in float32": difference,
    }


def product(model: Any, codes_NL: np.ndarray, vocabulary: SidVocabulary, prompt: np.ndarray) -> dict[str, Any]:
    """Our search by score; each returns {item row: score}. Each side sets its attention, which takes no time."""
    trie = build_trie(codes_NL).to(model.device)

    def run(score: str) -> dict[int, float]:
        use_packed_attention(model)
        found = beam_search(model, trie, vocabulary, [prompt], beams=BEAMS, score=score)
        return dict(zip(found.items_BG[0].tolist(), found.scores_BG[0].tolist(), strict=True))

    return {score: lambda score=score: run(score) for score in ("exact", "restricted")}


def peer(model: Any, tokens_NL: np.ndarray, prompt: np.ndarray) -> tuple[Any, Any]:
    """transformers' generate, and the same with the prompt's keys and values given; each returns {item row: score}."""
    children: dict[tuple[int, ...], set[int]] = {}
    for row in tokens_NL.tolist():
        for depth, token in enumerate(row):
            children.setdefault(tuple(row[:depth]), set()).add(token)
    allowed = {prefix: sorted(tokens) for prefix, tokens in children.items()}
    ids, levels = torch.from_numpy(prompt)[None].to(model.device), tokens_NL.shape[1]

    rows = {tuple(tokens): item for item, tokens in enumerate(tokens_NL.tolist())}

    def generate(cache: Any = None) -> dict[int, float]:
        model.set_attn_implementation("sdpa")
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            prefix_allowed_tokens_fn=lambda _, sent: allowed[tuple(sent[len(prompt) :].tolist())],
            num_beams=BEAMS, num_return_sequences=BEAMS, max_new_tokens=levels, min_new_tokens=levels, do_sample=False,
            length_penalty=0.0, return_dict_in_generate=True, output_scores=True, pad_token_id=0,
            **({} if cache is None else {"cache": cache}),
        )  # fmt: skip
        items = (rows[tuple(tokens)] for tokens in out.sequences[:, len(prompt) :].tolist())
        return dict(zip(items, out.sequences_scores.tolist(), strict=True))

    filled: list[Any] = []

    def prefilled() -> dict[int, float]:
        if not filled:
            model.set_attn_implementation("sdpa")
            with torch.no_grad():
                cache = model(ids[:, :-1], use_cache=True, cache=DynamicCache(config=model.config)).past_key_values
            cache.batch_repeat_interleave(BEAMS)
            filled.append(cache)
        return generate(copy.deepcopy(filled[0]))

    return generate, prefilled


def certain(expected: dict[int, float], near: float) -> list[int]:
    """The beams that are no near-ties: not within ``near`` of the last one. All of them, where none would be left."""
    last = min(expected.values())
    return [item for item, score in expected.items() if score > last + near] or list(expected)


def overlap(found: dict[int, float], expected: dict[int, float], near: float) -> float:
    """Share of the expected beams, near-ties left out, that were found too; 0 of none."""
    sure = certain(expected, near)
    return sum(item in found for item in sure) / len(sure)


def largest_difference(found: dict[int, float], expected: dict[int, float]) -> float:
    """The most by which scores of one item differ; infinite where no item was found by both."""
    both = found.keys() & expected.keys()
    return max((abs(found[item] - expected[item]) for item in both), default=float("inf"))


if __name__ == "__main__":
    main()
