"""The small tokenizer and the prepared corpora."""

from text_fixtures import *  # noqa: F403
