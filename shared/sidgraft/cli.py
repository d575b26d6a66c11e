"""The command line: `sidgraft STAGE --help`. Each command is made from the signature of its stage."""

from __future__ import annotations

import importlib
import sys

# name -> (module with one public function of that name, one line of help). The stage's module is imported only
# when it is asked for, so that `sidgraft --help` is quick and `prepare` does not load torch.
STAGES: dict[str, tuple[str, str]] = {
    "prepare": ("sidgraft.stages.prepare", "read a catalog and interactions, check and split them"),
    "embed": ("sidgraft.stages.embed", "embed the item texts, or take your own vectors"),
    "quantize": ("sidgraft.stages.quantize", "quantize the embeddings into unique Semantic IDs"),
    "expand": ("sidgraft.stages.expand", "add the ID tokens to a language model and initialize their rows"),
    "ground": ("sidgraft.stages.ground", "train the new rows alone to mean what their items are"),
    "finetune": ("sidgraft.stages.finetune", "fine-tune the model on next-item prediction"),
    "evaluate": ("sidgraft.stages.evaluate", "recommend under the trie and measure, beside the baselines"),
    "diagnose": ("sidgraft.stages.diagnose", "diagnose the geometry of the new rows"),
    "report": ("sidgraft.stages.report", "write one HTML page and the tables"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one stage from the command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if argv[0] in ("-V", "--version"):
        from sidgraft import __version__

        print(f"sidgraft {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in STAGES:
        print(f"sidgraft: no stage is called {name!r}; the stages are: {', '.join(STAGES)}.", file=sys.stderr)
        return 2
    return _run(name, rest)


def _usage() -> str:
    lines = [f"  {name:<10} {text}" for name, (_, text) in STAGES.items()]
    return "usage: sidgraft STAGE [options]\n\n" + "\n".join(lines) + "\n\n`sidgraft STAGE --help` shows its options."


def _run(name: str, rest: list[str]) -> int:
    from jsonargparse import ArgumentParser

    stage = getattr(importlib.import_module(STAGES[name][0]), name)
    parser = ArgumentParser(prog=f"sidgraft {name}", description=STAGES[name][1])
    parser.add_function_arguments(stage, as_positional=False)
    arguments = parser.parse_args(rest)
    try:
        summary = stage(**vars(arguments))
    except (ValueError, OSError) as error:
        print(f"sidgraft {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nsidgraft {name}: stopped; nothing was written.", file=sys.stderr)
        return 130
    for key, value in summary.items():
        print(f"{key}: {value}")
    return 0
