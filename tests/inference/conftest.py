"""The tiny models and their tokenizer."""

from model_fixtures import *  # noqa: F403
