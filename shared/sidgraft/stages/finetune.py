"""Fine-tune the whole model to predict next items, or items for queries. Run: sidgraft finetune --help."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sidgraft import adapters, artifacts, checks, corpora, distributed, lease, objectives, trainjob
from sidgraft.checkpoints import Checkpoints, remote_place, working_directory
from sidgraft.devices import device, tell_if_emulated
from sidgraft.mixtures import FollowEpochs, Mixture
from sidgraft.models import load_grafted, made_for
from sidgraft.precisions import DTYPES
from sidgraft.progress import say
from sidgraft.prompts import NextItem, QueryItem, Sample
from sidgraft.queries import Queries, read_queries
from sidgraft.sequences import Sequences, check_same_items, read_sequences
from sidgraft.sids import SidVocabulary, codes_array
from sidgraft.training import (
    GraftTrainer,
    ShowProgress,
    arguments,
    check_report_to,
    logged,
    pack_step,
    supervise,
    train,
    write_training,
)
from sidgraft.trie import build_trie
from sidgraft.validation import FIGURES, Measure, ValidateEachEpoch, best_epoch, finished, ndcg_of, recall_of


def finetune(
    token_rows: str,
    catalog: str,
    semantic_ids: str,
    interactions: str,
    out: str,
    *,
    rows_epoch: int = -1,
    tasks: str = "next-item",
    grounding: str = "none",
    grounding_epochs: int = 1,
    epochs: int = 12,
    learning_rate: float = 1e-5,
    weight_decay: float = 0.01,
    warmup: float = 0.1,
    batch_size: int = 16,
    max_length: int = 1024,
    tokens_at_once: int = 16384,
    patience: int = 5,
    validation_users: int = 0,
    validation_beams: int = 10,
    precision: str = "bfloat16",
    gradient_checkpointing: bool = False,
    seed: int = 0,
    mode: str = "full",
    lora_rank: int = 8,
    lora_alpha: float = 32.0,
    lora_dropout: float = 0.05,
    strategy: str = "none",
    processes: int = 0,
    nodes: int = 1,
    checkpoints: str = "",
    checkpoint_minutes: float = 10.0,
    report_to: str = "none",
) -> dict[str, Any]:
    """Fine-tune the model on histories or on queries, and keep the epoch that is best on the validation part.

    On histories that is by Recall@5. Where the interactions come from queries with graded candidates, a sample is a
    query and an item that fits it (a good one in two samples, a maybe in one), the place of next-item is theirs, and
    the best epoch has the best composite NDCG@5.

    Args:
        token_rows: Directory of the token_rows artifact from expand or ground.
        catalog: Directory of the catalog artifact (its texts are read by tasks other than next-item).
        semantic_ids: Directory of the semantic_ids artifact.
        interactions: Directory of the interactions artifact.
        out: Directory to write the model artifact to.
        rows_epoch: Epoch of ground whose rows to start from, one of its keep_epochs; -1 takes its last rows.
        tasks: next-item; lc-rec, which mixes in gti-text-to-sid, gti-sid-to-text, history-to-title and
            titles-to-sid, each with as many samples as next-item; or a mixture of these, gti and cpt by weight, such
            as "next-item:1,titles-to-sid:0.5": in every epoch half as many samples of that task as there are users.
        grounding: Corpus on which all weights are trained before the tasks, nothing frozen: none, gti,
            gti-text-to-sid, gti-sid-to-text or cpt (GTI's second phase of grounding).
        grounding_epochs: Epochs of that, each with as many samples of the corpus as a later epoch has of the tasks.
        epochs: Most passes over the users; those of grounding come before them.
        learning_rate: Learning rate of AdamW after warmup.
        weight_decay: Weight decay of AdamW.
        warmup: Share of the planned steps with a rising learning rate; constant afterwards.
        batch_size: Samples in an optimizer step; of next-item, one sample is one user.
        max_length: Longest sequence in tokens; the oldest items are cut first.
        tokens_at_once: Tokens, padding included, that run through the model at once in a process: a step of more is
            run in parts, whose gradients add up to the same. Fewer need less memory; 0 runs every step whole, as
            zero1, zero2 and zero3 do in any case (there, more processes make a process's share smaller).
        patience: Stop after this many epochs without a better validation figure.
        validation_users: Validation users (or queries) decoded after each epoch, a sample; 0 takes all.
        validation_beams: Beams of that decoding.
        precision: bfloat16 (autocast over float32 weights) or float32.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, more time.
        seed: Seed of the data order and of dropout.
        mode: full trains all weights; lora trains adapters on the seven projections, the embedding and the head,
            over frozen weights in the given precision; qlora the same over 4-bit weights, and where this machine
            has no 4-bit layers it is lora, which the console and the artifact then say. The model that is written is
            always a plain one, adapters merged.
        lora_rank: Rank of the adapters.
        lora_alpha: The adapters' update is scaled by this over the rank.
        lora_dropout: Dropout before the adapters.
        strategy: none trains in one process; ddp in several with all weights in each; zero1, zero2 and zero3
            (DeepSpeed) shard the optimizer's state, the gradients too, the weights too.
        processes: Processes on this machine for these strategies; 0 starts one for every visible GPU. The batch
            size is that of all together.
        nodes: Machines to train on, in a task of Kubeflow Pipelines: more than one makes a TrainJob of Kubeflow Trainer
            with as many processes on each, which shares files with the task through checkpoints, a place on s3://. A
            job that fails goes on from the last of them when the task is tried again.
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
            "nodes",
            "checkpoints",
            "checkpoint_minutes",
            "report_to",
        )
    }
    check_report_to(report_to)
    _check(settings, processes=processes, nodes=nodes, checkpoint_minutes=checkpoint_minutes)
    inputs = {
        "token_rows": artifacts.load(token_rows, "token_rows/v1"),
        "catalog": artifacts.load(catalog, "catalog/v1"),
        "semantic_ids": artifacts.load(semantic_ids, "semantic_ids/v1"),
        "interactions": artifacts.load(interactions, "interactions/v1"),
    }
    data = _read(inputs, validation_users)
    if data.queries is not None:
        objectives.check_on_queries("grounding", grounding)
    weights = (objectives.parse_tasks if data.queries is None else objectives.parse_tasks_on_queries)(tasks)

    digest = artifacts.run_digest(settings, inputs)
    paths = {"token_rows": token_rows, "catalog": catalog, "semantic_ids": semantic_ids, "interactions": interactions}
    command = settings | {"checkpoint_minutes": checkpoint_minutes, "report_to": report_to}
    if nodes > 1:
        spread = {"nodes": nodes, "processes": processes, "checkpoints": checkpoints}
        trainjob.launch("finetune", paths, command, out, digest=digest, **spread)
        return dict(artifacts.load(out, "model/v1").metadata)
    lease.end_when_old("finetune")  # of a job's nodes alone
    # The checkpoints go when the artifact stands.
    with working_directory(checkpoints, f"finetune-{digest}", out) as work:
        if strategy != "none" and not distributed.is_launched():
            distributed.launch("finetune", paths | command | {"out": out, "checkpoints": checkpoints}, processes)
            return dict(artifacts.load(out, "model/v1").metadata)

        autocast = DTYPES[precision]
        tell_if_emulated(autocast)  # not by what loads the weights, which are float32
        trained_mode, why = adapters.possible(mode, autocast, device())
        if why:
            say(why)
        model, tokenizer, vocabulary = load_grafted(inputs["token_rows"], DTYPES["float32"], rows_epoch)
        if trained_mode != "full":
            adapters.adapt(
                model, trained_mode, rank=lora_rank, alpha=lora_alpha, dropout=lora_dropout, dtype=autocast, seed=seed
            )
        supervise(model)
        task = _task(data, tokenizer, vocabulary, max_length, validation_beams)
        mixture = _mixture(data, task.samples, weights, tokenizer, vocabulary, settings)
        tokens = sum(len(sample) for sample in mixture)
        say(
            f"fine-tuning on {len(data.histories)} {'users' if data.queries is None else 'queries'}, {len(mixture)}"
            f" samples an epoch of {tokens / len(mixture):.0f} tokens on average"
        )
        validation = ValidateEachEpoch(
            build_trie(data.codes_NL),
            vocabulary,
            task.prompts,
            task.measure,
            beams=validation_beams,
            patience=patience,
            autocast=autocast if precision == "bfloat16" else None,
            best=work / "best",
            grounding_epochs=mixture.grounding_epochs,
        )
        facts = made_for(inputs["token_rows"]) | {"processes": distributed.world(), "mode": trained_mode}
        remote, run = remote_place(checkpoints, work.name), artifacts.run_facts(settings, inputs)
        saved = Checkpoints(work, facts, checkpoint_minutes, remote, run)
        progress = ShowProgress("finetune", tokens / len(mixture) * min(batch_size, len(mixture)))
        callbacks = [FollowEpochs(mixture), validation, progress] + ([saved] if checkpoints else [])
        trainer = _trainer(
            model, mixture, callbacks, work, settings, checkpoints=bool(checkpoints), report_to=report_to
        )
        checkpoint = saved.last()
        if checkpoint and finished(checkpoint, epochs, patience):
            trainer.state = trainer.state.load_from_json(f"{checkpoint}/trainer_state.json")
        else:
            train(trainer, checkpoint)
        if distributed.rank() > 0:
            return {}
        with artifacts.create(out, "model/v1", stage="finetune", arguments=settings, inputs=inputs) as draft:
            shutil.copytree(work / "best", draft.path, dirs_exist_ok=True)
            tokenizer.save_pretrained(draft.path)
            vocabulary.save(draft.path)
            shutil.copy(inputs["token_rows"].path / "base_model.json", draft.path / "base_model.json")
            figures = _figures(trainer.state, mixture.grounding_epochs)
            steps = {"grounding_steps": figures.pop("grounding_steps"), "steps": trainer.state.global_step}
            write_training(draft.path, {"log": logged(trainer.state), **figures}, work)
            counts = {"users": len(data.histories), "samples": len(mixture), "tokens": tokens}
            trained = {"mode": trained_mode} | ({"why_this_mode": why} if why else {})
            draft.metadata.update(counts | steps | {"validation_users": len(data.users)} | figures | trained)
            return dict(draft.metadata)


