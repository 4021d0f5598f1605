"""Types of settings with their bounds, the check of settings by these, and their reading from an artifact."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict

from .errors import UserError
from .files.json_records import MistypedError, kinds_of, typed

MOST_ROWS, MOST_TOKENS, MOST_STEPS = 2**16, 2**20, 2**40
"""Largest numbers of rows, of tokens in a row and of steps that a setting may ask for."""
Parts = Annotated[int, Field(ge=1, le=256)]  # Layers, heads or draft steps: each is a module, or a pass, of its own
Size = Annotated[int, Field(ge=1, le=2**26)]  # Any other size of a model
Rows = Annotated[int, Field(ge=1, le=MOST_ROWS)]
RowsOrNone = Annotated[int, Field(ge=0, le=MOST_ROWS)]
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Processes = Annotated[int, Field(ge=1, le=2**10)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # NumPy's generators take 32 bits
Whole = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Chance = Annotated[float, Field(gt=0, lt=1)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class Such:
    """A condition on a field of a type that no bound can say: `Annotated[float, Such(is_temperature, "0 or ...")]`."""

    holds: Callable[[Any], bool]  # Whether a value meets it
    words: str  # What the value must be

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Called by pydantic for the type of a field."""
        return core_schema.no_info_after_validator_function(self.checked, handler(source))

    def checked(self, value: Any) -> Any:
        """The same value. Raises PydanticCustomError, of which `typed` makes its sentence."""
        if not self.holds(value):
            raise PydanticCustomError("such", "{words}", {"words": self.words})
        return value


@dataclass(frozen=True, kw_only=True)
class CheckedSettings:
    """Settings that are compared with their annotated types and bounds, also where no recipe holds them. Raises
    UserError naming the setting, its value and the bound."""

    section: ClassVar[str] = "its content"  # Their section of a recipe, for the sentence

    def __post_init__(self) -> None:
        kinds = _own_kinds(type(self))  # type: ignore[arg-type]
        try:
            typed({name: getattr(self, name) for name in kinds.__annotations__}, kinds, self.section)
        except MistypedError as error:
            raise UserError(f"{error}{error.remedy}") from error


@cache
def _own_kinds(config: type) -> type:
    """The types of the fields of settings, those left out that check themselves."""
    own = {name: kind for name, kind in kinds_of(config).items() if not is_dataclass(kind)}
    kinds: type = TypedDict("Fields", own)  # type: ignore[misc]
    return kinds


LATER = "later"
"""Metadata of a setting that was added after artifacts of its family were written, which have its default."""


def settings_of(description: dict[str, Any], config: type, subject: str, *more: str) -> dict[str, Any]:
    """A drafter's description with the settings of its config converted to their types; `more` keys stay as they are,
    and "a Medusa drafter is" is a `subject` of the error's sentence. Raises UserError if a key is missing or unknown,
    MistypedError if a setting is of the wrong kind."""
    later = {field.name for field in fields(config) if LATER in field.metadata}
    known = {*more, *(field.name for field in fields(config))}
    if not known - later <= set(description) <= known:
        raise UserError(f"{subject} described by {sorted(known)}, got {sorted(description)}; use the version of "
                        "draftsmith that wrote the artifact")
    kinds = kinds_of(config)
    return {name: value if name in more else typed(value, kinds[name], f"drafter.{name}")
            for name, value in description.items()}
