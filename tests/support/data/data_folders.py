"""Files of prompts, and the contents of data folders."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data import (
    ChatTemplate,
    DistillConfig,
    Manifest,
    Message,
    PromptConfig,
    ShardRecord,
    TokenShard,
    distill,
)
from draftsmith.data.answers.answering import Answerer
from draftsmith.data.store.feature_store import Encoding
from draftsmith.modules import Target


def encode(target: Target, folder: Path, taps: tuple[int, ...] = (), *, form: str | None = None) -> list[Path]:
    """Store the final states and taps of whatever has none; returns the files."""
    return Encoding(target, folder, taps, form=form).run(progress=False)


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


def answered(count: int) -> list[dict[str, Any]]:
    """Rows with an answer of their own."""
    return [{"messages": spoken(f"what is {number}?", f"it is {number} indeed")} for number in range(count)]


def conversations(folder: Path, target: Target, count: int = 15, **settings: Any) -> Path:
    """A data folder of so many conversations of unlike lengths, three of which are held out."""
    prompts = write_prompts(folder, [{"prompt": "abcdefghijklmno"[: number + 1] * 2} for number in range(count)])
    usual = {"shard_prompts": 5, "slots": 4, "max_new_tokens": 12, "validation_prompts": 3}
    config = DistillConfig(**usual | settings)
    distill(target, prompts, config, ChatTemplate(target.tokenizer), folder / "out", progress=False)
    return folder / "out"


def shard_record(number: int = 0, split: str = "train", **counts: Any) -> ShardRecord:
    """An entry of the manifest; what is not given is 0."""
    none = {one.name: 0 for one in fields(ShardRecord) if one.name not in ("file", "split", "sha256")}
    return ShardRecord(**{"file": f"{split}-{number:05d}.safetensors", "split": split, "sha256": "0", **none, **counts})


def shards(out: Path, split: str = "train") -> list[TokenShard]:
    return [TokenShard.read(out / record.file, record.sha256) for record in Manifest.load(out).split(split)]


def rows(out: Path, split: str = "train") -> Iterator[tuple[list[int], list[bool], int, float]]:
    """(tokens, supervised, prompt, temperature) of all rows of a split."""
    for shard in shards(out, split):
        for row in range(shard.num_rows):
            start, stop = shard.span(row)
            yield (shard.tokens_T[start:stop].tolist(), shard.supervised_T[start:stop].tolist(),
                   int(shard.prompts_R[row]), float(shard.temperatures_R[row]))


def asked_prompts(patch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the prompts that are asked from now on, in order."""
    asked, answer = list[int](), Answerer.answer

    def noted(self: Answerer, numbered: Any, *rest: Any, **more: Any) -> Any:
        asked.extend(number for number, _ in numbered)
        return answer(self, numbered, *rest, **more)

    patch.setattr(Answerer, "answer", noted)
    return asked


def contents(out: Path) -> dict[str, bytes]:
    """All files but the times."""
    return {file.name: file.read_bytes() for file in sorted(out.iterdir()) if file.name != "stats.json"}
