"""Files and folders that appear whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..modules import UserError
from ..modules.atomic_files import cannot_write, to_disk, write_atomically


def write_file(path: Path, content: str) -> Path:
    """Write text; see `write_atomically`. Returns the path.

    Raises:
        UserError: if the disk is full or the folder may not be written.
    """
    return write_atomically(path, lambda partial: partial.write_text(content, encoding="utf-8"))


@contextmanager
def whole_folder(folder: Path, owned: frozenset[str]) -> Iterator[Path]:
    """Give a hidden folder to fill; when the block ends well it takes the place of `folder`, else it vanishes.

    An existing `folder` is replaced if all it holds are files named in `owned`.

    Raises:
        UserError: if `folder` holds anything else, or cannot be written.
    """
    _refuse_foreign(folder, owned)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in partial.iterdir():
            to_disk(path)
        _swap(partial, folder)
    except (OSError, SafetensorError) as error:
        raise cannot_write(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_foreign(folder: Path, owned: frozenset[str]) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, a folder was expected; choose another place")
    foreign = sorted({path.name for path in folder.iterdir()} - owned) if folder.exists() else []
    if foreign:
        raise UserError(f"{folder} holds other files ({', '.join(foreign[:3])}) and would be replaced as a whole; "
                        "choose another folder or empty it")


def _swap(partial: Path, folder: Path) -> None:
    former = folder.with_name(f".{folder.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        folder.rename(former)
    partial.rename(folder)
    to_disk(folder.parent)
    shutil.rmtree(former, ignore_errors=True)
