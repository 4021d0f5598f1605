"""Bounds of chat templates, which come with a model: they are programs, and one that never ends would stop a run."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jinja2
from jinja2.exceptions import TemplateRuntimeError

from ...modules import UserError

MOST_STEPS = 2_000_000  # Most lines of compiled template code in a rendering; 100 messages take some thousands
MOST_CHARACTERS = 2**24  # Longest rendering
_JINJA = os.path.dirname(jinja2.__file__) + os.sep


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """A block in which templates are rendered; TemplateRuntimeError ends one with more steps, memory or stack than
    there is. Steps are counted, not seconds: whether a template is accepted does not depend on the machine."""
    steps = 0

    def count(_frame: FrameType, event: str, _value: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        if steps > MOST_STEPS:
            raise TemplateRuntimeError(f"it takes more than {MOST_STEPS:,} steps")
        return count

    def enter(frame: FrameType, _event: str, _value: Any) -> Any:
        file = frame.f_code.co_filename
        return count if file == "<template>" or file.startswith(_JINJA) else None

    # Coverage and debuggers trace too: what was set before is set again.
    former = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    except (MemoryError, OverflowError) as error:
        raise TemplateRuntimeError("it takes more memory than there is") from error
    except RecursionError as error:
        raise TemplateRuntimeError("it calls itself without end") from error
    finally:
        sys.settrace(former)


def refuse_powers(source: str) -> None:
    """Refuse a template with the operator **, whose number of digits no count of steps bounds. Raises UserError if
    there is one; a template that is no valid Jinja is left to its reader."""
    try:
        powers = [line for line, kind, value in jinja2.Environment().lex(source) if (kind, value) == ("operator", "**")]
    except jinja2.TemplateError:
        return
    if powers:
        raise UserError(f"the chat template raises a number to a power (** in line {powers[0]}), which may never end; "
                        "set target.chat_template to one without")
