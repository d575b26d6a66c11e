"""Losses, packing and the two ways to train, against the stock model's own loss."""

import numpy as np
import pytest
import torch
from transformers import Trainer

from sidgraft.attention import Packing, use_packed_attention
from sidgraft.losses import chunked_cross_entropy
from sidgraft.models import add_tokens, is_tied, load_base, put_rows, take_rows
from sidgraft.prompts import Sample
from sidgraft.training import GraftTrainer, GroundingModel, PartsTrainer, Samples, arguments, pack, pack_step, supervise


def make(sizes=(5, 4, 2), *, tied=True, padding=0):
    """A tiny grafted model in float64 with distinct rows, its vocabulary, and rows as a dict."""
    model, tokenizer = load_base("tiny")
    vocabulary = add_tokens(tokenizer, list(sizes))
    model = model.double()
    model.resize_token_embeddings(vocabulary.first_id + vocabulary.n_new + padding, mean_resizing=False)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone() * 1.1)
    generator = torch.Generator().manual_seed(1)
    rows = {"rows": torch.randn(vocabulary.n_new, 64, generator=generator).double() * 0.1}
    if not tied:
        rows["head_rows"] = rows["rows"] * 0.5
    put_rows(model, vocabulary, rows)
    return model, vocabulary, rows


def some_samples(vocabulary, lengths=(7, 3, 12)):
    rng = np.random.default_rng(0)
    top = vocabulary.first_id + vocabulary.n_new
    samples = []
    for n in lengths:
        ids = rng.integers(0, top, n)
        ids[n // 2] = vocabulary.first_id + n % vocabulary.n_new
        target = rng.random(n) < 0.6
        target[0], target[-1] = False, True
        samples.append(Sample(ids, target))
    return samples


def stock_loss(model, samples):
    """The model's own loss with labels, weighted to the mean over all targets of all samples."""
    total, count = 0.0, 0
    for sample in samples:
        labels = torch.from_numpy(np.where(sample.target_S, sample.ids_S, -100))[None]
        n = int(sample.target_S[1:].sum())
        total = total + model(input_ids=torch.from_numpy(sample.ids_S)[None], labels=labels).loss * n
        count += n
    return total / count


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunked_cross_entropy_equals_the_full_loss_and_its_gradients(monkeypatch, chunk):
    monkeypatch.setattr("sidgraft.losses.LOGITS_AT_ONCE", chunk * 11)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 6, generator=generator).double().requires_grad_()
    blocks = [torch.randn(n, 6, generator=generator).double() for n in (4, 5, 2)]
    blocks[1].requires_grad_()
    targets = torch.tensor([0, 3, 4, 8, 9, 10, 5])
    (chunked_cross_entropy(hidden, blocks, targets) * 3).backward()
    found = hidden.grad.clone(), blocks[1].grad.clone()
    hidden.grad = blocks[1].grad = None
    full = torch.nn.functional.cross_entropy(hidden @ torch.cat(blocks).T, targets) * 3
    full.backward()
    torch.testing.assert_close(found[0], hidden.grad)
    torch.testing.assert_close(found[1], blocks[1].grad, check_dtype=False, rtol=1e-5, atol=1e-6)
    assert blocks[0].grad is None


def test_a_packed_row_gives_what_one_by_one_gives():
    model, vocabulary, _ = make()
    samples = some_samples(vocabulary)
    with torch.no_grad():
        one_by_one = [model(input_ids=torch.from_numpy(s.ids_S)[None]).logits[0] for s in samples]
        use_packed_attention(model)
        row = pack(samples)
        packed = model(input_ids=row["input_ids"], position_ids=row["position_ids"], packing=row["packing"]).logits[0]
    predicting = [logits[np.flatnonzero(s.target_S) - 1] for logits, s in zip(one_by_one, samples, strict=True)]
    torch.testing.assert_close(packed[row["supervised"]], torch.cat(predicting))


