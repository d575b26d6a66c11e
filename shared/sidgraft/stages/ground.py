"""Ground the new rows in language, everything else frozen. Run: sidgraft ground --help."""

from __future__ import annotations

import math
import shutil
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors.torch import save_file

from sidgraft import artifacts, checks, corpora, distributed
from sidgraft.checkpoints import Checkpoints, remote_place, working_directory
from sidgraft.models import load_grafted, load_rows, made_for
from sidgraft.objectives import check_on_queries
from sidgraft.precisions import DTYPES
from sidgraft.progress import say
from sidgraft.prompts import Sample
from sidgraft.queries import has_queries
from sidgraft.sequences import check_same_items, read_sequences
from sidgraft.sids import SidVocabulary, codes_array
from sidgraft.training import (
    GroundingModel,
    KeepRows,
    PartsTrainer,
    Samples,
    ShowProgress,
    arguments,
    check_report_to,
    logged,
    pack_step,
    train,
    write_training,
)
from sidgraft.variants import CORPORA


def ground(
    token_rows: str,
    catalog: str,
    semantic_ids: str,
    interactions: str,
    out: str,
    *,
    corpus: str = "gti",
    epochs: float = 10,
    max_steps: int = 0,
    learning_rate: float = 1e-3,
    batch_size: int = 16,
    max_length: int = 1024,
    tokens_at_once: int = 16384,
    keep_epochs: str = "",
    precision: str = "bfloat16",
    seed: int = 0,
    processes: int = 1,
    checkpoints: str = "",
    checkpoint_minutes: float = 10.0,
    report_to: str = "none",
) -> dict[str, Any]:
    """Train only the new rows to connect Semantic IDs with the text of their items.

    Args:
        token_rows: Directory of the token_rows artifact from expand.
        catalog: Directory of the catalog artifact.
        semantic_ids: Directory of the semantic_ids artifact.
        interactions: Directory of the interactions artifact (read by corpus=cpt; its training part only).
        out: Directory to write the grounded token_rows artifact to.
        corpus: gti (text to ID and ID to text), gti-text-to-sid, gti-sid-to-text, cpt (histories with titles
            as running text), or none (the rows pass through unchanged).
        epochs: Passes over the corpus; may be a fraction.
        max_steps: Stop after this many optimizer steps where the epochs have more; 0 trains all epochs.
        learning_rate: Constant learning rate of AdamW (no decay, no warmup). The papers: 1e-3 for gti, 1e-4 for cpt.
        batch_size: Sequences in an optimizer step. The papers: 16 for gti on public data, 64 for cpt.
        max_length: Longest sequence in tokens. The papers: 4096 for cpt.
        tokens_at_once: Tokens, padding included, that run through the model at once: a step of more is run in parts,
            whose gradients add up to the same. Fewer need less memory; 0 runs every step whole.
        keep_epochs: Epochs, comma-separated, whose rows are kept beside the last ones, for a depth sweep.
        precision: bfloat16 or float32, of the frozen model; the rows are always float32.
        seed: Seed of the data order.
        processes: Processes on this machine that share the sequences of every step; each holds the whole model. 0
            starts one for every visible GPU.
        checkpoints: Directory for resumable checkpoints, or a place on s3://; empty makes none.
        checkpoint_minutes: Minutes between checkpoints; there is one after each epoch, too.
        report_to: Where to log the curves while they grow: none, tensorboard (the events end up in the artifact's
            folder tensorboard), mlflow or wandb (by the environment variables of each).
    """
    settings = {
        name: value
        for name, value in locals().items()
        if name
        not in (
            "token_rows",
            "catalog",
            "semantic_ids",
            "interactions",
            "out",
            "processes",
            "checkpoints",
            "checkpoint_minutes",
            "report_to",
        )
    }
    check_report_to(report_to)
    checks.one_of("corpus", corpus, CORPORA)
    dtype = DTYPES[checks.one_of("precision", precision, DTYPES)]
    checks.not_negative(max_steps=max_steps, tokens_at_once=tokens_at_once, processes=processes)
    checks.positive(epochs=epochs, learning_rate=learning_rate, batch_size=batch_size, max_length=max_length)
    kept = checks.whole_numbers("keep_epochs", keep_epochs)
    if kept and not 0 <= kept[0] <= kept[-1] <= epochs:
        raise ValueError(f"keep_epochs is {keep_epochs!r}, expected epochs from 0 to the {epochs:g} that are trained.")
    inputs = {
        "token_rows": artifacts.load(token_rows, "token_rows/v1"),
        "catalog": artifacts.load(catalog, "catalog/v1"),
        "semantic_ids": artifacts.load(semantic_ids, "semantic_ids/v1"),
        "interactions": artifacts.load(interactions, "interactions/v1"),
    }
    if has_queries(inputs["interactions"]):
        check_on_queries("corpus", corpus)
    distributed.join()
    rows_from = inputs["token_rows"]
    creating = {"kind": "token_rows/v1", "stage": "ground", "arguments": settings, "inputs": inputs}
    if corpus == "none":
        if distributed.rank() > 0:
            return {}
        with artifacts.create(out, **creating) as draft:
            _copy_vocabulary(rows_from, draft)
            shutil.copy(rows_from.path / "rows.safetensors", draft.path / "rows.safetensors")
            draft.metadata.update(corpus=corpus, steps=0)
            return dict(draft.metadata)

    # The checkpoints go when the artifact stands.
    with working_directory(checkpoints, f"ground-{artifacts.run_digest(settings, inputs)}", out) as work:
        if distributed.on_this_machine(processes) > 1 and not distributed.is_launched():
            paths = {"token_rows": token_rows, "catalog": catalog, "semantic_ids": semantic_ids}
            places = paths | {"interactions": interactions, "out": out, "checkpoints": checkpoints}
            command = settings | {"checkpoint_minutes": checkpoint_minutes, "report_to": report_to}
            distributed.launch("ground", command | places, processes)
            return dict(artifacts.load(out, "token_rows/v1").metadata)

        model, tokenizer, vocabulary = load_grafted(rows_from, dtype)
        samples = _samples(corpus, tokenizer, vocabulary, inputs, max_length)
        steps = _steps(len(samples), batch_size, epochs, max_steps, kept)
        grounding = GroundingModel(model, vocabulary, load_rows(rows_from))
        tokens = sum(map(len, samples))
        say(f"grounding on {len(samples)} sequences of {tokens / len(samples):.0f} tokens on average")
        facts = made_for(rows_from) | {"processes": distributed.world()}
        remote, run = remote_place(checkpoints, work.name), artifacts.run_facts(settings, inputs)
        saved = Checkpoints(work, facts, checkpoint_minutes, remote, run)
        progress = ShowProgress("ground", tokens / len(samples) * min(batch_size, len(samples)))
        trainer = PartsTrainer(
            model=grounding,
            args=arguments(
                work,
                checkpoints=bool(checkpoints),
                batch_size=batch_size,
                seed=seed,
                max_steps=steps,
                learning_rate=learning_rate,
                weight_decay=0.0,
                lr_scheduler_type="constant",
                report_to=report_to,
            ),
            train_dataset=Samples(samples),
            data_collator=partial(
                pack_step, rank=distributed.rank(), world=distributed.world(), tokens_at_once=tokens_at_once
            ),
            callbacks=[progress, KeepRows(kept, work)] + ([saved] if checkpoints else []),
        )
        train(trainer, saved.last())
        if distributed.rank() > 0:
            return {}
        log = logged(trainer.state)
        tenth = max(len(log) // 10, 1)
        others = {k: v for k, v in load_rows(rows_from).items() if k not in ("rows", "head_rows")}
        with artifacts.create(out, **creating) as draft:
            _copy_vocabulary(rows_from, draft)
            save_file(others | grounding.new_rows(), draft.path / "rows.safetensors")
            for rows_file in work.glob("rows-epoch-*.safetensors"):
                shutil.copy(rows_file, draft.path / rows_file.name)
            write_training(draft.path, {"log": log}, work)
            draft.metadata.update(
                corpus=corpus,
                sequences=len(samples),
                tokens=tokens,
                steps=trainer.state.global_step,
                first_loss=float(np.mean([row["loss"] for row in log[:tenth]])),
                last_loss=float(np.mean([row["loss"] for row in log[-tenth:]])),
            )
            return dict(draft.metadata)


def _steps(samples: int, batch_size: int, epochs: float, max_steps: int, kept: list[int]) -> int:
    """The optimizer steps to train: all of the epochs', or ``max_steps`` where that is fewer.

    Raises ValueError where they end before an epoch whose rows are asked for.
    """
    an_epoch = math.ceil(samples / batch_size)
    steps = min(math.ceil(epochs * an_epoch), max_steps or math.inf)
    if kept and kept[-1] * an_epoch > steps:
        raise ValueError(
            f"keep_epochs names epoch {kept[-1]}, which ends at step {kept[-1] * an_epoch}, but max_steps is"
            f" {max_steps}: expected no fewer steps, 0 for those of all epochs, or an earlier epoch."
        )
    return int(steps)


def _copy_vocabulary(rows_from: artifacts.Artifact, draft: artifacts.Draft) -> None:
    """Copy what grounding leaves as it is."""
    shutil.copytree(rows_from.path / "tokenizer", draft.path / "tokenizer")
    for name in ("sid_vocabulary.json", "base_model.json"):
        shutil.copy(rows_from.path / name, draft.path / name)


def _samples(
    name: str, tokenizer: Any, vocabulary: SidVocabulary, inputs: dict[str, artifacts.Artifact], max_length: int
) -> list[Sample]:
    items: pa.Table = inputs["catalog"].read_table("catalog.parquet")
    semantic_ids = inputs["semantic_ids"].read_table("semantic_ids.parquet")
    check_same_items(items, semantic_ids)
    tokens_NS = vocabulary.item_tokens(codes_array(semantic_ids))
    histories = read_sequences(inputs["interactions"], items["item_id"].to_pylist()).training()
    return list(corpora.corpus(name, tokenizer, items, histories, tokens_NS, max_length=max_length))
