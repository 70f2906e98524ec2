"""What every section of a run file is made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["PositiveFloat", "PositiveInt", "Section"]

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Frozen; unknown keys are refused; a docstring under a field is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
