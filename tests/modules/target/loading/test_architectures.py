"""Every causal architecture of transformers is decoded exactly or refused by a sentence, and the table says which."""

import pytest
from support.architecture_table import END, EXACT, GUIDE, START, USED, table, verdict


@pytest.mark.parametrize("name", USED)
def test_the_targets_that_people_serve_are_exact(name: str) -> None:
    assert verdict(name) == EXACT


@pytest.mark.full
def test_the_table_is_that_of_this_transformers() -> None:
    written = GUIDE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0]
    assert written.strip() == table(), "run make architectures"
