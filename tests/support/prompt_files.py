"""Files of prompts, and the contents of data folders."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.data import Manifest, Message, PromptConfig, TokenShard

WORDS = ("tell me of the sea", "how far?", "Why", "a b c", "write it down", "and then", "ok", "12 apples or 13 pears")


def write_prompts(folder: Path, rows: list[dict[str, Any]]) -> PromptConfig:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptConfig(origin="file", path=str(file))


def spoken(*texts: str) -> tuple[Message, ...]:
    """Messages of a user and an assistant in turn; an empty text is an answer that is asked for."""
    roles = ("user", "assistant")
    return tuple({"role": roles[place % 2], **({"content": text} if text else {})} for place, text in enumerate(texts))


def many(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{WORDS[number % len(WORDS)]} {number}"} for number in range(count)]


def shards(out: Path, split: str = "train") -> list[TokenShard]:
    return [TokenShard.read(out / record.file, record.sha256) for record in Manifest.load(out).split(split)]


def rows(out: Path, split: str = "train") -> Iterator[tuple[list[int], list[bool], int, float]]:
    """(tokens, supervised, prompt, temperature) of all rows of a split."""
    for shard in shards(out, split):
        for row in range(shard.num_rows):
            start, stop = shard.span(row)
            yield (shard.tokens_T[start:stop].tolist(), shard.supervised_T[start:stop].tolist(),
                   int(shard.prompts_R[row]), float(shard.temperatures_R[row]))


def contents(out: Path) -> dict[str, bytes]:
    """All files but the times."""
    return {file.name: file.read_bytes() for file in sorted(out.iterdir()) if file.name != "stats.json"}
