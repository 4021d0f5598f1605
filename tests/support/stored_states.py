"""States of the answers in a folder, stored as a run stores them."""

from pathlib import Path

from draftsmith.data.store.feature_store import Encoding
from draftsmith.modules import Target


def encode(target: Target, folder: Path, taps: tuple[int, ...] = (), *, form: str | None = None) -> list[Path]:
    """Store the final states and taps of whatever has none; returns the files."""
    return Encoding(target, folder, taps, form=form).run(progress=False)
