"""The base of every configuration section. Sections live in the `settings.py` of the room they configure."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen, strict group of settings: unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)
