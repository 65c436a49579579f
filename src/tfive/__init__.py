"""tfive: reinforcement mid-training with short hidden thoughts (T⁵: Twin-critic Training for Token-level Thoughts)."""

__version__ = "0.1.0"
