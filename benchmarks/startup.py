"""How long commands and stages take before they begin. Run: python benchmarks/startup.py [--quick] [--json].

Each is a process of its own: `sidgraft --help` against half a second, and the import of every stage, beside those of
torch and transformers that most of it is. What must not be loaded is checked as well.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from measure import medians, options, report

from sidgraft.signatures import STAGES

WITHOUT_TORCH = ("prepare", "report")  # the image of these stages has none


def main() -> None:
    args = options(__doc__)
    stages = ("prepare", "report", "quantize", "finetune") if args.quick else STAGES
    commands = {
        "sidgraft --help": ["-m", "sidgraft.cli", "--help"],
        "python": ["-c", "pass"],
        "import torch": ["-c", "import torch"],
        "import transformers.Trainer": ["-c", "from transformers import Trainer"],
    }
    commands |= {f"import {stage}": ["-c", f"import sidgraft.stages.{stage}"] for stage in stages}
    seconds = medians({name: lambda c=c: run(c) for name, c in commands.items()}, 1 if args.quick else 3)
    report(
        args,
        "startup",
        {"half a second, for sidgraft --help": (0.5 / seconds["sidgraft --help"], 1)},
        equal={f"{stage} loads no torch": not loads(stage, "torch") for stage in WITHOUT_TORCH},
        roof={"share of torch's own import in quantize's": seconds["import torch"] / seconds["import quantize"]},
        seconds=seconds,
        about="wall time of new processes, files cached",
    )


def run(command: list[str]) -> Any:
    return subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True).stdout


def loads(stage: str, module: str) -> bool:
    """Whether importing a stage imports a module, too."""
    return run(["-c", f"import sys, sidgraft.stages.{stage}; print({module!r} in sys.modules)"]).strip() == "True"


if __name__ == "__main__":
    main()
