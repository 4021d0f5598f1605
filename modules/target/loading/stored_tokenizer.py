"""The tokenizer that comes with a model, whose tokens all have a row of its embedding."""

import logging
import re
from pathlib import Path
from typing import Any

from ...errors import UserError
from .self_check import LIBRARY_ERRORS

log = logging.getLogger(__name__)

_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
"""Files of vocabularies in a Hugging Face folder."""
_MARK = re.compile(r"<.*>|\[.*\]")


def read_tokenizer(source: str, name: str, options: dict[str, Any]) -> Any:
    """The tokenizer of a folder, hub id or GGUF file.

    Args:
        source: for transformers.
        name: of the model, for sentences.
        options: of `from_pretrained`.

    Raises:
        UserError: if there is none.
    """
    from transformers import AutoTokenizer

    folder = Path(source)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **options)
    except LIBRARY_ERRORS as error:
        found = any(next(folder.glob(pattern), None) for pattern in _FILES)
        if not folder.is_dir() or "gguf_file" in options or found or "trust_remote_code" in str(error):
            raise
        tokenizer = None
    # Some classes are made without any file, and then know their marks alone: no text has tokens.
    if tokenizer is None or all(_MARK.fullmatch(token) for token in tokenizer.get_vocab()):
        raise UserError(f"{name} has no tokenizer (no file such as tokenizer.json with its tokens); copy those of the "
                        "model that it was made from into its folder, or save it there with tokenizer.save_pretrained")
    return tokenizer


def require_rows(tokenizer: Any, rows: int, name: str) -> None:
    """Refuse a tokenizer whose tokens have no row of the embedding, where prompts hold them.

    Args:
        tokenizer: with the chat template that is used.
        rows: of the embedding.
        name: of the model, for sentences.

    Raises:
        UserError: naming the first such token, its id and the rows.
    """
    beyond = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= rows)
    if not beyond:
        return
    # Published models keep the mark of an image, say, that their text alone never holds.
    aside = {index for index, token in tokenizer.added_tokens_decoder.items()
             if str(token) not in f"{tokenizer.chat_template}"
             and str(token) not in (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token)}
    needed = [(index, token) for index, token in beyond if index not in aside]
    index, token = (needed or beyond)[0]
    sentence = f"the tokenizer of {name} gives {token!r} the id {index}, but its embedding has {rows:,} rows"
    if needed:
        raise UserError(f"{sentence}; use the tokenizer that the model was trained with, or the model after "
                        "model.resize_token_embeddings(len(tokenizer))")
    log.warning("%s; text with that token cannot be read", sentence)
