"""Training on transformers.Trainer: packed batches, the loss at supervised positions, the new rows as a parameter.

Two ways to train, each a few lines for the Trainer: `GroundingModel` holds the new rows as its only parameters
over a frozen model; `supervise` makes a whole model return its loss at the supervised positions of a packed row.

Shapes: T tokens of all samples · U tokens of a packed row, which holds once what they begin with alike · M supervised
positions · V base rows · N new rows · D model width.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import embedding
from torch.utils.data import DataLoader, Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from sidgraft import checks
from sidgraft.attention import Packing, Prefix, pack_sequences, use_packed_attention
from sidgraft.checkpoints import explain_failed_write
from sidgraft.losses import chunked_cross_entropy
from sidgraft.memory import keep_freed_memory
from sidgraft.progress import Progress
from sidgraft.prompts import Sample
from sidgraft.sids import SidVocabulary

REPORTS = ("none", "tensorboard", "mlflow", "wandb")  # where the Trainer can log, too; also the names of the packages
TENSORBOARD = "runs"  # where it puts the events of a run, in its own folder


class Samples(Dataset):
    """A list of samples as a dataset."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def pack(samples: list[Sample]) -> dict[str, Any]:
    """Lay samples end to end: a packed row, its packing, where logits are needed [M], and the targets [M].

    The logits that predict token t stand at token t - 1 of the same sample. What stands behind the last of them is
    left out, and what samples begin with alike, up to where logits are needed, stands in the row once.
    """
    targets = [np.flatnonzero(s.target_S) for s in samples]
    inputs = [s.ids_S[: max(places[-1:], default=1)] for s, places in zip(samples, targets, strict=True)]
    lengths = np.array([len(ids) for ids in inputs])
    starts = lengths.cumsum() - lengths
    predicting_M = np.concatenate([start + places - 1 for start, places in zip(starts, targets, strict=True)])
    alone_T = np.zeros(lengths.sum(), bool)
    alone_T[predicting_M] = True
    ids_1U, packing = pack_sequences(inputs, alone_T)
    return {
        "input_ids": ids_1U,
        "position_ids": packing.positions_1U,
        "packing": packing,
        "supervised": packing.rows(torch.from_numpy(predicting_M)),
        "targets": torch.from_numpy(np.concatenate([s.ids_S[s.target_S] for s in samples])),
    }


