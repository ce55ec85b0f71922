"""What the tiny model is taught: every table of plain facts, one file per field."""

from .everyday import EVERYDAY
from .geography import GEOGRAPHY
from .language import LANGUAGE
from .nature import NATURE
from .relation import Relation, fill
from .science import SCIENCE, spoken

__all__ = ["RELATIONS", "Relation", "fill", "spoken"]

RELATIONS: tuple[Relation, ...] = (*GEOGRAPHY, *NATURE, *LANGUAGE, *SCIENCE, *EVERYDAY)
