"""docs/method.md: settings and values are those of the stages, variants can be planned, and no choice is missing."""

import re
from pathlib import Path

import pytest

from sidgraft.adapters import MODES
from sidgraft.beam import SCORES
from sidgraft.catalog import TEXT_QUALITIES
from sidgraft.distributed import STRATEGIES
from sidgraft.signatures import TRAINING, signature
from sidgraft.stages.expand import SCALES
from sidgraft.stages.prepare import SPLITS
from sidgraft.stages.quantize import FITS, REDUCTIONS
from sidgraft.variants import CORPORA, INITIALIZATIONS, plan_variants

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+)`", TEXT)
SETTINGS = {name for code in CODE for name in re.findall(rf"\b(?:{'|'.join(TRAINING)})_[a-z_]+", code)}
VARIANTS = {code for code in CODE if re.match(rf"(?:{'|'.join(INITIALIZATIONS)})\+", code)}


def test_every_setting_is_one_of_a_stage():
    assert len(SETTINGS) > 50
    known = {f"{stage}_{parameter.name}" for stage in TRAINING for parameter in signature(stage).parameters}
    assert sorted(SETTINGS - known) == []


def test_every_variant_can_be_planned():
    assert {"gaussian+gti", "centroid+gti", "centroid+cpt@0", "mean+gti+unfrozen"} <= VARIANTS
    assert len(plan_variants(sorted(VARIANTS), [0])) == len(VARIANTS)


@pytest.mark.parametrize(
    ("setting", "choices"),
    [
        ("prepare_split", SPLITS),
        ("prepare_text_quality", TEXT_QUALITIES),
        ("quantize_method", tuple(FITS)),
        ("quantize_fit", FITS["residual-kmeans"]),
        ("quantize_reduction", REDUCTIONS),
        ("expand_scale", SCALES),
        ("ground_corpus", CORPORA),
        ("finetune_mode", MODES),
        ("finetune_strategy", STRATEGIES),
        ("evaluate_score", SCORES),
    ],
)
def test_the_values_of_a_setting_are_those_that_its_stage_takes(setting, choices):
    """`setting=a`, `b` names two; the default, which needs no naming, may be missing."""
    lists = re.findall(rf"`{setting}=([^`]+)`((?:, `[a-z0-9-]+`)*)", TEXT)
    named = {name for first, others in lists for name in (first, *re.findall(r"`([^`]+)`", others))}
    stage, name = setting.split("_", 1)
    (default,) = [p.default for p in signature(stage).parameters if p.name == name]
    assert named | {default} == set(choices)


@pytest.mark.parametrize("choices", [INITIALIZATIONS, CORPORA])
def test_no_part_of_a_variant_is_missing(choices):
    named = {word for code in CODE for word in re.split(r"[=+@, ]", code)}
    assert set(choices) <= named


def test_every_section_that_the_code_cites_is_there():
    sections = {n for heading in re.findall(r"^## ([\d and]+)\.", TEXT, re.M) for n in re.findall(r"\d+", heading)}
    files = [*(ROOT / "shared").rglob("*.py"), *(ROOT / "docs" / "decisions").glob("*.md")]
    cited = {n for file in files for n in re.findall(r"METHOD (\d+)", file.read_text(encoding="utf-8"))}
    assert len(cited) >= 4
    assert cited <= sections
