"""SASRec: its loss against float64 NumPy, causality, padding, determinism, and what it learns on planted data."""

import math
import re

import numpy as np
import pytest
import torch

from sidgraft import sasrec
from sidgraft.baselines import best, popularity
from sidgraft.metrics import recall_at
from sidgraft.sasrec import NONE, SASRec, fit, next_item_loss, padded, scores, target_ranks

ITEMS = 11


@pytest.fixture
def model():
    torch.manual_seed(0)
    return SASRec(ITEMS, width=8, layers=2, heads=2, dropout=0.0, max_length=6).eval()


def test_the_loss_is_the_cross_entropy_over_all_items_at_every_position(model):
    """The transformer is written out in float64 NumPy; each sequence by itself, without padding."""
    sequences = [np.array([1, 4, 4, 10, 2, 0, 7]), np.array([3, 5]), np.array([9, 8, 2])]
    weights = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    losses = []
    for sequence in sequences:
        states = forward(weights, sequence[:-1])
        logits = states @ weights["items.weight"].T
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses += [-log_p[t, target] for t, target in enumerate(sequence[1:])]
    assert len(losses) == 6 + 1 + 2
    found = next_item_loss(model, padded(sequences)).item()
    assert found == pytest.approx(np.mean(losses), rel=1e-5)


def forward(weights, items):
    def norm(x, name):
        x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = weights["items.weight"][items] + weights["positions.weight"][: len(items)]
    T, D = x.shape
    for layer in ("blocks.layers.0", "blocks.layers.1"):
        joint = norm(x, f"{layer}.norm1") @ weights[f"{layer}.self_attn.in_proj_weight"].T
        q, k, v = np.split(joint + weights[f"{layer}.self_attn.in_proj_bias"], 3, axis=1)
        heads = []
        for h in range(2):
            part = slice(h * D // 2, (h + 1) * D // 2)
            score = q[:, part] @ k[:, part].T / np.sqrt(D / 2)
            score[np.triu_indices(T, 1)] = -np.inf
            p = np.exp(score - score.max(axis=1, keepdims=True))
            heads.append(p / p.sum(axis=1, keepdims=True) @ v[:, part])
        out = np.concatenate(heads, axis=1)
        x = x + out @ weights[f"{layer}.self_attn.out_proj.weight"].T + weights[f"{layer}.self_attn.out_proj.bias"]
        inner = norm(x, f"{layer}.norm2") @ weights[f"{layer}.linear1.weight"].T + weights[f"{layer}.linear1.bias"]
        inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / np.sqrt(2)))
        x = x + inner @ weights[f"{layer}.linear2.weight"].T + weights[f"{layer}.linear2.bias"]
    return norm(x, "blocks.norm")


def test_a_later_item_changes_no_earlier_state(model):
    items = torch.tensor([[1, 2, 3, 4, 5, 6]])
    before = model(items)
    for changed in range(1, 6):
        other = items.clone()
        other[0, changed] = 9
        after = model(other)
        torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=0, atol=1e-6)
        assert (after[:, changed:] - before[:, changed:]).abs().amax(dim=2).min() > 1e-3


def test_what_fills_a_short_sequence_is_neither_seen_nor_recommended(model):
    histories = [np.array([1, 2]), np.array([3, 4, 5, 6, 7, 8, 9]), np.array([], dtype=int)]
    together = scores(model, histories)
    assert together.shape == (3, ITEMS)  # no place for the filling
    for row, history in enumerate(histories):
        torch.testing.assert_close(together[row : row + 1], scores(model, [history]), rtol=1e-5, atol=1e-5)
    # only the last max_length items count
    torch.testing.assert_close(scores(model, [histories[1][-6:]]), together[1:2], rtol=1e-5, atol=1e-5)
    assert (together[2] == 0).all()
    items, _ = best(together.numpy(), [np.array([], dtype=int)] * 3, ITEMS)
    assert NONE not in items


def test_ranks_count_equal_scores_against_the_target(model):
    found = target_ranks(model, [np.array([1, 2]), np.array([], dtype=int)], np.array([3, 0]))
    row = scores(model, [np.array([1, 2])])[0]
    assert found.tolist() == [int((row >= row[3]).sum()), ITEMS]


def markov(users, seed):
    """Each item leads to one of two others with .7 and .25, to any with the rest; popularity says nothing."""
    rng = np.random.default_rng(seed)
    first, second = np.random.default_rng(7).permutation(60), np.random.default_rng(8).permutation(60)
    sequences = []
    for _ in range(users):
        items = [int(rng.integers(60))]
        for _ in range(8):
            draw = rng.random()
            items.append(
                int(first[items[-1]] if draw < 0.7 else second[items[-1]] if draw < 0.95 else rng.integers(60))
            )
        sequences.append(np.array(items))
    return sequences


