"""Reading of GGUF files by transformers, each file parsed once.

transformers asks for a file's header, which holds the whole vocabulary, when it reads the configuration, the tokenizer
and the weights, and builds the table of tensor names once for every module: 17 seconds for a model of 135 million
weights, most of them spent on the same work again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any


@contextmanager
def parsed_once() -> Iterator[None]:
    """A block in which the header of a GGUF file and a table of tensor names are parsed once, however often they are
    asked for."""
    import gguf

    # transformers imports both names inside the functions that use them, so it finds what stands here for the moment.
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    replaced: Any = gguf
    replaced.GGUFReader, replaced.get_tensor_name_map = lru_cache(reader), lru_cache(names)
    try:
        yield
    finally:
        replaced.GGUFReader, replaced.get_tensor_name_map = reader, names


def gguf_config(file: Path) -> Any:
    """transformers' configuration of a GGUF file; a file that has not changed is not read again."""
    # A copy for each caller: loading a model writes to its configuration.
    stat = file.stat()
    return deepcopy(_config(file, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=4)
def _config(file: Path, _size: int, _changed: int) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