@pytest.mark.parametrize(("tied", "padding"), [(True, 0), (False, 0), (True, 9)])
def test_grounding_loss_and_row_gradients_equal_the_stock_models(tied, padding):
    model, vocabulary, rows = make(tied=tied, padding=padding)
    samples = some_samples(vocabulary)
    stock = stock_loss(model, samples)
    stock.backward()
    new = slice(vocabulary.first_id, vocabulary.first_id + vocabulary.n_new)
    grounding = GroundingModel(model, vocabulary, rows)
    loss = grounding(**pack(samples))["loss"]
    loss.backward()
    torch.testing.assert_close(loss, stock.detach(), check_dtype=False, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        grounding.rows.grad, model.get_input_embeddings().weight.grad[new], check_dtype=False, rtol=1e-5, atol=1e-7
    )
    if not tied:
        head_grad = model.get_output_embeddings().weight.grad[new]
        torch.testing.assert_close(grounding.head_rows.grad, head_grad, check_dtype=False, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "new_at",
    [
        ([3], [0, 1], [8, 2]),  # some start with a new token
        ([], [2], [11]),  # one has none
        ([0], [0], [0]),  # nothing stands before
        ([], [], []),  # nothing but the head depends on the rows
    ],
)
def test_tokens_before_the_first_new_one_change_neither_loss_nor_gradient(new_at):
    model, vocabulary, rows = make()
    rng = np.random.default_rng(3)
    samples = []
    for n, places in zip((7, 3, 12), new_at, strict=True):
        ids = rng.integers(0, vocabulary.first_id, n)
        ids[places] = vocabulary.first_id + np.arange(len(places))
        samples.append(Sample(ids, np.arange(n) > 0))
    stock = stock_loss(model, samples)
    stock.backward()
    new = slice(vocabulary.first_id, vocabulary.first_id + vocabulary.n_new)
    grounding = GroundingModel(model, vocabulary, rows)
    loss = grounding(**pack(samples))["loss"]
    loss.backward()
    torch.testing.assert_close(loss, stock.detach(), check_dtype=False, rtol=1e-5, atol=1e-6)
    expected = model.get_input_embeddings().weight.grad[new]
    torch.testing.assert_close(grounding.rows.grad, expected, check_dtype=False, rtol=1e-5, atol=1e-7)


def test_grounding_keeps_no_graph_for_the_tokens_before_the_first_new_one(monkeypatch):
    model, vocabulary, rows = make()
    ids = np.arange(10)
    ids[7] = vocabulary.first_id
    grounding = GroundingModel(model, vocabulary, rows)
    kept = []
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda _, args, out: kept.append((args[0].shape[1], out.requires_grad)))
    grounding(**pack([Sample(ids, np.arange(10) > 0)]))
    assert kept == [(7, False), (2, True)]  # the last token is a target alone


def test_grounding_forms_no_gradient_for_the_frozen_vocabulary():
    model, vocabulary, rows = make()
    grounding = GroundingModel(model, vocabulary, rows)
    grounding(**pack(some_samples(vocabulary)))["loss"].backward()
    assert [name for name, p in grounding.named_parameters() if p.grad is not None] == ["rows"]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_after_grounding_the_frozen_weights_are_bit_identical_and_every_new_row_moved(tmp_path, tied):
    model, vocabulary, rows = make(tied=tied)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grounding = GroundingModel(model, vocabulary, rows)
    settings = arguments(tmp_path, checkpoints=False, batch_size=2, seed=0, max_steps=3, learning_rate=1e-3)
    samples = Samples(some_samples(vocabulary))
    Trainer(model=grounding, args=settings, train_dataset=samples, data_collator=pack).train()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for name, moved in grounding.new_rows().items():
        assert (moved.double() != rows[name]).any(dim=1).all(), name


