"""Names of tensors in the layouts of other projects, as data: each family states its own in its `layout.py`."""

import re

Pairs = tuple[tuple[str, str], ...]
"""Names in two places, there in a layout and here in a drafter. `{i}` is one number in both, `{i:2,1}` the number
2 i + 1; a name that ends with a dot stands for all that start so."""
_PLACE = re.compile(r"\{(\w+)(?::(\d+),(\d+))?\}")


def here(name: str, pairs: Pairs, **numbers: int) -> str | None:
    """The name here of a tensor there, by the first pair that fits, or None; `numbers` are those that it lacks."""
    found = (_translated(name, there, ours, numbers) for there, ours in pairs)
    return next((one for one in found if one is not None), None)


def there(name: str, pairs: Pairs, **numbers: int) -> str | None:
    """The name there of a tensor here, likewise."""
    return here(name, tuple((ours, theirs) for theirs, ours in pairs), **numbers)


def _translated(name: str, source: str, result: str, numbers: dict[str, int]) -> str | None:
    # Text, name of a place, factor, summand, text, and so on.
    parts = _PLACE.split(source)
    pattern = "".join(re.escape(part) if place % 4 == 0 else f"(?P<{part}>\\d+)" if place % 4 == 1 else ""
                      for place, part in enumerate(parts))
    if (match := re.match(pattern if source.endswith(".") else f"{pattern}\\Z", name)) is None:
        return None
    read = dict(numbers)
    for place, factor, summand in _PLACE.findall(source):
        read[place], rest = divmod(int(match[place]) - int(summand or 0), int(factor or 1))
        if rest or read[place] < 0:
            return None
    return _PLACE.sub(lambda one: str(read[one[1]] * int(one[2] or 1) + int(one[3] or 0)),
                      result) + name[match.end() :]