def pack_step(
    samples: list[Sample], *, rank: int = 0, world: int = 1, tokens_at_once: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """Pack one process's share of a step's samples, in parts of ``tokens_at_once``, each with its loss's weight.

    A part is as many samples as make at most so many tokens with padding to the longest, at least one; 0 makes a single
    part. Samples of several parts go by length, the longest first, so that attention pads little. Processes average
    their gradients and parts add them up, so a mean over M of all the step's targets counts ``world * M / all``: what
    comes out is the mean over all targets, as one process would form it in one part. A process without a sample of its
    own (a last step with fewer samples than processes) takes part with weight 0. Raises ValueError where there is no
    target.
    """
    samples = [sample for sample in samples if sample.target_S.any()]  # others would make a part without a mean
    if not samples:
        raise ValueError("no sample of a step has a target: raise max_length, which cuts them off.")
    parts = []
    for part in _parts(samples[rank::world], tokens_at_once):
        targets = [sum(int(s.target_S.sum()) for s in some) for some in (part, samples)]
        parts.append(pack(part or samples[:1]) | {"weight": world * targets[0] / targets[1]})
    return {"parts": parts}


def _parts(samples: list[Sample], tokens_at_once: int) -> list[list[Sample]]:
    if not tokens_at_once or len(samples) * max(map(len, samples), default=0) <= tokens_at_once:
        return [samples]
    parts: list[list[Sample]] = [[]]
    for sample in sorted(samples, key=len, reverse=True):
        if parts[-1] and (len(parts[-1]) + 1) * len(parts[-1][0]) > tokens_at_once:
            parts.append([])
        parts[-1].append(sample)
    return parts


class GroundingModel(nn.Module):
    """A frozen language model whose new rows are one parameter [N, D], used at both ends when they are tied.

    An untied head has a second parameter. The frozen model is held outside the module tree: the Trainer sees,
    saves and optimizes the rows only, in float32 whatever the model's precision.
    """

    def __init__(self, model: Any, vocabulary: SidVocabulary, rows: dict[str, torch.Tensor]) -> None:
        super().__init__()
        model.requires_grad_(False)
        model.eval()
        use_packed_attention(model)
        self.first_id, self.n_new = vocabulary.first_id, vocabulary.n_new
        self.rows = nn.Parameter(rows["rows"].clone())
        self.head_rows = nn.Parameter(rows["head_rows"].clone()) if "head_rows" in rows else None
        self._frozen = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
        if self._frozen[2].bias is not None:
            raise ValueError("the base model's output head has a bias, which grounding does not support.")

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        packing: Packing,
        supervised: torch.Tensor,
        targets: torch.Tensor,
        weight: float = 1.0,
    ) -> dict[str, torch.Tensor]:
        """Mean loss at the supervised positions over the whole extended vocabulary, times its weight."""
        decoder, text, head = self._frozen
        new_1U = (input_ids >= self.first_id) & (input_ids < self.first_id + self.n_new)
        embedded = text(input_ids.masked_fill(new_1U, 0))
        # embedding(), because the gradient of plain indexing adds up in another order each time on several threads
        own = embedding((input_ids - self.first_id).masked_fill(~new_1U, 0), self.rows).to(embedded.dtype)
        if (scale := getattr(text, "embed_scale", None)) is not None:  # Gemma's embedding multiplies what it looks up
            own = own * torch.as_tensor(scale).to(own)
        embedded = torch.where(new_1U.unsqueeze(-1), own, embedded)
        hidden_UD = _hidden(decoder, embedded, position_ids, packing, new_1U[0])
        rows_ND = self.rows if self.head_rows is None else self.head_rows
        after = self.first_id + self.n_new
        blocks = [head.weight[: self.first_id], rows_ND, head.weight[after:]]
        return {"loss": weight * chunked_cross_entropy(hidden_UD[supervised], blocks, targets)}

    def new_rows(self) -> dict[str, torch.Tensor]:
        """The rows as they are now, float32."""
        return {name: parameter.detach().float().cpu().clone() for name, parameter in self.named_parameters()}


def _hidden(
    decoder: Any, embedded_1UD: torch.Tensor, positions_1U: torch.Tensor, packing: Packing, new_U: torch.Tensor
) -> torch.Tensor:
    """Last hidden states [U, D]; the tokens before each sequence's first new one run without gradients.

    Nothing that such a token computes depends on a new row, so the backward pass has no business there.
    """
    new_T = new_U if packing.row_T is None else new_U[packing.row_T]
    seen_T = torch.zeros(packing.batch, packing.longest, dtype=torch.bool, device=new_T.device)
    seen_T = seen_T.flatten().index_copy(0, packing.padded_T, new_T).view(packing.batch, -1).cummax(dim=1).values
    first_T = ~seen_T.flatten()[packing.padded_T]
    if first_T.all() or not first_T.any():
        return decoder(
            inputs_embeds=embedded_1UD, position_ids=positions_1U, packing=packing, use_cache=False
        ).last_hidden_state[0]
    prefix = Prefix.of(packing, first_T)
    first_U = first_T if packing.first_U is None else first_T[packing.first_U]
    hidden_UD = torch.zeros_like(embedded_1UD[0])
    for part, mask_U in ((prefix.first, first_U), (prefix.rest, ~first_U)):
        at = mask_U.nonzero()[:, 0]
        with torch.set_grad_enabled(part is prefix.rest and torch.is_grad_enabled()):
            found = decoder(
                inputs_embeds=embedded_1UD[:, at], position_ids=positions_1U[:, at], packing=part, prefix=prefix,
                use_cache=False,
            )  # fmt: skip
        hidden_UD = hidden_UD.index_copy(0, at, found.last_hidden_state[0].to(hidden_UD.dtype))
    return hidden_UD


