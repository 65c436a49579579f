"""The tiny model with opinions, with and without thoughts."""

from evaluate_fixtures import *  # noqa: F403
