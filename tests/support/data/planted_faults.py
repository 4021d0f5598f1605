"""Training rows with faults in all of them or in some: what the doctor must find."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from draftsmith.data import ChatTemplate, Manifest, TokenShard
from draftsmith.data.store.feature_shards import FINAL, tap
from draftsmith.data.store.feature_store import read_rows
from draftsmith.data.store.token_store import FORMAT_VERSION, Row
from draftsmith.modules import DecodeSettings, Request, Target, decode
from draftsmith.recipes.doctor.case import DataSample
from safetensors.torch import save_file
from support.data.data_folders import shard_record

ROWS = 40
Change = Callable[[Row], Row]


def answered(target: Target, template: ChatTemplate | None = None, temperatures: Sequence[float] = (0.0,),
             tokens: int = 24) -> list[Row]:
    """Answers of a target, as distillation lays them out."""
    template = template or ChatTemplate(target.tokenizer)
    texts = [f"{'abcdefghijklmnopqrstuvwxyz'[n % 26]}{n * n} and {n}" for n in range(ROWS)]
    prompts = [template.prompt([{"role": "user", "content": text}], thinking=template.modes[n % len(template.modes)])
               for n, text in enumerate(texts)]
    requests = [Request(tuple(prompt), n, tokens, temperatures[n % len(temperatures)])
                for n, prompt in enumerate(prompts)]
    found = decode(target, requests, DecodeSettings(batch_size=ROWS)).generations
    return [Row(tokens=(*one.request.tokens, *one.tokens), prompt=n, temperature=one.request.temperature,
                supervised=(*[False] * len(one.request.tokens), *[True] * len(one.tokens)))
            for n, one in enumerate(found)]


def sample_of(rows: Sequence[Row], target: Target, template: ChatTemplate | None = None, folder: Path = Path("data")
              ) -> DataSample:
    """Rows as the doctor reads them."""
    record = shard_record(prompts=len(rows), rows=len(rows), by_target=len(rows), answers=len(rows),
                          tokens=sum(len(row.tokens) for row in rows),
                          supervised=sum(sum(row.supervised) for row in rows))
    manifest = Manifest(target=target.identity, template_hash=(template or ChatTemplate(target.tokenizer)).hash,
                        recipe={}, versions={}, shards=(record,), complete=True)
    shard = TokenShard.from_rows(rows, [])
    return DataSample(folder=folder, manifest=manifest, shard=shard,
                      places=tuple((record, row, shard.span(row)[0]) for row in range(len(rows))))


def faulty(row: int, share: float) -> bool:
    """True at evenly spread rows, so many of all."""
    return int((row + 1) * share) > int(row * share)


def planted(rows: Sequence[Row], share: float, change: Change) -> list[Row]:
    """The rows with a change in a share of them."""
    return [change(row) if faulty(number, share) else row for number, row in enumerate(rows)]


def store_states(data: DataSample, target: Target, taps: Sequence[int], *, share: float = 0.0,
                 wrong: Target | None = None, layer: int | None = None) -> None:
    """Write the states of the rows; in a share of them the last kind is that of the target `wrong`, or of another
    layer."""
    names = (FINAL, *map(tap, taps))
    right, others = (read_rows(one, data.shard, range(ROWS), names, torch.float32) for one in (target, wrong or target))
    (record, _, _), files = data.places[0], {}
    for name in names:
        states = [others[row][name if layer is None else tap(layer)] if name == names[-1] and faulty(row, share)
                  else right[row][name] for row in range(ROWS)]
        save_file({"states": torch.cat(states)}, data.folder / f"{name}-{record.file}")
        files[f"{name}-{record.file}"] = {"tokens": record.sha256, "sha256": "0"}
    listed = {"format_version": FORMAT_VERSION, "target": target.identity.weights_hash, "dtype": "float32"}
    (data.folder / "features.json").write_text(json.dumps({**listed, "files": files}))


def answer(row: Row) -> int:
    """Place of the first answer token."""
    return row.supervised.index(True)


def with_answer(row: Row, tokens: Sequence[int]) -> Row:
    """The row with another answer."""
    start = answer(row)
    return replace(row, tokens=(*row.tokens[:start], *tokens), supervised=(*[False] * start, *[True] * len(tokens)))


def shifted(row: Row) -> Row:
    """The mask a token late."""
    return replace(row, supervised=(False, *row.supervised[:-1]))


def other_turn(row: Row) -> Row:
    """The user's message labelled in place of the answer."""
    # <|im_start|>user\n are six tokens, <|im_end|>\n<|im_start|>assistant\n thirteen.
    flags = [6 <= place < answer(row) - 13 for place in range(len(row.tokens))]
    return replace(row, supervised=tuple(flags))


def too_short(row: Row) -> Row:
    """An answer of two tokens."""
    return with_answer(row, row.tokens[answer(row) :][:2])


def other_answer(row: Row) -> Row:
    """An answer that another model might have written: the tokens in reverse order."""
    return with_answer(row, row.tokens[answer(row) :][::-1])


def with_opening(target: Target, before: str, after: str) -> Change:
    """Rows whose text before the answer has `after` in place of `before`."""
    old, new = (tuple(target.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (before, after))

    def change(row: Row) -> Row:
        start, end = answer(row), len(row.tokens)
        place = next(p for p in range(start, -1, -1) if row.tokens[p : p + len(old)] == old)
        tokens = (*row.tokens[:place], *new, *row.tokens[place + len(old) :])
        return replace(row, tokens=tokens, supervised=(*[False] * (start + len(new) - len(old)), *[True] * (
            end - start)))

    return change
