"""sidgraft: graft Semantic-ID vocabulary onto a pretrained language model and make it a recommender."""

__version__ = "0.1.0"
