"""Artifacts whose weights are no weights."""

import hashlib
import json
from collections.abc import Callable

import pytest
from safetensors.torch import load_file, save_file
from support.faults import Fault, Place, check, flip, ids
from torch import Tensor

GENERATE = "generate --artifact {artifact} --prompt hello --max-new-tokens 4"


def first_tensor(change: Callable[[Tensor], Tensor]) -> Callable[[Place], None]:
    """Change the first tensor, and the hash of the file with it: nothing but the values is wrong."""

    def prepare(place: Place) -> None:
        weights = place.artifact / "model.safetensors"
        tensors = load_file(weights)
        name = min(tensors)
        save_file({**tensors, name: change(tensors[name]).contiguous()}, weights)
        file = place.artifact / "config.json"
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
        file.write_text(json.dumps(json.loads(file.read_text()) | {"weights_sha256": digest}))

    return prepare


def with_value(value: float) -> Callable[[Tensor], Tensor]:
    """A change of one element."""
    return lambda tensor: tensor.flatten().index_fill(0, tensor.new_zeros(1).long(), value).view_as(tensor)


FAULTS = [
    Fault("a weight that is not a number", GENERATE, r"the tensor \S+ of \S+model.safetensors holds values that are "
          r"not finite \(nan or inf\); train, export or copy it again", first_tensor(with_value(float("nan")))),
    Fault("an infinite weight", GENERATE, r"holds values that are not finite", first_tensor(with_value(float("-inf")))),
    Fault("whole numbers for weights", GENERATE, r"holds whole numbers \(torch.int32\), real numbers were expected",
          first_tensor(lambda tensor: (100 * tensor).int())),
    Fault("truth values for weights", GENERATE, r"holds truth values \(torch.bool\), real numbers were expected",
          first_tensor(lambda tensor: tensor > 0)),
    Fault("a flipped bit", GENERATE, r"model.safetensors does not have the hash that config.json names",
          lambda place: flip(place.artifact / "model.safetensors", -1)),
    Fault("an empty text that would end every answer", GENERATE,
          r"stop must not hold an empty text, which would end every answer at once; leave it out",
          given=("--stop", "['']")),
]


@pytest.mark.parametrize("fault", FAULTS, ids=ids(FAULTS))
def test_a_wrong_artifact_is_refused_in_one_sentence(fault: Fault, place: Place) -> None:
    check(fault, place)
