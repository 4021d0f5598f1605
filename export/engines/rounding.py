"""The cost of weights of fewer bits: the accepted length of this project's own chain, before and after."""

from collections.abc import Sequence
from dataclasses import replace

from ..artifact import Artifact
from ..layouts.gguf_file import rounded
from .trial import TrialSettings, chain_length


def rounded_artifact(artifact: Artifact, weights: str) -> Artifact:
    """A copy whose drafter has the weights that an engine reads from a file of this number format.

    Args:
        artifact: left as it is.
        weights: one of `WEIGHTS`.
    """
    drafter = artifact.drafter
    copy = type(drafter).rebuild(drafter.describe(), artifact.identity)
    copy.load_state_dict({name: rounded(tensor, weights).to(tensor) for name, tensor in drafter.state_dict().items()})
    copy.to(artifact.target.device)
    copy.bind(artifact.target)
    return replace(artifact, drafter=copy.eval())


def rounding_loss(artifact: Artifact, weights: str, prompts: Sequence[Sequence[int]],
                  settings: TrialSettings) -> tuple[float, float]:
    """(accepted length as trained, accepted length with rounded weights), each with the tokens of a chain."""
    return (chain_length(artifact, prompts, settings),
            chain_length(rounded_artifact(artifact, weights), prompts, settings))
