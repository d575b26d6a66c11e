"""The training step that the stages run, for benchmarks that time it without a Trainer's loop around it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device

from sidgraft.memory import keep_freed_memory
from sidgraft.prompts import Sample
from sidgraft.training import PartsTrainer, arguments, pack_step

AT_ONCE = 16384  # tokens_at_once of the stages


def trainer(kind: type[PartsTrainer], model: Any, *, bf16: bool = False) -> PartsTrainer:
    """The Trainer that a stage makes of a model, with nothing to train on.

    What is freed stays in this process from here on, as it does where a stage trains: also for a peer beside it.
    """
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as work:
        settings = arguments(Path(work), checkpoints=False, batch_size=1, seed=0, max_steps=1, bf16=bf16)
        return kind(model=model, args=settings)


def batch(of: PartsTrainer, group: list[Sample], at_once: int = AT_ONCE) -> dict[str, Any]:
    """A step's samples as the Trainer's loader hands them over: packed in parts, on its device."""
    moved: Any = send_to_device(pack_step(group, tokens_at_once=at_once), of.args.device)
    return moved


def stage_step(of: PartsTrainer) -> Callable[[dict[str, Any]], float]:
    """Forward and backward of a batch, under autocast where the Trainer has it; gives the loss.

    Prepares the trainer's model: its own forward is under autocast from here on.
    """
    model = of.accelerator.prepare(of.model)
    of.current_gradient_accumulation_steps = 1  # as train() sets it
    return lambda given: of.training_step(model, given).item()


def update(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """What the stages' settings do behind each backward pass, for a peer's model as well."""
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()
