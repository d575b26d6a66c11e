"""Variants of a study: names become arguments, mistakes are told."""

import pytest

from sidgraft.variants import depth, plan_variants


def test_each_variant_is_planned_once_a_seed():
    plan = plan_variants(["mean", "centroid-shuffled", "gaussian+gti-text-to-sid"], [0.0, 7.0])
    found = [(e["variant"], e["initialization"], e["corpus"], e["seed"]) for e in plan]
    assert found == [
        ("mean", "mean", "none", 0),
        ("mean", "mean", "none", 7),
        ("centroid-shuffled", "centroid-shuffled", "none", 0),
        ("centroid-shuffled", "centroid-shuffled", "none", 7),
        ("gaussian+gti-text-to-sid", "gaussian", "gti-text-to-sid", 0),
        ("gaussian+gti-text-to-sid", "gaussian", "gti-text-to-sid", 7),
    ]
    assert all(type(entry["seed"]) is int for entry in plan)  # a pipeline's list makes them floats
    assert len({entry["label"] for entry in plan}) == 6


@pytest.mark.parametrize(
    ("name", "corpus", "tasks"),
    [
        ("mean", "none", "next-item"),
        ("mean+lc-rec", "none", "lc-rec"),
        ("centroid+gti", "gti", "next-item"),
        ("centroid+cpt+lc-rec", "cpt", "lc-rec"),
        ("mean+next-item,titles-to-sid:0.5", "none", "next-item,titles-to-sid:0.5"),
    ],
)
def test_a_name_says_the_corpus_and_the_tasks(name, corpus, tasks):
    (entry,) = plan_variants([name], [0])
    assert (entry["corpus"], entry["tasks"]) == (corpus, tasks)


@pytest.mark.parametrize(
    ("name", "corpus", "rows_epoch", "grounding", "tasks"),
    [
        ("mean+gti", "gti", -1, "none", "next-item"),
        ("mean+gti+unfrozen", "gti", -1, "gti", "next-item"),
        ("mean+gti+unfrozen+lc-rec", "gti", -1, "gti", "lc-rec"),
        ("centroid+cpt@4+unfrozen", "cpt", 4, "cpt", "next-item"),
        ("mean+gti@0+unfrozen", "none", -1, "gti", "next-item"),  # the second phase alone
    ],
)
def test_unfrozen_trains_all_weights_on_the_corpus_before_the_tasks(name, corpus, rows_epoch, grounding, tasks):
    (entry,) = plan_variants([name], [0])
    found = (entry["corpus"], entry["rows_epoch"], entry["grounding"], entry["tasks"])
    assert found == (corpus, rows_epoch, grounding, tasks)


def test_unfrozen_or_not_they_share_the_grounding_of_the_rows():
    plan = plan_variants(["mean+gti@2", "mean+gti+unfrozen"], [0])
    assert len({(entry["start"], entry["keep_epochs"]) for entry in plan}) == 1


@pytest.mark.parametrize("order", [1, -1])
def test_nothing_is_grounded_where_zero_is_the_only_depth(order):
    """Of mean and gti all want epoch 0; of centroid and cpt another wants epoch 2, of gaussian and gti the last."""
    alone = ["mean", "mean+gti@0", "mean+gti@0+unfrozen", "mean+gti@0+lc-rec"]
    shared = ["centroid+cpt@0", "centroid+cpt@2", "gaussian+gti@0+unfrozen", "gaussian+gti"]
    plan = {entry["variant"]: entry for entry in plan_variants([*alone, *shared][::order], [3])}
    told = ("corpus", "keep_epochs", "rows_epoch", "start")
    for name in alone:
        assert [plan[name][key] for key in told] == ["none", "", -1, "mean, seed 3"]
    assert [plan[name]["grounding"] for name in alone] == ["none", "none", "gti", "none"]
    assert plan["mean+gti@0+lc-rec"]["tasks"] == "lc-rec"
    assert [[plan[name][key] for key in told] for name in shared] == [
        ["cpt", "0,2", 0, "centroid+cpt, seed 3"],
        ["cpt", "0,2", 2, "centroid+cpt, seed 3"],
        ["gti", "0", 0, "gaussian+gti, seed 3"],
        ["gti", "0", -1, "gaussian+gti, seed 3"],
    ]
    assert plan["gaussian+gti@0+unfrozen"]["grounding"] == "gti"


def test_depths_of_one_corpus_share_everything_up_to_the_grounding():
    plan = plan_variants(["centroid+cpt@4", "centroid+cpt@0+lc-rec", "centroid+cpt", "mean+cpt@1", "centroid"], [0, 1])
    found = {
        entry["variant"]: (entry["keep_epochs"], entry["rows_epoch"], entry["start"])
        for entry in plan
        if entry["seed"] == 1
    }
    assert found == {
        "centroid+cpt@4": ("0,4", 4, "centroid+cpt, seed 1"),
        "centroid+cpt@0+lc-rec": ("0,4", 0, "centroid+cpt, seed 1"),
        "centroid+cpt": ("0,4", -1, "centroid+cpt, seed 1"),
        "mean+cpt@1": ("1", 1, "mean+cpt, seed 1"),
        "centroid": ("", -1, "centroid, seed 1"),
    }
    assert depth("centroid+cpt@4+lc-rec") == ("centroid+cpt+lc-rec", 4)
    assert depth("centroid+cpt") is None


@pytest.mark.parametrize(
    ("variants", "seeds", "message"),
    [
        (["centroyd"], [0], "Did you mean centroid?"),
        (["mean+gtx"], [0], "Did you mean gti?"),
        (["mean+lc-rek"], [0], "Did you mean lc-rec?"),
        (["mean+lc-rec+gti"], [0], "in this order"),
        (["mean+gti+cpt"], [0], "in this order"),
        (["mean+next-item:0"], [0], "the weight of task next-item is '0'"),
        (["mean+cpt@"], [0], "a whole number of epochs behind @"),
        (["mean+cpt@1.5"], [0], "a whole number of epochs behind @"),
        (["mean@1"], [0], "the initialization of variant 'mean@1'"),
        (["mean+none@1"], [0], "a corpus before @1"),
        (["mean+unfrozen"], [0], "in this order"),
        (["mean+none+unfrozen"], [0], "a corpus before +unfrozen"),
        (["mean+gti+lc-rec+unfrozen"], [0], "in this order"),
        (["mean+unfrozn"], [0], "Did you mean unfrozen?"),
        (["mean", "mean"], [0], "variants holds mean more than once"),
        (["mean"], [1, 1], "seeds holds 1 more than once"),
        (["mean"], [0.5], "expected whole numbers"),
        ([], [0], "at least one"),
        (["mean"], [], "at least one"),
    ],
)
def test_mistakes_are_told(variants, seeds, message):
    with pytest.raises(ValueError) as error:
        plan_variants(variants, seeds)
    assert message in str(error.value)


def test_the_names_are_those_of_the_stages():
    """The plan refuses names early; the stages must know each name it lets through, and no other."""
    from sidgraft.objectives import MIXTURES, TASKS
    from sidgraft.signatures import signature
    from sidgraft.variants import CORPORA, INITIALIZATIONS

    texts = {p.name: p.text for stage in ("expand", "ground") for p in signature(stage).parameters}
    for name in INITIALIZATIONS:
        assert name in texts["initialization"]
    for name in CORPORA:
        assert name in texts["corpus"]
    texts = {p.name: p.text for p in signature("finetune").parameters}
    for name in (*TASKS, *MIXTURES):
        assert name in texts["tasks"]
