"""Several processes: start them with torchrun, tell them apart, gather what is sharded.

A stage that trains calls `launch`, which runs the stage's own command in every process. On several nodes there is
no such call; torchrun runs the same command there, with paths that all nodes see:

    torchrun --nnodes=2 --nproc-per-node=8 … -m sidgraft.cli finetune --token-rows=DIR … --strategy=zero3

All that a process knows of the others comes from torchrun's environment variables.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

STRATEGIES = ("none", "ddp", "zero1", "zero2", "zero3")


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """The number of this process among all; only 0 writes artifacts."""
    return int(os.environ["RANK"]) if is_launched() else 0


def world() -> int:
    """How many processes train together."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def check(strategy: str, processes: int) -> None:
    """Raise ValueError where the processes at hand cannot train by this strategy."""
    if strategy.startswith("zero"):
        try:
            import deepspeed
        except ImportError as error:
            raise ValueError(
                f"strategy={strategy} needs DeepSpeed: run `pip install 'sidgraft[deepspeed]'`, or use strategy=ddp."
            ) from error
        if is_launched() and not torch.cuda.is_available():
            # It would compile sums in shared memory first, which takes a compiler that images do not have.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if strategy == "none" and max(world(), processes) > 1:
        raise ValueError(
            f"strategy is none, but {max(world(), processes)} processes were asked for: give strategy=ddp, zero1,"
            " zero2 or zero3, or one process."
        )


def join() -> None:
    """Settle into a process that torchrun started: end with it, and clean up when it asks to end."""
    if not is_launched():
        return
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it when it is first imported

    def leave(*_: object) -> NoReturn:
        sys.exit(143)

    signal.signal(signal.SIGTERM, leave)
    if sys.platform == "linux":  # otherwise a killed stage leaves processes that go on writing its checkpoints
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def on_this_machine(processes: int) -> int:
    """How many processes ``processes`` asks for here: 0 stands for one for every visible GPU, or one without any."""
    return processes or max(torch.cuda.device_count(), 1)


def launch(stage: str, arguments: Mapping[str, Any], processes: int) -> None:
    """Run a stage's command in several processes on this machine (as many as `on_this_machine` says).

    Raises ValueError where there are fewer GPUs than processes, or with the stage's own message when it refuses its
    input, RuntimeError when a process dies.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    count = on_this_machine(processes)
    if torch.cuda.is_available() and count > torch.cuda.device_count():
        raise ValueError(
            f"processes={count}, expected at most {torch.cuda.device_count()}, one for every GPU that is visible here:"
            " ask for fewer, or give processes=0, which starts as many."
        )
    command = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={count}", "-m", "sidgraft.cli", stage]
    environment = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(torch.get_num_threads() // count, 1)))
    try:
        torchrun.run(torchrun.parse_args(command + [flag(name, value) for name, value in arguments.items()]))
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        if os.path.isfile(failure.error_file):
            raise ValueError(failure.message) from None
        raise RuntimeError(
            f"process {number} of {count} ended with exit status {failure.exitcode} (-9 is often a lack of memory);"
            " what it printed stands above."
        ) from None
    finally:  # what was set for those processes is not for others that this one starts later
        os.environ.clear()
        os.environ.update(environment)


def flag(name: str, value: Any) -> str:
    """An argument of a stage as its command takes it."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def deepspeed_config(strategy: str, *, bfloat16: bool) -> dict[str, Any] | None:
    """The DeepSpeed configuration of a strategy; None for those that need none.

    The weights stay float32 and bfloat16 is autocast, as without DeepSpeed: its own ``bf16`` setting would train
    bfloat16 weights. No module is called safe for lower precision, so gradients are averaged in float32.
    """
    if not strategy.startswith("zero"):
        return None
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": int(strategy.removeprefix("zero")),
            "stage3_gather_16bit_weights_on_model_save": True,  # whole weights, in the precision that they have
        },
        "torch_autocast": {"enabled": bfloat16, "dtype": "bfloat16", "lower_precision_safe_modules": []},
    }


def on_one_machine() -> bool:
    """Whether all processes run on this machine."""
    return not is_launched() or int(os.environ.get("LOCAL_WORLD_SIZE", world())) == world()


def machine() -> int:
    """The number of this machine among those whose processes train together; that of the first process is 0."""
    return int(os.environ.get("GROUP_RANK", 0)) if is_launched() else 0


def leads_machine() -> bool:
    """Whether this process is the first of its machine."""
    return not is_launched() or int(os.environ["LOCAL_RANK"]) == 0


def barrier() -> None:
    """Wait for all processes."""
    if world() > 1:
        torch.distributed.barrier()


def agree(flag: bool) -> bool:
    """What the first process says, for decisions that depend on a clock."""
    said = [flag]
    if world() > 1:
        torch.distributed.broadcast_object_list(said, src=0)
    return said[0]


def gather(value: Any) -> list[Any]:
    """The values of all processes, in their order."""
    values = [value] * world()
    if world() > 1:
        torch.distributed.all_gather_object(values, value)
    return values


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Within the body every process holds all weights, which ZeRO-3 shards otherwise.

    DeepSpeed's hooks, which gather and release a module's weights around its call, are set aside meanwhile: the
    processes may then call the model a different number of times, as in decoding, and nothing is released early.
    """
    sharded = [p for p in model.parameters() if hasattr(p, "ds_id")]
    if not sharded:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded):
        hooks = [(module, module._forward_hooks, module._forward_pre_hooks) for module in model.modules()]
        for module, *_ in hooks:
            module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        try:
            yield
        finally:
            for module, after, before in hooks:
                module._forward_hooks, module._forward_pre_hooks = after, before