@pytest.mark.parametrize("what", ["ground", "finetune"])
@pytest.mark.parametrize("tokens", [7, 14, 24, 1000])
def test_a_step_in_parts_has_the_loss_and_the_gradient_of_the_stock_model(tmp_path, what, tokens):
    """From every sample by itself to all in one; one sample has more tokens than a part, and one has no target."""
    model, vocabulary, rows = make()
    samples = [*alike(vocabulary), *some_samples(vocabulary), Sample(np.array([3, 4]), np.zeros(2, bool))]
    stock = stock_loss(model, samples[:-1])
    stock.backward()
    embedding = model.get_input_embeddings().weight
    expected = embedding.grad.clone()
    new = slice(vocabulary.first_id, vocabulary.first_id + vocabulary.n_new)
    model.zero_grad()
    batch = pack_step(samples, tokens_at_once=tokens)
    assert len(batch["parts"]) == {7: 9, 14: 5, 24: 3, 1000: 1}[tokens]
    if what == "ground":
        trained, trainer = GroundingModel(model, vocabulary, rows), PartsTrainer
        found = trained.rows
    else:
        supervise(model)
        trained, trainer, found = model, GraftTrainer, embedding
    trainer = trainer(model=trained, args=arguments(tmp_path, checkpoints=False, batch_size=9, seed=0))
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.training_step(trained, batch)
    torch.testing.assert_close(loss, stock.detach(), check_dtype=False, rtol=1e-5, atol=1e-6)
    expected = expected[new] if what == "ground" else expected
    torch.testing.assert_close(found.grad, expected, check_dtype=False, rtol=1e-5, atol=1e-7)


def test_parts_hold_samples_of_like_length_and_a_step_of_one_part_keeps_its_order():
    samples = [Sample(np.full(n, n), np.arange(n) > 0) for n in (3, 9, 2, 9, 3, 9, 1)]
    parts = pack_step(samples, tokens_at_once=18)["parts"]
    assert [part["packing"].lengths_B.tolist() for part in parts] == [[8, 8], [8, 2], [2, 1]]  # the last is no input
    assert sum(part["weight"] for part in parts) == pytest.approx(1)
    (whole,) = pack_step(samples, tokens_at_once=54)["parts"]
    assert whole["packing"].lengths_B.tolist() == [2, 8, 1, 8, 2, 8]


def test_a_step_without_a_target_is_refused():
    with pytest.raises(ValueError, match="no sample of a step has a target: raise max_length"):
        pack_step([Sample(np.array([3, 4]), np.zeros(2, bool))] * 2, tokens_at_once=3)