def _check(settings: dict[str, Any], *, processes: int, nodes: int, checkpoint_minutes: float) -> None:
    """Refuse what no training can be done with, before anything is read."""
    objectives.parse_tasks(settings["tasks"])
    checks.one_of("grounding", settings["grounding"], ("none", *objectives.CORPORA))
    checks.one_of("precision", settings["precision"], DTYPES)
    above = ("epochs", "learning_rate", "batch_size", "patience", "grounding_epochs", "lora_rank", "lora_alpha")
    checks.positive(**{name: settings[name] for name in above}, nodes=nodes)
    from_zero = {
        name: settings[name] for name in ("weight_decay", "validation_users", "lora_dropout", "tokens_at_once")
    }
    checks.not_negative(**from_zero, processes=processes, checkpoint_minutes=checkpoint_minutes)
    if not 0 <= settings["warmup"] < 1:
        raise ValueError(f"warmup is {settings['warmup']}, expected a share of the planned steps, from 0 to below 1.")
    if settings["validation_beams"] < 5:
        raise ValueError(
            f"validation_beams is {settings['validation_beams']}, expected at least 5: the best epoch is that of a"
            " figure at 5."
        )
    distributed.join()
    strategy = checks.one_of("strategy", settings["strategy"], distributed.STRATEGIES)
    distributed.check(strategy, processes * nodes or nodes)
    adapters.check(checks.one_of("mode", settings["mode"], adapters.MODES), strategy)


