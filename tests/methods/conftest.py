"""The smallest run's files, written once, and qualification tests whose outcome a test decides."""

from t5_window import *  # noqa: F403
