"""Recipe files: found by path or shipped name, read with what they extend, and merged."""

import re
from collections.abc import Hashable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from ...modules import UserError
from ...modules.files.json_records import read_bounded_text, typed

EXTENDS, FAMILY, DRAFTER, BY_FAMILY = "extends", "family", "drafter", "by_family"
RECIPE_BYTES = 2**20  # Largest recipe file
MOST_LEVELS = 50  # Most levels of nesting in a recipe


def recipe_path(name: str) -> str:
    """`name` itself when such a file exists, else the shipped recipe of that name."""
    if Path(name).is_file():
        return name
    folder = files("draftsmith.recipes")
    shipped = {entry.name: str(entry) for place in (folder, folder / "targets") for entry in place.iterdir()
               if entry.name.endswith(".yaml")}
    found = shipped.get(name) or shipped.get(f"{name}.yaml")
    if found is None:
        names = ", ".join(sorted(file.removesuffix(".yaml") for file in shipped))
        raise UserError(f"there is no recipe {name!r}; give the path of a YAML file or a shipped recipe ({names})")
    return found


def read_recipe(path: str) -> dict[str, Any]:
    """The sections of a recipe, those of the recipe that it extends included. Raises as `layers`."""
    return merge(*layers(path))


def layers(path: str, extended_by: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """The sections of a recipe after those of the recipes that it extends, each for itself."""
    file = Path(path).resolve()
    if file in extended_by:
        circle = " -> ".join(one.name for one in (*extended_by[extended_by.index(file):], file))
        raise UserError(f"recipes extend each other in a circle: {circle}; remove one `extends`")
    content = load_yaml(file)
    given = content.get(BY_FAMILY, {})
    if not isinstance(given, dict) or not all(isinstance(one, dict) for one in given.values()):
        raise UserError(f"{path}: by_family must hold the names of families with sections below each, got {given!r}; "
                        "write it as the recipe eight_billion does")
    if wrong := [key for one in given.values() for key in (FAMILY, EXTENDS, BY_FAMILY) if key in one]:
        raise UserError(f"{path}: {wrong[0]} stands inside by_family, where it has no effect; write it outside of it")
    if EXTENDS not in content:
        return [content]
    base = content.pop(EXTENDS)
    if not isinstance(base, str):
        raise UserError(f"{path}: extends must be the name or path of one recipe, got {base!r}")
    # A recipe next to this one wins over a shipped one of the same name.
    near = [path for path in (file.parent / base, file.parent / f"{base}.yaml") if path.is_file()]
    try:
        found = recipe_path(str(near[0]) if near else base)
    except UserError as error:
        raise UserError(f"{path} extends {base!r}, but {error}") from error
    return [*layers(found, (*extended_by, file)), content]


def load_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty one. Raises UserError when it is none."""
    try:
        content = yaml.load(read_bounded_text(file, RECIPE_BYTES), Loader=PlainLoader)
    except OSError as error:
        raise UserError(f"cannot read the recipe {file}: {error.strerror}; check its path and permissions") from error
    except (yaml.YAMLError, ValueError) as error:
        # One line with its place, without the lines of the file that the parser quotes.
        problem = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            problem = f"{error.problem} (line {error.problem_mark.line + 1})"
        elif isinstance(error, UnicodeDecodeError):
            problem = f"not UTF-8, {error.reason} at byte {error.start}"
        raise UserError(f"{file} is not a YAML file: {problem}; correct it") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold the sections of a recipe (key: value), got {type(content).__name__}; write "
                        "it as the shipped recipes are")
    for key, value in content.items():
        check_plain(key, f"a key of {file}")
        check_plain(value, f"{file}: {key}")
    return {str(key): value for key, value in content.items()}


def check_plain(value: Any, where: str, level: int = 0) -> None:
    """Refuse text that UTF-8 cannot hold or no name of a file may, and a value that holds itself. Raises UserError."""
    if level > MOST_LEVELS:
        raise UserError(f"{where} has more than {MOST_LEVELS} levels, or a value that holds itself; write it flat")
    if isinstance(value, str) and any(sign == "\0" or "\ud800" <= sign <= "\udfff" for sign in value):
        raise UserError(f"{where} holds text that is not UTF-8, or a null character ({value[:60]!r}); write it in "
                        "plain UTF-8")
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        check_plain(key, f"a key of {where}")
        check_plain(part, f"{where}.{key}" if level < 3 else where, level + 1)


def word_value(text: str, kind: Any) -> Any:
    """The value that a word of the command line stands for: what it is as YAML, or the text itself where that is asked.
    Raises UserError if it would take the whole stack to read, or UTF-8 cannot hold it."""
    refused: Exception | None = None
    try:
        value = yaml.load(text, Loader=PlainLoader)
        check_plain(value, text[:20])
    except (yaml.YAMLError, ValueError) as error:
        value, refused = text, error
    # As it stands: YAML would take quotes and spaces off.
    for one in (text if isinstance(value, str) else value, text):
        try:
            typed(one, kind)
        except ValueError:
            continue
        return one
    if isinstance(refused, TooDeepError):
        raise UserError(f"{refused.problem} in {text[:20]}...; shorten it") from refused
    if isinstance(refused, UserError):
        raise refused
    return value


class TooDeepError(yaml.composer.ComposerError):
    """A document with too many levels."""


class PlainLoader(yaml.SafeLoader):
    """PyYAML's safe loader of so many levels for the values of JSON alone: no dates, bytes, sets or pairs. A key that
    is given twice is an error."""

    level = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """A node of the document. Raises TooDeepError."""
        if self.level > MOST_LEVELS:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            raise TooDeepError(None, None, f"more than {MOST_LEVELS} levels", event.start_mark)
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping whose keys are all different."""
        keys = [str(key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for twice in sorted({key for key in keys if keys.count(key) > 1}):
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


# A date is text, as in JSON; 1e-3 is a number, as there.
PlainLoader.yaml_implicit_resolvers = {
    sign: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
    for sign, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
PlainLoader.yaml_constructors = {
    tag: function for tag, function in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
}


PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789"))


def flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in nested sections, the sections included, outer ones first."""
    for key, value in content.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")


def merge(*given: dict[str, Any]) -> dict[str, Any]:
    """One recipe of several, of which later ones win key by key.

    The family is the last one named: the section `drafter` of a recipe for another one is left out, as the shape of
    another drafter, and the keys below `by_family` are those of this family."""
    last = next((layer[FAMILY] for layer in reversed(given) if FAMILY in layer), None)
    content: dict[str, Any] = {}
    family = None
    for layer in given:
        family = layer.get(FAMILY, family)
        apart = (BY_FAMILY, DRAFTER) if family not in (None, last) else (BY_FAMILY,)
        content = _merged(content, {key: value for key, value in layer.items() if key not in apart})
        content = _merged(content, layer.get(BY_FAMILY, {}).get(str(last), {}))
    return content


def _merged(base: Any, own: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(own, dict):
        return own
    return {**base, **{key: _merged(base.get(key), value) for key, value in own.items()}}
