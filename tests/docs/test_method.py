"""docs/method.md: each setting it names is one, each variant it names can be planned, and no choice is missing."""

import re
from pathlib import Path

import pytest

from sidgraft.adapters import MODES
from sidgraft.distributed import STRATEGIES
from sidgraft.signatures import TRAINING, signature
from sidgraft.variants import CORPORA, INITIALIZATIONS, plan_variants

CODE = re.findall(r"`([^`\n]+)`", (Path(__file__).parents[2] / "docs" / "method.md").read_text(encoding="utf-8"))
SETTINGS = {name for code in CODE for name in re.findall(rf"\b(?:{'|'.join(TRAINING)})_[a-z_]+", code)}
VARIANTS = {code for code in CODE if re.match(rf"(?:{'|'.join(INITIALIZATIONS)})\+", code)}


def test_every_setting_is_one_of_a_stage():
    assert len(SETTINGS) > 50
    known = {f"{stage}_{parameter.name}" for stage in TRAINING for parameter in signature(stage).parameters}
    assert sorted(SETTINGS - known) == []


def test_every_variant_can_be_planned():
    assert {"gaussian+gti", "centroid+gti", "centroid+cpt@0", "mean+gti+unfrozen"} <= VARIANTS
    assert len(plan_variants(sorted(VARIANTS), [0])) == len(VARIANTS)


@pytest.mark.parametrize("choices", [INITIALIZATIONS, CORPORA, MODES, STRATEGIES])
def test_no_choice_is_missing(choices):
    named = {word for code in CODE for word in re.split(r"[=+@, ]", code)}
    assert set(choices) <= named
