"""Fine-tune the whole model on next-item prediction. Run: sidgraft finetune --help."""

from __future__ import annotations

import shutil
from typing import Any

from sidgraft import artifacts, checks
from sidgraft.models import load_grafted
from sidgraft.progress import say
from sidgraft.prompts import NextItem
from sidgraft.sequences import read_sequences
from sidgraft.sids import codes_array
from sidgraft.training import (
    DTYPES,
    GraftTrainer,
    Samples,
    SaveByTheClock,
    ShowProgress,
    arguments,
    last_checkpoint,
    logged,
    pack,
    supervise,
    train,
    working_directory,
    write_training,
)
from sidgraft.trie import build_trie
from sidgraft.validation import ValidateEachEpoch, best_epoch, finished


def finetune(
    token_rows: str,
    semantic_ids: str,
    interactions: str,
    out: str,
    *,
    epochs: int = 12,
    learning_rate: float = 1e-5,
    weight_decay: float = 0.01,
    warmup: float = 0.1,
    batch_size: int = 16,
    max_length: int = 1024,
    patience: int = 5,
    validation_users: int = 0,
    validation_beams: int = 10,
    precision: str = "bfloat16",
    gradient_checkpointing: bool = False,
    seed: int = 0,
    checkpoints: str = "",
) -> dict[str, Any]:
    """Fine-tune all weights on the users' histories and keep the epoch with the best validation Recall@5.

    Args:
        token_rows: Directory of the token_rows artifact from expand or ground.
        semantic_ids: Directory of the semantic_ids artifact.
        interactions: Directory of the interactions artifact.
        out: Directory to write the model artifact to.
        epochs: Most passes over the users.
        learning_rate: Learning rate of AdamW after warmup.
        weight_decay: Weight decay of AdamW.
        warmup: Share of the planned steps with a rising learning rate; constant afterwards.
        batch_size: Users in an optimizer step.
        max_length: Longest sequence in tokens; the oldest items are cut first.
        patience: Stop after this many epochs without a better validation Recall@5.
        validation_users: Users whose validation target is decoded after each epoch, a sample; 0 takes all.
        validation_beams: Beams of that decoding.
        precision: bfloat16 (autocast over float32 weights) or float32.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, more time.
        seed: Seed of the data order and of dropout.
        checkpoints: Directory for resumable checkpoints; empty makes none.
    """
    autocast = DTYPES[checks.one_of("precision", precision, DTYPES)]
    checks.positive(epochs=epochs, learning_rate=learning_rate, batch_size=batch_size, patience=patience)
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup is {warmup}, expected a share of the planned steps, from 0 to below 1.")
    checks.not_negative(weight_decay=weight_decay, validation_users=validation_users)
    if validation_beams < 5:
        raise ValueError(
            f"validation_beams is {validation_beams}, expected at least 5: the best epoch has the best Recall@5."
        )
    settings = {
        "epochs": epochs,
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "warmup": warmup,
        "batch_size": batch_size,
        "max_length": max_length,
        "patience": patience,
        "validation_users": validation_users,
        "validation_beams": validation_beams,
        "precision": precision,
        "gradient_checkpointing": gradient_checkpointing,
        "seed": seed,
    }
    inputs = {
        "token_rows": artifacts.load(token_rows, "token_rows/v1"),
        "semantic_ids": artifacts.load(semantic_ids, "semantic_ids/v1"),
        "interactions": artifacts.load(interactions, "interactions/v1"),
    }
    items = inputs["semantic_ids"].read_table("semantic_ids.parquet")
    codes_NL = codes_array(items)
    sequences = read_sequences(inputs["interactions"], items["item_id"].to_pylist())
    users = sequences.users_with("valid", validation_users)
    if not len(users):
        raise ValueError(
            "no user has a validation target: give longer histories, or another split in `sidgraft prepare`."
        )

    with (  # the checkpoints go when the artifact stands
        working_directory(checkpoints, f"finetune-{artifacts.run_digest(settings, inputs)}", out) as work,
        artifacts.create(out, "model/v1", stage="finetune", arguments=settings, inputs=inputs) as draft,
    ):
        model, tokenizer, vocabulary = load_grafted(inputs["token_rows"], DTYPES["float32"])
        supervise(model)
        prompts = NextItem(tokenizer, vocabulary, max_length)
        tokens_NS = vocabulary.item_tokens(codes_NL)
        samples = [prompts.sample(tokens_NS[rows]) for rows in sequences.training()]
        tokens = sum(map(len, samples))
        say(f"fine-tuning on {len(samples)} users, {tokens / len(samples):.0f} tokens each, on average")
        validation = ValidateEachEpoch(
            build_trie(codes_NL),
            vocabulary,
            [prompts.prompt(tokens_NS[sequences.history(user, "valid")]) for user in users],
            [sequences.target(user, "valid") for user in users],
            beams=validation_beams,
            patience=patience,
            autocast=autocast if precision == "bfloat16" else None,
            best=work / "best",
        )
        progress = ShowProgress("finetune", tokens / len(samples) * min(batch_size, len(samples)))
        trainer = GraftTrainer(
            model=model,
            args=arguments(
                work,
                checkpoints=bool(checkpoints),
                batch_size=batch_size,
                seed=seed,
                num_train_epochs=epochs,
                learning_rate=learning_rate,
                weight_decay=weight_decay,
                warmup_steps=warmup,
                lr_scheduler_type="constant_with_warmup",
                bf16=precision == "bfloat16",
                activation_checkpointing=gradient_checkpointing,
            ),
            train_dataset=Samples(samples),
            data_collator=pack,
            callbacks=[validation, progress] + ([SaveByTheClock()] if checkpoints else []),
        )
        checkpoint = last_checkpoint(work)
        if checkpoint and finished(checkpoint, epochs, patience):
            trainer.state = trainer.state.load_from_json(f"{checkpoint}/trainer_state.json")
        else:
            train(trainer, checkpoint)
        best = best_epoch(trainer.state.log_history)
        shutil.copytree(work / "best", draft.path, dirs_exist_ok=True)
        tokenizer.save_pretrained(draft.path)
        vocabulary.save(draft.path)
        shutil.copy(inputs["token_rows"].path / "base_model.json", draft.path / "base_model.json")
        # The papers count optimizer steps from 0: the end of the first of 1398-step epochs is step 1397.
        figures = {"t_star": best["step"] - 1, "best_epoch": round(best["epoch"]), "best_recall@5": best["recall@5"]}
        write_training(draft.path, {"log": logged(trainer.state), **figures})
        draft.metadata.update(
            users=len(samples), tokens=tokens, steps=trainer.state.global_step, validation_users=len(users), **figures
        )
        return dict(draft.metadata)
