"""Multi-task fine-tuning: which samples an epoch holds, what they ask, what is supervised, and that nothing leaks."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from sidgraft import artifacts, corpora, objectives, training
from sidgraft.mixtures import Mixture, draws
from sidgraft.models import add_tokens, load_base_tokenizer
from sidgraft.sequences import read_sequences
from sidgraft.stages.finetune import finetune
from sidgraft.stages.ground import ground

SETTINGS = {"epochs": 2, "patience": 2, "learning_rate": 5e-3, "batch_size": 8, "precision": "float32"}


def run(shop, out, **settings):
    inputs = {name: shop[name] for name in ("token_rows", "catalog", "semantic_ids", "interactions")}
    return finetune(**inputs, out=str(out), **(SETTINGS | settings))


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("next-item", {}),
        ("next-item:3", {}),
        ("next-item,titles-to-sid", {"titles-to-sid": 1.0}),
        ("next-item:2, gti:1, cpt:0.5", {"gti": 0.5, "cpt": 0.25}),
        (
            "lc-rec",
            dict.fromkeys(("gti-text-to-sid", "gti-sid-to-text", "history-to-title", "titles-to-sid"), 1.0),
        ),
    ],
)
def test_weights_are_relative_to_next_item(text, weights):
    assert objectives.parse_tasks(text) == weights


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("next-itm", "Did you mean next-item?"),
        ("lc-rek", "Did you mean lc-rec?"),
        ("titles-to-sid:1", "expected next-item among them"),
        ("next-item,gti,gti", "gti more than once"),
        ("next-item,gti:-1", "the weight of task gti is '-1'"),
        ("next-item,gti:much", "the weight of task gti is 'much'"),
        ("next-item,gti:nan", "the weight of task gti is 'nan'"),
        ("next-item,", "a task is ''"),
    ],
)
def test_mistakes_in_tasks_are_told(text, message):
    with pytest.raises(ValueError, match=r"expected|more than once") as error:
        objectives.parse_tasks(text)
    assert message in str(error.value)


def test_draws_pass_through_a_pool_before_anything_comes_again():
    walk = np.concatenate([draws(7, first, 5, [3]) for first in range(0, 35, 5)])
    rounds = walk.reshape(5, 7)
    assert all(sorted(part) == list(range(7)) for part in rounds)
    assert len({tuple(part) for part in rounds}) > 1
    assert draws(7, 2, 30, [3]).tolist() == walk[2:32].tolist()
    assert draws(7, 0, 7, [4]).tolist() != walk[:7].tolist()


def test_an_epoch_holds_all_users_and_the_weighted_number_of_each_task():
    pools = {"a": (list(range(100, 150)), 0.5), "b": (list(range(200, 203)), 1.2)}
    mixture = Mixture(list(range(10)), pools, seed=0)
    seen = Counter()
    for epoch in range(10):
        mixture.set_epoch(epoch)
        found = list(mixture)
        assert len(found) == len(mixture) == 10 + 5 + 12
        assert found[:10] == list(range(10))
        assert Counter(value // 100 for value in found) == {0: 10, 1: 5, 2: 12}
        seen.update(found)
    assert all(seen[item] == 1 for item in range(100, 150))  # ten epochs of 5: the pool of 50 once
    assert all(seen[item] == 40 for item in range(200, 203))
    mixture.set_epoch(3)
    third = list(mixture)
    again = Mixture(list(range(10)), dict(reversed(pools.items())), seed=0)
    again.set_epoch(3)
    assert sorted(again) == sorted(third)  # neither what came before nor the order of tasks matters
    assert sorted(Mixture(list(range(10)), pools, seed=1)) != sorted(Mixture(list(range(10)), pools, seed=0))


def test_grounding_epochs_come_first_and_hold_the_corpus_alone():
    pools = {"a": (list(range(100, 150)), 0.5)}
    plain = Mixture(list(range(10)), pools, seed=0)
    mixture = Mixture(list(range(10)), pools, grounding=list(range(300, 310)), grounding_epochs=2, seed=0)
    epochs = []
    for epoch in range(4):
        mixture.set_epoch(epoch)
        epochs.append(list(mixture))
    assert Counter(epochs[0] + epochs[1]) == dict.fromkeys(range(300, 310), 3)
    for epoch in range(2):
        plain.set_epoch(epoch)
        assert epochs[2 + epoch] == list(plain)


def test_a_task_without_a_sample_is_refused():
    with pytest.raises(ValueError, match="no sample for cpt"):
        Mixture([1, 2], {"cpt": ([], 1.0)}, seed=0)


@pytest.fixture(scope="module")
def grafted():
    tokenizer = load_base_tokenizer("tiny")
    return tokenizer, add_tokens(tokenizer, [4, 3, 2])


def catalog(titles):
    rows = [
        {"item_id": str(i), "text": f"text {i}", "title": title, "brand": None, "category": None, "price": None,
         "description": None}
        for i, title in enumerate(titles)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, artifacts.SCHEMAS["catalog/v1"]["catalog.parquet"])


SIDS = ["<|sid_begin|><s_a_0><s_b_1><s_c_0><|sid_end|>", "<|sid_begin|><s_a_3><s_b_2><s_c_1><|sid_end|>",
        "<|sid_begin|><s_a_2><s_b_0><s_c_0><|sid_end|>"]  # fmt: skip
ASKED = "user\nA user chose these items, in this order:"


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (
            "history-to-title",
            [
                (f"{ASKED} {SIDS[0]}\nWhat is the title of the item that comes next?", "Comb"),
                (f"{ASKED} {SIDS[0]}{SIDS[1]}\nWhat is the title of the item that comes next?", "text 2"),
                (f"{ASKED} {SIDS[1]}\nWhat is the title of the item that comes next?", "Soap"),
            ],
        ),
        (
            "titles-to-sid",
            [
                (f"{ASKED}\n- Soap\nWhich item comes next?", SIDS[1]),
                (f"{ASKED}\n- Soap\n- Comb\nWhich item comes next?", SIDS[2]),
                (f"{ASKED}\n- Comb\nWhich item comes next?", SIDS[0]),
            ],
        ),
    ],
)
def test_a_history_task_asks_for_every_item_but_the_first_and_supervises_the_answer(grafted, task, expected):
    tokenizer, vocabulary = grafted
    tokens = vocabulary.item_tokens(np.array([[0, 1, 0], [3, 2, 1], [2, 0, 0]]))
    histories = [np.array([0, 1, 2]), np.array([2]), np.array([1, 0])]  # the second has nothing to ask for
    about = (tokenizer, catalog(["Soap", "Comb", None]), histories, tokens)
    samples = corpora.corpus(task, *about, max_length=500)
    assert len(samples) == len(expected)
    for sample, (question, answer) in zip(samples, expected, strict=True):
        text = tokenizer.decode(sample.ids_S)
        assert f"{question}<|im_end|>\n<|im_start|>assistant\n{answer}" in text
        assert text.endswith(answer)
        assert tokenizer.decode(sample.ids_S[sample.target_S]) == answer


@pytest.mark.parametrize("task", objectives.HISTORY_TASKS)
def test_long_histories_lose_their_oldest_items_and_too_short_a_length_is_refused(grafted, task):
    tokenizer, vocabulary = grafted
    tokens = vocabulary.item_tokens(np.array([[0, 1, 0], [3, 2, 1], [2, 0, 0]]))
    about = (tokenizer, catalog(["Soap", "Comb", "Towel"]), [np.tile([0, 1, 2], 30)], tokens)
    whole = corpora.corpus(task, *about, max_length=10_000)
    cut = corpora.corpus(task, *about, max_length=200)
    for long, short in zip(whole, cut, strict=True):
        assert len(short) == len(long) if len(long) <= 200 else 200 - 12 < len(short) <= 200
        answer = long.ids_S[long.target_S].tolist()
        assert short.ids_S[short.target_S].tolist() == answer
        tail = len(short) - 130  # what is kept is the end of the history
        assert tail <= 0 or short.ids_S[-tail:].tolist() == long.ids_S[-tail:].tolist()
    with pytest.raises(ValueError, match="max_length is 60, but the task"):
        corpora.corpus(task, *about, max_length=60)


@pytest.mark.parametrize("task", [*objectives.HISTORY_TASKS, "cpt"])
def test_no_sample_knows_a_validation_or_test_item(shop, grafted, tmp_path, task):
    """Items 20..23 are validation and test items of everybody, and in no training part."""
    rows = [
        {"user_id": str(u), "item_ids": [f"i{i:02d}" for i in [u, u + 1, u + 2, 20 + u % 4, 20 + (u + 1) % 4]],
         "train_length": 3, "valid_position": 3, "test_position": 4}
        for u in range(10)
    ]  # fmt: skip
    schema = artifacts.SCHEMAS["interactions/v1"]["interactions.parquet"]
    with artifacts.create(tmp_path / "interactions", "interactions/v1", stage="prepare", arguments={}) as draft:
        draft.write_table("interactions.parquet", pa.Table.from_pylist(rows, schema))
    items = artifacts.load(shop["catalog"], "catalog/v1").read_table("catalog.parquet")
    sequences = read_sequences(
        artifacts.load(tmp_path / "interactions", "interactions/v1"), items["item_id"].to_pylist()
    )
    tokenizer = grafted[0]
    vocabulary = grafted[1]
    codes = np.stack([np.arange(24) % 4, np.arange(24) // 4 % 3, np.arange(24) // 12], axis=1)
    tokens = vocabulary.item_tokens(codes)
    samples = corpora.corpus(task, tokenizer, items, sequences.training(), tokens, max_length=500)
    text = "".join(tokenizer.decode(sample.ids_S) + "\n" for sample in samples)
    for i in range(24):
        known = tokenizer.decode(tokens[i]) in text or f"number {i}\n" in text or f"number {i} |" in text
        assert known == (i < 12), i


def test_every_kind_of_sample_reaches_the_trainer_in_its_phase(shop, tmp_path, monkeypatch):
    """Two epochs of grounding, then next-item with tasks: seen where the batches are packed."""
    seen = []
    pack = training.pack
    monkeypatch.setattr(training, "pack", lambda samples: seen.extend(samples) or pack(samples))
    summary = run(
        shop, tmp_path / "model", tasks="next-item,titles-to-sid:0.5,gti-sid-to-text:0.25", grounding="gti-text-to-sid",
        grounding_epochs=2,
    )  # fmt: skip
    users, epoch = summary["users"], summary["samples"]
    assert users == 40
    assert epoch == 40 + 20 + 10
    assert len(seen) == 4 * epoch
    tokenizer = load_base_tokenizer("tiny")
    kinds = [kind(tokenizer.decode(sample.ids_S)) for sample in seen]
    assert set(kinds[: 2 * epoch]) == {"gti-text-to-sid"}
    for number in (2, 3):
        assert Counter(kinds[number * epoch : (number + 1) * epoch]) == {
            "next-item": 40, "titles-to-sid": 20, "gti-sid-to-text": 10,
        }  # fmt: skip
    log = json.loads((tmp_path / "model" / "training.json").read_text())
    steps = -(-epoch // 8)
    assert [row["step"] for row in log["log"] if "recall@5" in row] == [3 * steps, 4 * steps]  # none in grounding
    assert summary["grounding_steps"] == 2 * steps
    assert summary["best_epoch"] in (1, 2)
    assert summary["t_star"] == summary["best_epoch"] * steps - 1


def kind(text):
    if "Predict the next item" in text:
        return "next-item"
    if "Which item comes next?" in text:
        return "titles-to-sid"
    return "gti-sid-to-text" if "with Semantic ID" in text else "gti-text-to-sid"


def test_next_item_alone_is_in_the_order_of_a_plain_list(shop, tmp_path, monkeypatch):
    run(shop, tmp_path / "mixture")
    mixed = "sidgraft.stages.finetune.Mixture"

    class Plain(Mixture):
        def __getitem__(self, index):
            return self.next_item[index]

    monkeypatch.setattr(mixed, Plain)
    run(shop, tmp_path / "plain")
    assert weights_of(tmp_path / "mixture", tmp_path / "plain")


@pytest.mark.parametrize("broken_at", [4, 22])  # in the epoch of grounding, in the middle of the second of the tasks
def test_a_run_that_broke_off_goes_on_in_the_right_phase_to_the_same_weights(shop, tmp_path, monkeypatch, broken_at):
    settings = {"tasks": "next-item,titles-to-sid:0.5", "grounding": "gti"}
    run(shop, tmp_path / "whole", **settings)
    kept = training.ShowProgress.on_log

    def break_off(self, args, state, control, **others):
        if state.global_step == broken_at:
            raise KeyboardInterrupt
        kept(self, args, state, control, **others)

    monkeypatch.setattr(training.ShowProgress, "on_log", break_off)
    with pytest.raises(KeyboardInterrupt):
        run(shop, tmp_path / "out", checkpoints=str(tmp_path / "checkpoints"), checkpoint_minutes=0.0, **settings)
    assert list((tmp_path / "checkpoints").glob(f"*/checkpoint-{broken_at - 1}"))
    monkeypatch.setattr(training.ShowProgress, "on_log", kept)
    run(shop, tmp_path / "out", checkpoints=str(tmp_path / "checkpoints"), checkpoint_minutes=0.0, **settings)
    assert weights_of(tmp_path / "whole", tmp_path / "out")


def weights_of(a: Path, b: Path) -> bool:
    """Whether two models are the same, bit by bit."""
    one, other = (load_file(folder / "model.safetensors") for folder in (a, b))
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"tasks": "titles"}, "a task is 'titles'"), ({"grounding": "gtis"}, "Did you mean gti"),
     ({"grounding_epochs": 0}, "grounding_epochs=0")],
)  # fmt: skip
def test_wrong_settings_are_refused_before_anything_is_read(shop, tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        run(shop, tmp_path / "model", **wrong)


def test_fine_tuning_starts_from_the_rows_of_the_epoch_asked_for(shop, tmp_path):
    names = ("token_rows", "catalog", "semantic_ids", "interactions")
    how = {"corpus": "cpt", "precision": "float32", "learning_rate": 1e-2}
    inputs = {name: shop[name] for name in names}
    ground(**inputs, out=str(tmp_path / "deep"), epochs=3, keep_epochs="1", **how)
    ground(**inputs, out=str(tmp_path / "shallow"), epochs=1, **how)
    run(shop | {"token_rows": str(tmp_path / "deep")}, tmp_path / "a", rows_epoch=1, epochs=1)
    run(shop | {"token_rows": str(tmp_path / "shallow")}, tmp_path / "b", epochs=1)
    run(shop | {"token_rows": str(tmp_path / "deep")}, tmp_path / "c", epochs=1)
    assert weights_of(tmp_path / "a", tmp_path / "b")
    assert not weights_of(tmp_path / "a", tmp_path / "c")
    with pytest.raises(ValueError, match="the grounded rows of epoch 2 were not kept"):
        run(shop | {"token_rows": str(tmp_path / "deep")}, tmp_path / "d", rows_epoch=2)
    assert not (tmp_path / "d").exists()
