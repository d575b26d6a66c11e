"""Pipeline inputs, made from the stages' signatures: `quantize_levels` is `levels` of the stage quantize.

A pipeline lists its own inputs and the stages it runs; each setting of a stage becomes an input with the stage's
type, default and description, so that a form shows them grouped by stage and nothing is written twice.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidgraft.signatures import FILES, REQUIRED, TRAINING, Parameter, signature

TYPES = {"str": str, "int": int, "float": float, "bool": bool, "list[str]": list[str], "list[int]": list[int]}

# Stages that a pipeline runs once a variant and seed; it gives them the seed, and some of them the variant's name.
SEEDED = ("expand", "ground", "finetune", "evaluate", "diagnose")

# Settings of evaluate that the graph also gives to baselines, so that both judge the same users alike.
JUDGED = ("split", "users", "exclude_history")

# Settings of embed that the graph also gives to baselines, which encode queries as the items were.
ENCODED = ("encoder", "trust_remote_code")

# Settings that only a graph gives: the version to go on from.
GRAPHS = ("previous",)

# Inputs that name a user's own files, of all pipelines.
USER_FILES = ("catalog", "interactions", "queries", "embed_embeddings")

# What a user fills in first, in this order, of those that a pipeline has (docs/operations.md says what goes into them).
# A form cannot be put in order (decision 14), so the description of its pipeline names them.
FIRST = (
    "catalog", "interactions", "bundles", "prepare_item_id", "prepare_user_id", "prepare_timestamp",
    "prepare_interaction_item_id", "prepare_text", "expand_base_model", "embed_encoder", "expand_initialization",
    "ground_corpus", "variants", "seeds", "finetune_epochs", "finetune_learning_rate", "ground_checkpoints",
    "finetune_checkpoints", "prepare_max_users", "evaluate_users",
)  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """The values of a pipeline's inputs while its graph is built."""

    channels: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.channels[name]

    def of(self, stage: str, **given: Any) -> dict[str, Any]:
        """Return the settings of ``stage``; ``given`` are those that the pipeline sets itself."""
        settings = {name: self.channels[name] for name in FILES.get(stage, ()) if name in self.channels}
        prefix = f"{stage}_"
        settings |= {k.removeprefix(prefix): v for k, v in self.channels.items() if k.startswith(prefix)}
        return settings | given


def pipeline_inputs(
    own: Sequence[Parameter], set_by_pipeline: Mapping[str, Sequence[str]], stages: Sequence[str] = TRAINING
) -> list[Parameter]:
    """Return all inputs of a pipeline: the user's files and places, its own, and every setting of every stage.

    ``set_by_pipeline`` names, for a stage, the settings that the graph sets itself or leaves as they are, beside those
    in JUDGED, ENCODED and GRAPHS.
    """
    set_by_pipeline = {"baselines": (*JUDGED, *ENCODED), **set_by_pipeline}
    files, settings = {}, []
    for stage in stages:
        for parameter in signature(stage).parameters:
            if parameter.name in (*GRAPHS, *set_by_pipeline.get(stage, ())):
                continue
            if parameter.name in FILES.get(stage, ()):
                files.setdefault(parameter.name, parameter)
            elif not parameter.required:
                name = f"{stage}_{parameter.name}"
                settings.append(Parameter(name, parameter.type, parameter.default, parameter.text))
    return [*files.values(), *own, *settings]


def takes(inputs: Sequence[Parameter]) -> Callable[[Callable], Callable]:
    """Return a decorator that gives a graph function ``(inputs: Inputs) -> output`` these inputs, for dsl.pipeline."""

    def decorate(graph: Callable) -> Callable:
        names = [parameter.name for parameter in inputs]

        def function(*channels: Any) -> Any:
            return graph(Inputs(dict(zip(names, channels, strict=True))))

        function.__name__ = graph.__name__
        first = ", ".join(name for name in FIRST if name in names)
        function.__doc__ = "\n".join(
            [
                inspect.getdoc(graph) or "",
                "",
                f"Fill in first: {first}. The rest may stay for a first run.",
                "",
                "Args:",
                *(f"    {p.name}: {p.text}" for p in inputs),
            ]
        )
        function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    parameter.name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=inspect.Parameter.empty if parameter.default is REQUIRED else parameter.default,
                    annotation=TYPES[parameter.type],
                )
                for parameter in inputs
            ],
            return_annotation=inspect.signature(graph).return_annotation,
        )
        return function

    return decorate
