"""Drafters that the proofs of several engines share."""

from pathlib import Path

import pytest
import torch
from draftsmith.modules import Drafter, Target
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from serving import overfitted


@pytest.mark.parametrize("name", ["draft_lm", "eagle3, borrowed output", "block, DFlash 2"])
def test_a_drafter_is_overfitted_once_for_all_engines(name: str, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(overfitted.tiny_llama(), tiny_tokenizer(), name="./target", pack=0)
    texts, trained, said = overfitted.texts_of(target), list[str](), list[str]()

    @torch.no_grad()
    def learn(drafter: Drafter, *_: object) -> int:
        trained.append(drafter.family)
        for weight in drafter.parameters():
            weight.add_(1.0)
        return 1

    monkeypatch.setattr(overfitted, "overfit", learn)
    first, second = (overfitted.known(name, target, texts, tmp_path / "shared", said.append) for _ in range(2))
    assert len(trained) == 1
    assert said[0].endswith("after 1 optimizer steps")
    assert str(tmp_path / "shared") in said[1]
    assert first.state_dict().keys() == second.state_dict().keys()
    assert all(torch.equal(weight, second.state_dict()[key]) for key, weight in first.state_dict().items())
