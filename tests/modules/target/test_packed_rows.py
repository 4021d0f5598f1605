"""Packed rows in every architecture: a conversation is read as it is alone, whatever else is in its row."""

from collections.abc import Iterator

import pytest
import torch
from draftsmith.modules import DecodeSettings, Features, Request, Target, UserError, decode
from draftsmith.modules.target.attention import segment_attention
from draftsmith.modules.target.devices.compiled_layers import Compiler
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from support.targets import MUST_LOAD, TRAITS, random_model, random_trait
from support.tiers import others_long, some_long

LENGTHS = (12, 21)
OWN_ATTENTION = ("GPTJ", "CodeGen", "Falcon", "XGLM", "GPTBigCode", "Persimmon", "BioGpt")
"""Some architectures with attention that cannot be replaced, or once could not."""

QUICK = ("llama4",)  # Those of `TRAITS` that `make test` runs


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def target_of(family: str) -> Target:
    model = random_trait(family, torch.float32) if family in TRAITS else random_model(family)
    return Target(model, tiny_tokenizer(), name=family, pack=0)


def check(target: Target) -> None:
    """Final states of a packed row are those of its conversations alone."""
    texts = [torch.randint(4, 90, (length,)) for length in LENGTHS]
    tokens_BL = torch.cat(texts)[None]
    packed = Features(
        tokens_BL=tokens_BL, supervised_BL=torch.ones_like(tokens_BL, dtype=torch.bool),
        segments_BL=torch.cat([torch.full((length,), place) for place, length in enumerate(LENGTHS)])[None],
        positions_BL=torch.cat([torch.arange(length) for length in LENGTHS])[None])
    found_LD = target.encode(packed).final()[0]
    alone = [target.encode(Features.from_rows([(text.tolist(), [True] * len(text))])).final()[0] for text in texts]
    torch.testing.assert_close(found_LD, torch.cat(alone), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", [*some_long(MUST_LOAD, 4), *others_long(TRAITS, QUICK)])
def test_conversations_of_a_row_do_not_see_each_other(family: str) -> None:
    check(target_of(family))


@pytest.mark.parametrize("family", ["Llama", *OWN_ATTENTION, *others_long(TRAITS, QUICK)])
def test_a_long_row_is_read_by_segments_or_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_attention, "DENSE_LENGTH", 16)
    target = target_of(family)
    if segment_attention.takes_segments(target.decoder):
        check(target)
    else:
        with pytest.raises(UserError, match="forms its attention itself, by a mask of all positions of a row of 33 "):
            check(target)


@pytest.mark.parametrize("family", [*some_long(MUST_LOAD[::2], 12), *others_long(TRAITS, ("deepseek-v3",))])
def test_compiled_layers_answer_the_same_or_are_refused(family: str) -> None:
    target = target_of(family)
    target.compiler = Compiler("eager")
    requests = [Request((5, 9, 11, 20 + row), row, 6) for row in range(2)]
    plain, quick = (decode(target, requests, DecodeSettings(batch_size=2, ignore_eos=True, compile=compiled))
                    for compiled in (False, True))
    assert [one.tokens for one in quick.generations] == [one.tokens for one in plain.generations]
    assert bool(quick.stats.compile_refusal) != bool(target.compiler.graphs)
