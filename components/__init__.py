"""The KFP face of the stages: one folder a stage. Run from the checkout; not part of the wheel."""
