"""The pipelines and the command for them: python -m pipelines --help. Run from the checkout."""