@dataclass(frozen=True)
class _Data:
    """The items, what is known of their users or queries, and who validates (users, or queries in their place)."""

    described: pa.Table
    codes_NL: np.ndarray
    sequences: Sequences
    queries: Queries | None
    users: np.ndarray
    histories: list[np.ndarray]  # nothing in them is a validation or test item, or a query that validates or tests


def _read(inputs: dict[str, artifacts.Artifact], validation_users: int) -> _Data:
    """Read what is trained on; ValueError where nobody validates, or the artifacts are of several catalogs."""
    items = inputs["semantic_ids"].read_table("semantic_ids.parquet")
    described = inputs["catalog"].read_table("catalog.parquet")
    check_same_items(described, items)
    item_ids = items["item_id"].to_pylist()
    sequences = read_sequences(inputs["interactions"], item_ids)
    queries = read_queries(inputs["interactions"], item_ids)
    if queries is None:
        users = sequences.users_with("valid", validation_users)
    else:
        users = queries.of("valid", validation_users)
    if not len(users):
        raise ValueError(
            "no user has a validation target: give longer histories, or another split in `sidgraft prepare`."
        )
    return _Data(described, codes_array(items), sequences, queries, users, sequences.training())


@dataclass(frozen=True)
class _Task:
    """Samples to train on, the prompts that validate, and the figures of what is decoded from these."""

    samples: list[Sample]
    prompts: list[np.ndarray]
    measure: Measure


