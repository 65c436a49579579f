"""The base of every configuration section. Sections live in the `settings.py` of the room they configure."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, field_validator


class Section(BaseModel):
    """A frozen, strict group of settings: unknown keys, wrong types and numbers that are not finite are refused.

    Every number has bounds (a test asks for them): beyond them nothing could be computed or would mean anything.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    former_keys: ClassVar[Mapping[str, str]] = {}
    """Dotted keys that this section once had → one line on what became of each."""

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """Texts name files, tokens and projects: none of them can hold a NUL or half of a surrogate pair."""
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and ("\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text)):
                raise ValueError("holds a character that no file name and no text can hold; leave it out")
        return value
