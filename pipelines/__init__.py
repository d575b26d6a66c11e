"""The pipelines and the command that runs them: python -m pipelines run|compile. Run from the checkout."""
