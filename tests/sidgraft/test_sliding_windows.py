"""Models that look back a few tokens only, in some or all of their layers, against transformers' own attention."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

from sidgraft import attention
from sidgraft.attention import check_supported, use_packed_attention
from sidgraft.beam import beam_search
from sidgraft.prompts import Sample
from sidgraft.sids import SidVocabulary
from sidgraft.training import GroundingModel, pack
from sidgraft.trie import build_trie

WINDOW = 8
CODES_NL = np.array([[i, j, k, 0] for i in range(3) for j in range(2) for k in range(2)])
VOCABULARY = SidVocabulary((3, 2, 2, 2), 50)
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "sliding_window": WINDOW, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.3, "tie_word_embeddings": True,
}  # fmt: skip
MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
CONFIGS = {
    "all": lambda: MistralConfig(num_hidden_layers=2, **SMALL),
    "mixed": lambda: Qwen3Config(use_sliding_window=True, **MIXED, **SMALL),
    "gemma": lambda: Gemma3TextConfig(query_pre_attn_scalar=8, **MIXED, **SMALL),
}


@pytest.fixture(params=CONFIGS)
def model(request):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[request.param](), attn_implementation="eager").eval()


def tokens(lengths, seed=0):
    """Token ids, the last of which begin alike, for longer than the window."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(3, 50, n) for n in lengths]
    return [*made[:-1], np.append(made[-2][:-3], made[-1])[: lengths[-1]]] if len(made) > 1 else made


def plain_scores(model, prompt):
    """The score of every item, by a plain forward each."""
    scores = []
    for codes in CODES_NL:
        ids = np.append(prompt, np.asarray(VOCABULARY.level_first_ids) + codes)
        logp = model(torch.from_numpy(ids)[None], use_cache=False).logits[0].log_softmax(-1)
        scores.append(sum(logp[len(prompt) - 1 + i, t].item() for i, t in enumerate(ids[len(prompt) :])))
    return np.array(scores)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[n] for n in range(WINDOW - 4, WINDOW + 3)] + [[3, WINDOW - 1, WINDOW, 20, 13]])
def test_beams_look_back_as_far_as_the_model_does(model, lengths):
    prompts = tokens(lengths)
    expected = [plain_scores(model, prompt) for prompt in prompts]
    use_packed_attention(model)
    found = beam_search(model, build_trie(CODES_NL), VOCABULARY, prompts, beams=len(CODES_NL), score="exact")
    for scores, items_G, scores_G in zip(expected, found.items_BG, found.scores_BG, strict=True):
        np.testing.assert_allclose(scores_G, scores[items_G], atol=1e-4)
        assert (np.diff(scores_G) <= 0).all()


def samples(lengths, first):
    """Text, and codes among it from ``first`` on; targets are what stands behind the first of them."""
    made = []
    for ids_S, n in zip(tokens(lengths, seed=1), first, strict=True):
        ids_S[n::4] = VOCABULARY.first_id + 3
        made.append(Sample(ids_S, np.arange(len(ids_S)) > n))
    return made


def plain_loss(model, batch):
    """The mean of -log p over all targets, by a plain forward a sample."""
    losses = []
    for sample in batch:
        logp = model(torch.from_numpy(sample.ids_S)[None], use_cache=False).logits[0].log_softmax(-1)
        at = np.flatnonzero(sample.target_S)
        losses.append(-logp[at - 1, sample.ids_S[at]])
    return torch.cat(losses).mean()


@pytest.mark.parametrize("short", [0, 512], ids=["fused", "products"])
@pytest.mark.parametrize("name", CONFIGS)
def test_grounding_looks_back_as_far_as_the_model_does(monkeypatch, name, short):
    """Loss and gradient of the rows, where a forward without gradients and one with them share the work."""
    monkeypatch.setattr(attention, "SHORT", short)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
    lengths = [2, WINDOW - 3, WINDOW, WINDOW + 1, 3 * WINDOW + 1, 3 * WINDOW]
    batch = samples(lengths, first=[0, 2, 3, 1, 3 * WINDOW - 4, 2])  # one of long rest, one of long beginning
    rows = model.get_input_embeddings().weight
    expected = plain_loss(model, batch)
    (gradient,) = torch.autograd.grad(expected, rows)
    new = slice(VOCABULARY.first_id, VOCABULARY.first_id + VOCABULARY.n_new)
    grounding = GroundingModel(model, VOCABULARY, {"rows": rows[new].detach()})
    loss = grounding(**pack(batch))["loss"]
    torch.testing.assert_close(loss, expected)
    loss.backward()
    torch.testing.assert_close(grounding.rows.grad, gradient[new], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (lambda: Gemma2Config(num_hidden_layers=1, **SMALL), "gemma2.*attn_logit_softcapping=50.0, final"),
        (lambda: GraniteConfig(num_hidden_layers=1, logits_scaling=8.0, **SMALL), "granite.*logits_scaling=8.0"),
        (lambda: CohereConfig(num_hidden_layers=1, **SMALL), "cohere.*logit_scale=0.0625"),
        (lambda: Llama4TextConfig(num_hidden_layers=1), "llama4_text.*in chunks"),
        (lambda: Qwen2MoeConfig(use_sliding_window=True), "qwen2_moe.*sliding_window=4096.*a mask of its own"),
        (lambda: PhimoeConfig(sliding_window=WINDOW), "phimoe.*sliding_window=8.*a mask of its own"),
    ],
)
def test_a_model_of_which_something_would_be_left_out_is_refused(config, named):
    with pytest.raises(ValueError, match=named):
        check_supported(config())


@pytest.mark.parametrize(
    "config",
    [
        lambda: GraniteConfig(num_hidden_layers=1, **SMALL),
        lambda: PhimoeConfig(sliding_window=None),
        Qwen2MoeConfig,
        LlamaConfig,
        *CONFIGS.values(),
    ],
)
def test_a_model_that_could_ask_for_that_and_does_not_is_taken(config):
    check_supported(config())


def test_a_model_is_asked_before_its_attention_is_replaced():
    model = AutoModelForCausalLM.from_config(CohereConfig(num_hidden_layers=1, **SMALL))
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="not supported"):
        use_packed_attention(model)
    assert model.config._attn_implementation == before


def test_the_models_that_keep_their_window_from_the_attention_function_are_those_of_the_installed_transformers():
    kept = set()
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        source = file.read_text(encoding="utf-8")
        if re.search(r"^from .* import .*\bcreate_sliding_window_causal_mask\b", source, re.MULTILINE):
            kept |= {file.parent.name} if "sliding_window=" not in source and "ForCausalLM(" in source else set()
    assert kept - {"blt"} == set(attention.WINDOW_IN_MASK)  # blt reads bytes: it has no tokens to add to


@pytest.mark.parametrize("asked", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}])
def test_attention_of_another_kind_is_refused_and_not_left_out(asked):
    states = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="give a base model without"):
        attention._attention(torch.nn.Identity(), states, states, states, None, scaling=1.0,
                             packing=attention.Packing.of([3]), **asked)  # fmt: skip
