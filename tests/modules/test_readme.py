"""modules/README.md and the guide to new methods: the map is whole, the steps name files that exist."""

import re
from pathlib import Path

from draftsmith.modules import DRAFTERS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "modules" / "README.md").read_text()
GUIDE = (ROOT / "recipes" / "guides" / "add-a-method.md").read_text()


def section(title: str, text: str = README) -> str:
    """The text below one heading."""
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_map_names_every_folder() -> None:
    named = re.findall(r"^\| `(\w+)/`", section("Map"), flags=re.MULTILINE)
    assert sorted(named) == sorted(path.parent.name for path in (ROOT / "modules").glob("*/__init__.py"))


def test_the_steps_hold_for_every_family() -> None:
    """Each family has the files that the steps name, but for those shared with another family."""
    for family in (cls.family for cls in DRAFTERS):
        assert (ROOT / f"modules/families/{family}/drafter.py").is_file(), family
        assert (ROOT / f"tests/families/{family}/cases.py").is_file(), family
    named = re.findall(r"`((?:modules|trainers|recipes|tests|export)/[\w/.<>]+)`", section("A family", GUIDE))
    assert len(named) >= 9
    more = section("An objective", GUIDE) + section("A policy", GUIDE)
    assert {"trainers/objectives.py", "modules/policies/registry.py"} <= set(re.findall(r"`([\w/.]+)`", more))
    for path in [*named, *re.findall(r"`((?:modules|trainers|tests)/[\w/.]+)`", more)]:
        assert (ROOT / path).exists() or "<family>" in path, path


def test_the_glossary_has_at_most_25_terms() -> None:
    terms = re.findall(r"^\| ([\w -]+) \|", section("Glossary"), flags=re.MULTILINE)[1:]
    assert 20 <= len(terms) <= 25
    assert len(terms) == len(set(terms))
