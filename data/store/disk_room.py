"""The room that states take on a disk, compared with what is free there before any work."""

import shutil
from pathlib import Path

from ...modules import UserError


def require_room(folder: Path, needed: int, what: str) -> str:
    """Compare bytes to be written, `what` says of what, with those that the disk of a folder, there or to come, has
    free; returns both in words. UserError if there is less."""
    disk = shutil.disk_usage(nearest(folder))
    free = disk.free
    # A file system without a size is none to write files to, which the first of them says better.
    if disk.total and needed > free:
        raise UserError(f"{what} take {in_words(needed)}, and the disk of {folder} has {in_words(free)} free; make "
                        "room, choose another --out, or set batch.states: computed")
    return f"{what} take {in_words(needed)}, {in_words(free)} are free"


def nearest(folder: Path) -> Path:
    """The folder, or where it is not there yet, the nearest one above it that is."""
    here = folder.absolute()
    while not here.exists():
        here = here.parent
    return here


def in_words(count: int) -> str:
    """Bytes in readable units."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"
