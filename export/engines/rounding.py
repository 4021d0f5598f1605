"""The cost of weights of fewer bits: the accepted length of this project's own chain, before and after."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from ..artifact import Artifact
from .trial import TrialSettings, chain_length


def rounded_artifact(artifact: Artifact, rounded: Callable[[Tensor, bool], Tensor]) -> Artifact:
    """A copy whose drafter has the weights that an engine reads from a file.

    Args:
        artifact: left as it is.
        rounded: gives a weight as it is read, the matrix of a linear layer that is no embedding too, or another one.
    """
    drafter = artifact.drafter
    # A matrix that is an embedding too is read as an embedding.
    embeddings = {id(module.weight) for module in drafter.modules() if isinstance(module, nn.Embedding)}
    linear = {f"{name}.weight" for name, module in drafter.named_modules()
              if isinstance(module, nn.Linear) and id(module.weight) not in embeddings}
    copy = type(drafter).rebuild(drafter.describe(), artifact.identity)
    copy.load_state_dict({name: rounded(tensor, name in linear).to(tensor)
                          for name, tensor in drafter.state_dict().items()})
    copy.to(artifact.target.device)
    copy.bind(artifact.target)
    return replace(artifact, drafter=copy.eval())


def rounding_loss(artifact: Artifact, rounded: Callable[[Tensor, bool], Tensor], prompts: Sequence[Sequence[int]],
                  settings: TrialSettings) -> tuple[float, float]:
    """(accepted length as trained, accepted length with rounded weights), each with the tokens of a chain."""
    return (chain_length(artifact, prompts, settings),
            chain_length(rounded_artifact(artifact, rounded), prompts, settings))