def test_it_beats_popularity_clearly_on_a_planted_markov_chain():
    sequences = markov(400, 0)
    training, valid = [s[:-2] for s in sequences], np.array([s[-2] for s in sequences])
    model, facts = fit(
        training, training, valid, 60,
        width=32, dropout=0.2, learning_rate=3e-3, batch_size=64, epochs=40, patience=4, max_length=10,
    )  # fmt: skip
    histories, test = [s[:-1] for s in sequences], np.array([s[-1] for s in sequences])
    recall = recall_at(target_ranks(model, histories, test), 2).mean()
    ranked, _ = popularity(np.bincount(np.concatenate(training), minlength=60), [np.array([], int)] * len(test), 2)
    by_popularity = (ranked == test[:, None]).any(axis=1).mean()
    assert by_popularity < 0.1
    assert recall > 0.8  # the best possible is .95 and 2 of 60 by chance
    assert facts["best_epoch"] == max(facts["log"], key=lambda row: row["ndcg@10"])["epoch"]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    sequences = markov(40, 1)
    settings = {"width": 16, "epochs": 2, "batch_size": 16}
    state = torch.get_rng_state()
    first, again, other = (fit(sequences, [], np.array([]), 60, seed=s, **settings)[0] for s in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)  # and nobody else's numbers change
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.items.weight, other.items.weight)


def test_early_stopping_keeps_the_best_epoch(monkeypatch):
    figures = iter([0.1, 0.3, 0.3, 0.2, 0.9])
    monkeypatch.setattr(sasrec, "ndcg_at", lambda *_: np.array([next(figures)]))
    sequences = markov(20, 2)
    settings = {"width": 16, "batch_size": 16, "dropout": 0.0}
    model, facts = fit(sequences, sequences, np.zeros(20, int), 60, epochs=9, patience=2, **settings)
    assert (facts["best_epoch"], len(facts["log"])) == (2, 4)  # a tie keeps the earlier
    alone, _ = fit(sequences, [], np.array([]), 60, epochs=2, **settings)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b)


def test_without_validation_all_epochs_count_and_tiny_data_works():
    model, facts = fit([np.array([0])], [], np.array([]), 2, width=8, epochs=3)
    assert facts["log"] == []  # nothing to learn from
    assert scores(model, [np.array([1])]).shape == (1, 2)
    _, facts = fit([np.array([0, 1])], [], np.array([]), 2, width=8, epochs=3)
    assert (facts["best_epoch"], len(facts["log"])) == (3, 3)


@pytest.mark.parametrize(
    ("batch_size", "epochs", "match"),
    [
        (
            8,
            5,
            r"the loss of SASRec became (nan|inf) at step 2 \(epoch 1, batch 2 of 4\): lower sasrec_learning_rate=1e",
        ),
        # one step: its loss is from before it
        (
            30,
            1,
            r"the loss of SASRec after the step became (nan|inf) at step 1 \(epoch 1, batch 1 of 1\): lower sasrec",
        ),
    ],
)
def test_a_loss_that_is_no_number_stops_the_training(batch_size, epochs, match):
    with pytest.raises(ValueError, match=match):
        fit(markov(30, 3), [], np.array([]), 60, width=8, learning_rate=1e30, batch_size=batch_size, epochs=epochs)


def test_a_late_failure_says_how_to_have_the_best_model_before_it(monkeypatch):
    sequences, whole, steps = markov(30, 3), sasrec.next_item_loss, 0
    settings = {"width": 8, "batch_size": 8}
    last = np.array([s[-1] for s in sequences])

    def spoilt(model, items_BT):
        nonlocal steps
        steps += model.training
        return whole(model, items_BT) * (np.nan if steps > 13 else 1.0)

    monkeypatch.setattr(sasrec, "next_item_loss", spoilt)
    training = [s[:-1] for s in sequences]
    with pytest.raises(ValueError, match=r"at step 14 \(epoch 4, batch 2 of 4\)") as failed:
        fit(training, training, last, 60, epochs=9, **settings)
    monkeypatch.undo()
    epoch, epochs = re.search(r"of epoch (\d) with sasrec_epochs=(\d)", str(failed.value)).groups()
    _, facts = fit(training, training, last, 60, epochs=int(epochs), **settings)
    assert facts["best_epoch"] == int(epoch)
