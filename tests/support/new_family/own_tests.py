"""Bigram: scores against the plain twin, and what is refused."""

import pytest
import torch
from draftsmith.export import EVERY_FORMAT, export_artifact
from draftsmith.export.artifact import Artifact
from draftsmith.modules import Frontier, Target, Topology, UserError
from draftsmith.modules.families.bigram.drafter import Bigram, BigramConfig
from support.families import randomised
from support.new_family.reference import scores_after


def made(target: Target) -> Bigram:
    return randomised(Bigram.create(BigramConfig(width=8), target).to(target.dtype))


def test_scores_equal_the_plain_twin(tiny_target_f64: Target) -> None:
    drafter, model = made(tiny_target_f64), tiny_target_f64.model
    tokens = torch.tensor([[7, 30, 12]])
    frontier = Frontier(nodes_BF=tokens, parents_BF=torch.full_like(tokens, -1), tokens_BF=tokens)
    found = drafter.expand(drafter.start(1, 8), frontier).log_probs_BFHQ[0, :, 0]
    with torch.no_grad():
        for token, scores in zip(tokens[0].tolist(), found, strict=True):
            twin = scores_after(drafter, model.get_input_embeddings().weight, tiny_target_f64.output_weight(), token)
            torch.testing.assert_close(scores, twin)


@pytest.mark.parametrize("name", sorted({*EVERY_FORMAT} - {"target"}))
def test_no_format_holds_it(name: str, tiny_target_f64: Target, tmp_path: object) -> None:
    artifact = Artifact(drafter=made(tiny_target_f64), target=tiny_target_f64, topology=Topology.chain(2),
                        identity=tiny_target_f64.identity, provenance={})
    with pytest.raises(UserError, match="no serving engine runs a bigram drafter"):
        export_artifact(artifact, tiny_target_f64, name, tmp_path)  # type: ignore[arg-type]


def test_a_width_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="width must be at least 1, got 0"):
        BigramConfig(width=0)
