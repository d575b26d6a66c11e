"""Give a component the docstring of its stage, from which KFP takes the descriptions that its forms show."""

from collections.abc import Callable

from sidgraft.signatures import signature

# Parameters that a component has beside those of its stage.
EXTRAS = {
    "keep_going": (
        "Name of the variant, in a study: an error then marks the outputs as failed, for the report, instead"
        " of ending the run. Empty lets the error end the run."
    ),
    "ui_metrics": "The numbers of the summary, as the user interface shows them.",
    "ui_page": "The page, as the user interface shows it.",
    "ui_decision": "The decision and its reasons, as the user interface shows them.",
    "decision": "What to train: none, incremental or full.",
    "bundle": "Place of the published version that a training goes on from; empty where it goes on from none.",
}


def described_by(stage: str) -> Callable[[Callable], Callable]:
    """Return a decorator that copies the docstring of ``stage`` onto the component's function.

    KFP reads the descriptions of inputs from `Args:` and those of outputs from `Returns:`.
    """
    source = signature(stage)

    def decorate(function: Callable) -> Callable:
        texts = {p.name: p.text for p in source.parameters} | EXTRAS
        names = [name for name in function.__annotations__ if name != "return"]
        outputs = [name for name in names if name.startswith(("out", "ui_"))]
        inputs = [name for name in names if name not in outputs]
        outputs += getattr(function.__annotations__.get("return"), "_fields", ())
        function.__doc__ = "\n".join(
            [
                source.sentence,
                "",
                "Args:",
                *(f"    {name}: {texts[name]}" for name in inputs),
                "",
                "Returns:",
                *(f"    {name}: {texts[name]}" for name in outputs),
            ]
        )
        return function

    return decorate