class PartsTrainer(Trainer):
    """A Trainer that runs a step in the parts that `pack_step` makes of it: memory holds one part's activations."""

    def get_train_dataloader(self) -> DataLoader:
        """Hand the whole batch of a step to every process, whose `pack_step` takes a share of it.

        Dealt out by accelerate, the last batch of an epoch would be filled up with samples seen before, and no
        process would know how many targets the others have. (The Trainer sets a sampler that knows of processes
        to pass all on in the same way.)
        """
        loader = super().get_train_dataloader()
        if self.args.world_size > 1:
            sharding: Any = loader.batch_sampler
            sharding.num_processes, sharding.process_index, sharding.even_batches = 1, 0, False
        return loader

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward of one part after the other; returns the step's loss.

        Processes, which may have different numbers of parts, add up their gradients in the last one's backward.
        """
        *earlier, last = inputs["parts"]
        losses = []
        for part in earlier:
            with self.accelerator.no_sync(model):
                losses.append(super().training_step(model, part, num_items_in_batch))
        losses.append(super().training_step(model, last, num_items_in_batch))
        return torch.stack(losses).sum()

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Those of all parts, as the Trainer estimates them."""
        count = super().floating_point_ops
        return sum(count(part) for part in inputs["parts"])


class GraftTrainer(PartsTrainer):
    """A trainer whose loss at the supervised positions comes from `supervise`'s head; batches by `pack_step`."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Hand the targets to the head, which then returns the loss in place of logits."""
        inputs = dict(inputs)
        whole: Any = self.accelerator.unwrap_model(model)  # a wrapper's attributes may be tensors, to a type checker
        head = whole.get_output_embeddings()
        head.targets = inputs.pop("targets")
        supervised, weight = inputs.pop("supervised"), inputs.pop("weight", 1.0)
        return weight * model(**inputs, logits_to_keep=supervised, use_cache=False).logits


def supervise(model: Any) -> None:
    """Make a model's head return the chunked loss when it has been given targets, and logits otherwise.

    The loss is formed inside the head's own forward, so that wrappers which gather a module's weights when it is
    called (DeepSpeed ZeRO-3) see the use, and no logits exist but a chunk of those that are supervised.
    """
    use_packed_attention(model)
    head = model.get_output_embeddings()
    if head.bias is not None:
        raise ValueError("the base model's output head has a bias, which fine-tuning does not support.")
    logits_of: Callable[[torch.Tensor], torch.Tensor] = head.forward
    head.targets = None

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if head.targets is None:
            return logits_of(hidden)
        targets, head.targets = head.targets, None
        device = hidden.device.type
        if torch.is_autocast_enabled(device):  # the last norm gives float32, in which the head's products are slow
            hidden = hidden.to(torch.get_autocast_dtype(device))
        return chunked_cross_entropy(hidden[0], [head.weight], targets)

    head.forward = forward


def check_report_to(name: str) -> None:
    """Raise ValueError for a place to log to that there is not, or whose package is not installed."""
    if checks.one_of("report_to", name, REPORTS) != "none" and importlib.util.find_spec(name) is None:
        raise ValueError(
            f"report_to={name} needs the package {name}, which is not installed: run `pip install {name}`, or leave"
            " report_to at none; the curves stand in the report in any case."
        )


