"""Identity of a target, so that a draft made for one is not used with another."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ...config_checks import Whole
from ...errors import UserError
from ...files.json_records import record_of
from ..devices.split_weights import whole

SAMPLES_PER_TENSOR = 4096  # Evenly spaced elements of each tensor that enter the hash
SHAPE = ("vocab_size", "hidden_size", "num_layers")  # Fields that decide the sizes of what a drafter reads


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """Shape and weights hash, which must agree between the target of training and the one in use."""

    name: str  # Origin of the target; for people, not compared
    architecture: str  # Class of the model
    vocab_size: Whole  # Rows of the output layer
    hidden_size: Whole  # Width of the hidden states
    num_layers: Whole  # Number of decoder layers
    weights_hash: str  # Hash of the weights, see `hash_weights`
    quantization: str = ""  # Of quantised weights, as files or `target.quantization` name it, or empty. Not compared
    tokens_hash: str = ""  # Of tokens and ids, empty without a tokenizer. Compared where a draft changes its target

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "TargetIdentity":
        """Read what `to_dict` wrote; UserError if a field is missing, unknown or of the wrong kind."""
        return record_of(cls, fields, "the identity of a target", "make the file again, or copy it again")

    def require_same(self, other: "TargetIdentity", compared: Sequence[str] = (*SHAPE, "weights_hash"),
                     remedy: str = "load the target it was made for", what: str = "this") -> None:
        """Refuse another target by the first of the `compared` fields that differs: UserError, whose sentence begins
        with what was made for this one and ends with the remedy."""
        for name in compared:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise UserError(f"{what} was made for the target {self.name} with {name} {mine}, but the target here, "
                                f"{other.name}, has {theirs}; {remedy}")


def hash_weights(model: nn.Module) -> str:
    """SHA-256 over names, shapes and evenly spaced elements of all parameters, each rounded to bfloat16.

    The rounding makes a model loaded in float32 and in bfloat16 the same; the spacing keeps it to a moment for models
    of any size, and training of any kind moves elements in every tensor it touches. Weights that are split among
    processes have the hash of the whole ones; all of these processes must call it."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        found = whole(parameter)
        flat = found.reshape(-1)
        step = max(1, -(-flat.numel() // SAMPLES_PER_TENSOR))
        sample = flat[::step].to(torch.bfloat16).contiguous().cpu()
        digest.update(f"{name} {tuple(found.shape)}".encode())
        # The same bytes as whole numbers: numpy has no bfloat16.
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def hash_tokens(tokenizer: Any) -> str:
    """SHA-256 over a tokenizer's tokens in the order of their ids: equal ones mean the same text by an id."""
    if tokenizer is None:
        return ""
    found = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:32]