@pytest.mark.parametrize("beginnings", ["different", "alike"])
def test_the_fine_tuning_loss_and_all_gradients_equal_the_stock_models(tmp_path, beginnings):
    model, vocabulary, _ = make()
    samples = some_samples(vocabulary) if beginnings == "different" else alike(vocabulary)
    stock = stock_loss(model, samples)
    stock.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    supervise(model)
    settings = arguments(tmp_path, checkpoints=False, batch_size=3, seed=0)
    trainer = GraftTrainer(model=model, args=settings, train_dataset=Samples(samples), data_collator=pack)
    loss = trainer.compute_loss(model, pack(samples))
    loss.backward()
    torch.testing.assert_close(loss, stock.detach(), check_dtype=False, rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_batches_that_another_process_lays_out_are_the_same(tmp_path):
    found = []
    for workers in (0, 1):
        model, vocabulary, _ = make()
        supervise(model.float())
        settings = arguments(tmp_path, checkpoints=False, batch_size=4, seed=0, max_steps=2, learning_rate=1e-3)
        settings.dataloader_num_workers = workers
        samples = Samples(alike(vocabulary))
        GraftTrainer(model=model, args=settings, train_dataset=samples, data_collator=pack_step).train()
        found.append(model.state_dict())
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_a_supervised_model_still_gives_logits_when_it_has_no_targets():
    model, _, _ = make()
    ids = torch.arange(5)[None]
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        supervise(model)
        packing = Packing.of([5])
        again = model(input_ids=ids, position_ids=packing.positions_1U, packing=packing).logits
    torch.testing.assert_close(again, plain)


def test_tied_weights_stay_tied_through_save_load_and_one_more_step(tmp_path):
    from transformers import AutoModelForCausalLM

    model, vocabulary, _ = make()
    model.float().save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert is_tied(loaded)
    assert torch.equal(take_rows(loaded, vocabulary)["rows"], take_rows(model, vocabulary)["rows"])
    supervise(loaded)
    samples = Samples(some_samples(vocabulary))
    settings = arguments(tmp_path / "run", checkpoints=False, batch_size=3, seed=0, max_steps=1, learning_rate=1e-2)
    GraftTrainer(model=loaded, args=settings, train_dataset=samples, data_collator=pack_step).train()
    assert is_tied(loaded)
    assert not torch.equal(take_rows(loaded, vocabulary)["rows"], take_rows(model, vocabulary)["rows"])


def test_targets_never_cross_samples():
    row = pack(
        [Sample(np.array([5, 6, 7]), np.array([False, True, True])), Sample(np.array([8, 9]), np.array([False, True]))]
    )
    assert row["input_ids"].tolist() == [[5, 6, 8]]  # the last target of a sample is not needed as an input
    assert row["supervised"].tolist() == [0, 1, 2]
    assert row["targets"].tolist() == [6, 7, 9]
    assert row["position_ids"].tolist() == [[0, 1, 0]]


def test_a_packed_row_holds_once_what_samples_begin_with_up_to_the_first_targets():
    targets = np.arange(6) > 2
    row = pack([Sample(np.array(ids), targets) for ids in ([5, 6, 7, 8, 9, 1], [5, 6, 7, 8, 2, 1], [5, 6, 7, 8, 9, 1])])
    # [5, 6] of all; 7, 8 and what follows predict something in each, and so stand there for each
    assert row["input_ids"].tolist() == [[5, 6, 7, 8, 9, 7, 8, 2, 7, 8, 9]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 4, 2, 3, 4, 2, 3, 4]]
    assert row["supervised"].tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert row["targets"].tolist() == [8, 9, 1, 8, 2, 1, 8, 9, 1]


def alike(vocabulary):
    """Samples that begin alike, up to, beyond and without a new token; one stands there twice."""
    new = vocabulary.first_id
    texts = [
        [3, 4, 5, new, new + 1, 9, 8],
        [3, 4, 5, new, new + 1, 7],
        [3, 4, 5, new, new + 2, 9],
        [3, 4, 5, new, new + 1, 7],
        [3, 4, 6, 6, 2],
        [3, 4, 6, 6, new + 3],
    ]
    return [Sample(np.array(ids), np.arange(len(ids)) >= len(ids) - 1 - len(ids) % 2) for ids in texts]


@pytest.mark.parametrize("tied", [True, False])
def test_grounding_on_samples_that_begin_alike_has_the_stock_models_loss_and_gradient(tied):
    model, vocabulary, rows = make(tied=tied)
    samples = alike(vocabulary)
    stock = stock_loss(model, samples)
    stock.backward()
    new = slice(vocabulary.first_id, vocabulary.first_id + vocabulary.n_new)
    grounding = GroundingModel(model, vocabulary, rows)
    row = pack(samples)
    assert row["input_ids"].shape[1] < sum(len(s) - 1 for s in samples)
    loss = grounding(**row)["loss"]
    loss.backward()
    torch.testing.assert_close(loss, stock.detach(), check_dtype=False, rtol=1e-5, atol=1e-6)
    expected = model.get_input_embeddings().weight.grad[new]
    torch.testing.assert_close(grounding.rows.grad, expected, check_dtype=False, rtol=1e-5, atol=1e-7)
