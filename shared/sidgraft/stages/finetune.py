"""Fine-tune the whole model on next-item prediction. Run: sidgraft finetune --help."""

from __future__ import annotations

from typing import Any


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
        validation_users: Users whose validation target is decoded after each epoch; 0 takes all.
        validation_beams: Beams of that decoding.
        precision: bfloat16 (autocast over float32 weights) or float32.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, more time.
        seed: Seed of the data order and of dropout.
        checkpoints: Directory for resumable checkpoints; empty makes none.
    """
    raise NotImplementedError
