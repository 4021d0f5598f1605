"""A target that the doctor had not seen: recurrent layers, and a template with a start token and other headers."""

from pathlib import Path

import pytest
from draftsmith.data import ChatTemplate
from draftsmith.export import Artifact
from draftsmith.modules import Target, Topology
from draftsmith.recipes.doctor.case import Case, findings_of
from draftsmith.recipes.doctor.diagnosis import diagnose
from draftsmith.recipes.doctor.text_checks import TEXT_CHECKS
from support.artifacts import heads, tuning
from support.families import randomised
from support.planted_faults import answered, planted, sample_of, shifted
from support.recurrent_models import recurrent_model
from support.template_shapes import GEMMA, LLAMA3, shaped_tokenizer


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("source", [GEMMA, LLAMA3], ids=["gemma", "llama3"])
def test_a_hybrid_target_with_another_template(source: str) -> None:
    tokenizer = shaped_tokenizer(source)
    target = Target(recurrent_model("Qwen3Next", vocab_size=len(tokenizer), max_position_embeddings=1024,
                                    eos_token_id=tokenizer.eos_token_id), tokenizer, name="hybrid")
    template, drafter = ChatTemplate(tokenizer, ends=target.eos_ids), randomised(heads(target))
    artifact = Artifact(drafter=drafter, target=target, topology=Topology.chain(2), identity=target.identity,
                        provenance={}, tuning=tuning())
    rows = answered(target, template)
    prompts = [template.prompt([{"role": "user", "content": f"{n} or {n * n}?"}]) for n in range(8)]
    case = Case(artifact=artifact, target=target, template=template, data=sample_of(rows, target, template))
    found = diagnose(case, prompts, Path("none"))
    # A random target ends no answer.
    assert [one.name for one in found.faults] == ["truncated answers"]
    assert {one.name for one in found.findings if one.figure} >= {"mask", "on-policy", "decoding against training",
                                                                 "positions and taps", "ceiling"}
    # The mask of a tenth of the rows is a token late.
    late = sample_of(planted(rows, 0.1, shifted), target, template)
    wrong = {one.name: one for one in findings_of(TEXT_CHECKS, case, late) if one.remedy}
    assert "4 of 40 rows" in wrong["mask"].verdict
    assert set(wrong) == {"mask", "truncated answers"}
