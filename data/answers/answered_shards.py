"""Shards of answered conversations: their rows, their entry in the manifest, their recorded states."""

from collections.abc import Sequence

from ...modules.decoding.state_recorder import RecordedStates
from ..store.token_store import ShardRecord, SplitName, TokenShard, hash_bytes
from .answering import Conversation


def shard_of(
    split: SplitName, number: int, conversations: Sequence[Conversation], keys: Sequence[int], candidates: int
) -> tuple[TokenShard, ShardRecord, bytes]:
    """(the shard of some conversations, its entry in the manifest, the content of its file).

    Args:
        split: the part of the data that it belongs to.
        number: in its file's name.
        conversations: complete ones.
        keys: hashes of its prompts.
        candidates: prompts read or written for it.
    """
    shard = TokenShard.from_rows([row for one in conversations for row in one.rows], keys)
    data = shard.to_bytes()
    record = ShardRecord(
        file=shard_file(split, number),
        split=split,
        sha256=hash_bytes(data),
        candidates=candidates,
        prompts=len({one.number for one in conversations}),
        rows=shard.num_rows,
        by_target=shard.written("target"),
        by_text=shard.written("text"),
        by_draft=shard.written("draft"),
        tokens=len(shard.tokens_T),
        supervised=int(shard.supervised_T.sum()),
        answers=sum(len(one.turns) for one in conversations),
        truncated=sum(one.truncated for one in conversations),
        repetitive=sum(one.repetitive for one in conversations),
    )
    return shard, record, data


def shard_file(split: SplitName, number: int) -> str:
    """Name of a shard's file."""
    return f"{split}-{number:05d}.safetensors"


def shard_number(file: str) -> int:
    """The number in a shard's file name."""
    return int(file.removesuffix(".safetensors").rpartition("-")[2])


def states_of(conversations: Sequence[Conversation]) -> list[RecordedStates | None]:
    """The recorded states of each row of a shard."""
    return [one.states_of(row) for one in conversations for row in one.rows]
