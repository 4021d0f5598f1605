"""Tokens without a finite embedding: drafting changes neither the distribution nor the end of an answer."""

from collections import Counter

import numpy as np
import pytest
import torch
from draftsmith.modules import DecodeError, DraftLM, DraftLMConfig, Eagle3, LayerDraft, Policy, Target, Topology, decode
from draftsmith.modules.decoding.requests import DecodeSettings, Generation, Request
from draftsmith.modules.families.eagle3.drafter import Eagle3Config
from draftsmith.modules.interfaces.proposer import DraftState, Frontier, Proposer, Scores
from draftsmith.modules.policies.trees import Chain, DySpecTree, StaticTree
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from scipy.stats import chisquare
from support.drafters import TableDrafter, Wrapped
from support.policies import branching
from support.targets import with_broken
from support.tiers import some_long
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("on_device")

NAN = float("nan")
BROKEN, VOCABULARY = 8, 9  # The token, which the target never chooses, and the tokens of the target


def small_target(value: float | None) -> Target:
    """A target of few tokens, one of which it never chooses and which has this embedding; None leaves it its own."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2)).double()
    head = nn.Linear(32, VOCABULARY).double()
    with torch.no_grad():
        head.weight.copy_(0.5 * model.lm_head.weight)
        head.bias.zero_()
        head.bias[BROKEN] = -1e4
        model.lm_head = head
        if value is not None:
            model.get_input_embeddings().weight[BROKEN] = value
    return Target(model, tiny_tokenizer(), name="small")


def law(target: Target, prompt: tuple[int, ...]) -> np.ndarray:  # type: ignore[type-arg]
    """Distribution of the second token after a prompt, by the untouched model."""
    with target.native() as model, torch.no_grad():
        first_V = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        rows = torch.tensor([[*prompt, token] for token in range(VOCABULARY - 1)])
        return (first_V[:-1, None] * model(rows).logits[:, -1].softmax(-1)).sum(0).numpy()  # type: ignore[no-any-return]


class FixedOpinion(Wrapped):
    """The same distribution after every token that the drafter has states for."""

    def __init__(self, inner: Proposer, chances: list[float]) -> None:
        super().__init__(inner)
        self.log_q_Q = torch.tensor(chances).log()

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        scores = self.inner.expand(state, frontier)
        known = scores.log_probs_BFHQ.isfinite().all(-1, keepdim=True)
        return Scores(log_probs_BFHQ=torch.where(known, self.log_q_Q.expand_as(scores.log_probs_BFHQ), torch.nan))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("policy", [DySpecTree(3, 2, 2), branching(2, 2)])
def test_sampled_answers_keep_their_distribution_when_the_draft_likes_such_a_token(policy: Policy) -> None:
    target = small_target(NAN)
    chances = law(target, (1, 4, 2))
    order = np.argsort(chances[:BROKEN])
    opinion = np.full(VOCABULARY, 0.01)
    opinion[order[2]], opinion[order[-1]], opinion[BROKEN] = 0.52, 0.2, 0.22
    drafter = FixedOpinion(LayerDraft(target, [0]), (opinion / opinion.sum()).tolist())
    requests = [Request((1, 4, 2), index, 2, 1.0) for index in range(12000)]
    settings = DecodeSettings(batch_size=500, ignore_eos=True)
    found = decode(target, requests, settings, drafter=drafter, policy=policy).generations
    counts = np.bincount([generation.tokens[1] for generation in found], minlength=VOCABULARY)
    assert counts[BROKEN] == 0
    assert chisquare(counts[:BROKEN], len(requests) * chances[:BROKEN] / chances[:BROKEN].sum()).pvalue > 1e-3


def outcomes(target: Target, requests: list[Request], drafter: Proposer | None = None,
             policy: Policy | None = None) -> list[Generation]:
    """All generations, failed ones included."""
    try:
        return decode(target, requests, DecodeSettings(batch_size=8), drafter=drafter, policy=policy).generations
    except DecodeError as error:
        return error.result.generations


@pytest.mark.parametrize("temperature", some_long([0.0, 1.0], 9, 1))
@pytest.mark.parametrize("count", [12, 60])
def test_such_a_token_may_end_an_answer(count: int, temperature: float) -> None:
    """As the end token, or as the last token of the limit, it is never read."""
    target = with_broken(60, eos=60)
    scores_VV = torch.full((target.vocab_size, target.vocab_size), -9.0)
    scores_VV[:, 60] = 0.0
    requests = [Request((5, 20 + index % 40, 7), index, 1 + (7 * index) % count, temperature) for index in range(60)]
    plain = outcomes(target, requests)
    for policy in (Chain(1), StaticTree(Topology((-1, 0, 0, 1), (0, 0, 1, 0)))):
        drafted = outcomes(target, requests, TableDrafter(scores_VV), policy)
        assert [(one.finish, one.tokens, one.error) for one in drafted] == [
            (one.finish, one.tokens, one.error) for one in plain]
    assert temperature == 0.0 or Counter(one.finish for one in plain)["eos"] > 0


@pytest.mark.parametrize("eos", some_long([None, 3], 9, 1))
def test_an_accepted_one_inside_an_answer_ends_it_as_without_a_draft(eos: int | None) -> None:
    target = with_broken(60, eos=eos)
    scores_VV = torch.full((target.vocab_size, target.vocab_size), -9.0)
    scores_VV[:, 60] = 0.0
    requests = [Request((5, 20 + index % 40, 7), index, 60, 1.3) for index in range(60)]
    plain = outcomes(target, requests)
    for policy in (Chain(2), StaticTree(Topology((-1, 0, 0, 1), (0, 0, 1, 0)))):
        drafted = outcomes(target, requests, TableDrafter(scores_VV), policy)
        assert [(one.finish, one.tokens, one.error) for one in drafted] == [
            (one.finish, one.tokens, one.error) for one in plain]
    assert Counter(one.finish for one in plain)["error"] > 0


def test_targets_load_and_drafters_start_whatever_token_it_is() -> None:
    target = with_broken(0, 3, 9)
    drafter = Eagle3.create(Eagle3Config(), target)
    assert all(bool(tensor.isfinite().all()) for tensor in drafter.state_dict().values() if tensor.is_floating_point())
    model = DraftLM.create(DraftLMConfig(layers=(0,)), target)
    assert bool(model._embedding().weight.isfinite().all())
    requests = [Request((5, 20 + index, 7), index, 20) for index in range(8)]
    plain = outcomes(target, requests)
    assert any(one.finish == "length" for one in plain)
    for one in (drafter, model):
        assert [found.tokens for found in outcomes(target, requests, one, Chain(2))] == [one.tokens for one in plain]
