"""Accepted guesses by the drafter that made them."""

import pytest
from draftsmith.modules import (
    Chain,
    DecodeSettings,
    Ensemble,
    PromptLookup,
    PromptLookupConfig,
    Request,
    Target,
    Union,
    decode,
)
from draftsmith.modules.decoding.recorders import PartCounter, PassRecorder
from support.drafters import ScriptedDrafter
from support.native_answers import native_greedy

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_accepted_guess_counts_for_one_drafter(tiny_target_f64: Target, batch_size: int) -> None:
    """With an oracle next to it, lookup gets what it copied rightly and the oracle the rest; cut guesses do not count.
    """
    target = tiny_target_f64
    prompts = [(5 + row, 9, 30) for row in range(3)]
    texts = [[*prompt, *native_greedy(target, prompt, 40)] for prompt in prompts]
    requests = [Request(prompt, row, 11 + row) for row, prompt in enumerate(prompts)]
    ensemble = Ensemble([PromptLookup(PromptLookupConfig(copied=3), target.device),
                         ScriptedDrafter(target.vocab_size, texts, "oracle")])
    counter, recorder = PartCounter(), PassRecorder()

    def both(*seen: object) -> None:
        counter(*seen)  # type: ignore[arg-type]
        recorder(*seen)  # type: ignore[arg-type]

    found = decode(target, requests, DecodeSettings(batch_size=batch_size, ignore_eos=True), drafter=ensemble,
                   policy=Union([Chain(3), Chain(3)], 7), observer=both).generations
    counts = counter.counts(found, 2)
    for one in found:
        assert sum(counts[one.request.index]) == sum(token.guessed for token in recorder.written(one))
    assert sum(copied for copied, _ in counts.values()) > 0 < sum(guessed for _, guessed in counts.values())


def test_a_single_drafter_is_not_counted(tiny_target_f64: Target) -> None:
    lookup, counter = PromptLookup(PromptLookupConfig(), tiny_target_f64.device), PartCounter()
    found = decode(tiny_target_f64, [Request((5, 9, 5, 9), 0, 8)], DecodeSettings(ignore_eos=True), drafter=lookup,
                   policy=Chain(3), observer=counter).generations
    assert counter.held == []
    assert counter.counts(found, 1) == {0: (0,)}