def _task(data: _Data, tokenizer: Any, vocabulary: SidVocabulary, max_length: int, validation_beams: int) -> _Task:
    """The next item of a history; an item that fits, where the data are queries."""
    tokens_NS = vocabulary.item_tokens(data.codes_NL)
    ks = [k for k in (5, 10) if k <= validation_beams]
    if data.queries is None:
        next_item = NextItem(tokenizer, vocabulary, max_length)
        return _Task(
            [next_item.sample(tokens_NS[rows]) for rows in data.histories],
            [next_item.prompt(tokens_NS[data.sequences.history(user, "valid")]) for user in data.users],
            recall_of([data.sequences.target(user, "valid") for user in data.users], ks),
        )
    fitting = QueryItem(tokenizer, vocabulary, max_length)
    texts = fitting.texts(data.queries.prompts)
    pairs = zip(*data.queries.training_pairs(), strict=True)
    return _Task(
        [fitting.sample(texts[query], tokens_NS[item]) for query, item in pairs],
        [fitting.prompt(texts[query]) for query in data.users],
        ndcg_of(data.queries, data.users, ks),
    )


def _mixture(
    data: _Data,
    samples: list[Sample],
    weights: dict[str, float],
    tokenizer: Any,
    vocabulary: SidVocabulary,
    settings: dict[str, Any],
) -> Mixture:
    """What an epoch trains on, its first one after those of grounding chosen."""

    def corpus(name: str) -> Sequence[Sample]:
        tokens_NS = vocabulary.item_tokens(data.codes_NL)
        histories, longest = data.histories, settings["max_length"]
        return corpora.corpus(name, tokenizer, data.described, histories, tokens_NS, max_length=longest)

    grounds = settings["grounding"] != "none"
    mixture = Mixture(
        samples,
        {name: (corpus(name), weight) for name, weight in weights.items()},
        grounding=corpus(settings["grounding"]) if grounds else (),
        grounding_epochs=settings["grounding_epochs"] if grounds else 0,
        seed=settings["seed"],
    )
    mixture.set_epoch(mixture.grounding_epochs)
    return mixture


def _trainer(
    model: Any,
    mixture: Mixture,
    callbacks: list[Any],
    work: Path,
    settings: dict[str, Any],
    *,
    checkpoints: bool,
    report_to: str,
) -> GraftTrainer:
    """The Trainer of all epochs, those of grounding before the others."""
    shards, bfloat16 = settings["strategy"].startswith("zero"), settings["precision"] == "bfloat16"
    return GraftTrainer(
        model=model,
        args=arguments(
            work,
            checkpoints=checkpoints,
            batch_size=settings["batch_size"],
            seed=settings["seed"],
            num_train_epochs=mixture.grounding_epochs + settings["epochs"],
            learning_rate=settings["learning_rate"],
            weight_decay=settings["weight_decay"],
            warmup_steps=settings["warmup"],
            lr_scheduler_type="constant_with_warmup",
            bf16=bfloat16 and not shards,  # DeepSpeed has an autocast of its own
            deepspeed=distributed.deepspeed_config(settings["strategy"], bfloat16=bfloat16),
            activation_checkpointing=settings["gradient_checkpointing"],
            report_to=report_to,
        ),
        train_dataset=mixture,
        data_collator=partial(
            pack_step,
            rank=distributed.rank(),
            world=distributed.world(),
            tokens_at_once=0 if shards else settings["tokens_at_once"],
        ),
        callbacks=callbacks,
    )


def _figures(state: Any, grounding_epochs: int) -> dict[str, Any]:
    """Where training was best; steps as the papers count them.

    They count optimizer steps from 0: the end of the first of 1398-step epochs is step 1397. Those of grounding are
    counted apart; all epochs have the same number of steps.
    """
    best = best_epoch(state.log_history)
    grounding_steps = grounding_epochs * best["step"] // round(best["epoch"])
    return {
        "grounding_steps": grounding_steps,
        "t_star": best["step"] - grounding_steps - 1,
        "best_epoch": round(best["epoch"]) - grounding_epochs,
    } | {f"best_{name}": best[name] for name in FIGURES if name in best}
