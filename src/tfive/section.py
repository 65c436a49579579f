"""The base of every configuration section. Sections live in the `settings.py` of the room they configure."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen, strict group of settings: unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)

    former_keys: ClassVar[Mapping[str, str]] = {}
    """Dotted keys that this section once had → one line on what became of each."""