def arguments(
    output: Path, *, checkpoints: bool, batch_size: int, seed: int, report_to: str = "none", **settings: Any
) -> TrainingArguments:
    """TrainingArguments with what all our training shares; ``settings`` are passed on."""
    made = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=batch_size,
        seed=seed,
        data_seed=seed,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="epoch" if checkpoints else "no",
        save_total_limit=None,  # `Checkpoints` removes older ones when a newer is whole
        report_to=report_to,
        disable_tqdm=True,
        remove_unused_columns=False,
        # lays out the next batch while the GPU works on this one; on a CPU it would only take time from it
        dataloader_num_workers=int(torch.cuda.is_available()),
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        **settings,
    )
    # Several visible GPUs without a launcher would mean DataParallel, which splits a packed row at any token.
    made._n_gpu = min(made.n_gpu, 1)
    return made


class ShowProgress(TrainerCallback):
    """Steps, loss, tokens a second and remaining time on the console; stops when loss or gradient is no number."""

    def __init__(self, what: str, tokens_per_step: float) -> None:
        self.what, self.tokens_per_step = what, tokens_per_step
        self.progress: Progress | None = None
        self.batches = 0  # of an epoch

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        self.batches = len(train_dataloader)
        self.progress = Progress(self.what, state.max_steps - state.global_step, "steps")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self.progress is None or logs is None or "loss" not in logs:
            return
        before = state.global_step - 1
        # Before the step's checkpoint, so that none holds weights that such a gradient has spoilt.
        for name, what in (("loss", "the loss"), ("grad_norm", "the gradient's norm")):
            advice = "lower learning_rate, or use precision=float32. The last checkpoint is from before that step"
            checks.finite(
                what, logs.get(name, 0.0), epoch=before // self.batches + 1, batch=before % self.batches + 1,
                batches=self.batches, advice=advice,
            )  # fmt: skip
        speed = self.tokens_per_step * (self.progress.done + 1) / (time.monotonic() - self.progress.started)
        self.progress.update(1, loss=logs["loss"], tokens_per_s=speed)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.progress is not None:
            self.progress.__exit__()


class KeepRows(TrainerCallback):
    """Keep the rows at the end of given epochs (0: before the first), for a depth sweep out of one run.

    Of several processes, which all hold the same rows, the first writes them.
    """

    def __init__(self, epochs: list[int], directory: Path) -> None:
        self.epochs, self.directory = epochs, directory

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 0 and 0 in self.epochs and state.is_world_process_zero:
            save_file(model.new_rows(), self.directory / "rows-epoch-0.safetensors")

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.epoch in self.epochs and state.is_world_process_zero:
            save_file(model.new_rows(), self.directory / f"rows-epoch-{round(state.epoch)}.safetensors")


def train(trainer: Trainer, checkpoint: str | None) -> None:
    """Train, from a checkpoint where there is one; what is printed is our own progress alone.

    Raises OSError, with what to do, when a checkpoint cannot be written; older ones stay.
    """
    trainer.remove_callback(PrinterCallback)
    keep_freed_memory()
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except (OSError, RuntimeError, SafetensorError) as error:
        explain_failed_write(Path(trainer.args.output_dir or ""), error)
        raise


def logged(state: Any) -> list[dict[str, Any]]:
    """The Trainer's log as rows of step, epoch and loss or validation figures."""
    figures = ("recall@5", "recall@10", "ndcg@5", "ndcg@10")
    keep = ("step", "epoch", "loss", "grad_norm", "learning_rate", *figures)
    rows = [row for row in state.log_history if "loss" in row or any(name in row for name in figures)]
    return [{k: row[k] for k in keep if k in row} for row in rows]


def write_training(directory: Path, training: dict[str, Any], work: Path) -> None:
    """Write `training.json` (the log, and the figures of the run), and the events of TensorBoard where there are."""
    (directory / "training.json").write_text(json.dumps(training, indent=0) + "\n", encoding="utf-8")
    if (work / TENSORBOARD).is_dir():
        shutil.copytree(work / TENSORBOARD, directory / "tensorboard")
