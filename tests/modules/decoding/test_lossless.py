"""The product's promise: whatever is drafted, the target's own words come out. Reference: transformers' `generate`."""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from draftsmith.modules import Drafter, Policy, Request, StoppedChain, Target, TokenTree, Topology, baseline, decode
from draftsmith.modules.decoding import verifier
from draftsmith.modules.decoding.requests import DecodeSettings
from draftsmith.modules.policies.stopping_chains import EarlyExit, MaxProbability, PathProbability, SampledChain
from draftsmith.modules.policies.trees import Chain, DySpecTree, Eagle2Tree, StaticTree
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.modules.verification import acceptance_rules as rules
from draftsmith.modules.verification.acceptance_rules import Accepted, Chances, Equality, Typical, follow
from draftsmith.modules.verification.sampling import Sampling, choose, probabilities
from scipy.stats import chi2
from support.answers import greedy_answers, native_greedy, requests_for, texts_of
from support.drafters import DepthDrafter, ScriptedDrafter, TableDrafter, TargetDrafter, random_log_probs
from support.policies import FixedLength, branching
from support.targets import random_model
from support.tiers import others_long, some_long
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

pytestmark = pytest.mark.usefixtures("on_device")


def random_topology(rng: random.Random, size: int) -> Topology:
    parents, ranks, used = [-1], [0], {}
    for node in range(1, size):
        parent = rng.randrange(node)
        used[parent] = used.get(parent, -1) + 1
        parents.append(parent)
        ranks.append(used[parent])
    return Topology(tuple(parents), tuple(ranks))


@pytest.mark.parametrize("mode", others_long(["random", "wrong", "oracle", "mixed"], ("mixed",)))
def test_greedy_output_is_the_targets_own_in_float64(tiny_target_f64: Target, mode: str) -> None:
    target, rng = tiny_target_f64, random.Random(7)
    requests = requests_for(target, 12, 60)
    expected = greedy_answers(target, requests)
    texts = texts_of(requests, expected)
    for size in (2, 5, 9, 17):
        drafter = ScriptedDrafter(target.vocab_size, texts, mode)
        result = decode(target, requests, DecodeSettings(batch_size=rng.choice([1, 3, 5]), ignore_eos=True),
                        drafter=drafter, policy=StaticTree(random_topology(rng, size)))
        assert [generation.tokens for generation in result.generations] == expected
        if mode == "wrong":
            assert result.accepted_length == 1.0


@pytest.mark.parametrize("penalty", some_long([1.3, 0.9], 2))
def test_repetition_penalty_is_that_of_generate(tiny_target_f64: Target, penalty: float) -> None:
    target, rng = tiny_target_f64, random.Random(9)
    requests = requests_for(target, 7, 50)
    expected = greedy_answers(target, requests, penalty)
    assert expected != greedy_answers(target, requests)
    texts = texts_of(requests, expected)
    settings = DecodeSettings(batch_size=3, ignore_eos=True, repetition_penalty=penalty, prefill_chunk=4)
    assert [g.tokens for g in decode(target, requests, settings).generations] == expected
    for policy in (StaticTree(random_topology(rng, 9)), Eagle2Tree(9, 3, 3)):
        drafter = ScriptedDrafter(target.vocab_size, texts, "mixed")
        result = decode(target, requests, settings, drafter=drafter, policy=policy)
        assert [generation.tokens for generation in result.generations] == expected
        assert result.accepted_length > 1.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_repetition_penalty_of_half_precision_logits_is_applied_in_float32(dtype: torch.dtype) -> None:
    """Plain decoding gives the same logits in half precision as `generate`; only the penalty could round otherwise."""
    target = Target(tiny_model(dtype=dtype), tiny_tokenizer(), name="half")
    settings = DecodeSettings(repetition_penalty=1.3)
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    changed = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(4, target.vocab_size, (6,), generator=generator)
        # The tokens that occurred lead, a few rounding steps apart: divided by the penalty, some of them would tie.
        logits_V = torch.zeros(target.vocab_size, dtype=dtype)
        steps = torch.randint(0, 12, (6,), generator=generator) * torch.finfo(dtype).eps * 2
        logits_V[prompt] = (3.5 + steps).to(dtype)
        opened = verifier.BatchVerifier(settings, 1, 8, target, False)
        opened.open(0, Request(tuple(prompt.tolist()), 0, 4))
        chosen_B, _ = opened.first_tokens([0], torch.tensor([0]), logits_V[None, None])
        wanted = processor(prompt[None], logits_V[None].float()).argmax(-1)
        assert chosen_B.tolist() == wanted.tolist()
        accepted, _ = opened.verify(Topology.chain(0).plant(chosen_B[:, None]), logits_V[None, None],
                                      torch.zeros(1, dtype=torch.long))
        read_1L = torch.cat([prompt, chosen_B])[None]
        assert accepted.bonus_B.tolist() == processor(read_1L, logits_V[None].float()).argmax(-1).tolist()
        changed += int(processor(prompt[None], logits_V[None]).argmax(-1)) != int(wanted)
    assert changed  # the penalty in half precision does choose other tokens


def test_min_p_is_that_of_generate(tiny_target_f64: Target) -> None:
    """Every token that is drawn has at least its share of the likeliest one's probability; the whole law is held."""
    target, prompt = tiny_target_f64, (5, 9, 33)
    with target.native() as model, torch.no_grad():
        logits_1V = model(torch.tensor([prompt])).logits[:, -1]
    processed_1V = MinPLogitsWarper(0.2)(torch.tensor([prompt]), logits_1V / 0.8)
    settings = DecodeSettings(min_p=0.2, batch_size=256, ignore_eos=True)
    requests = [Request(prompt, index, 1, 0.8) for index in range(3000)]
    counts = Counter(tuple(g.tokens) for g in decode(target, requests, settings).generations)
    share_V = processed_1V[0].softmax(-1)
    exact = {(token,): float(share) for token, share in enumerate(share_V) if share > 0}
    assert 1 < len(exact) < target.vocab_size / 2
    assert g_test(counts, exact) > 1e-3


@pytest.mark.parametrize("name", ["eagle2", "dyspec", "sampled", "stopped", "sampled chain"])
@pytest.mark.parametrize("family", ["mixed", "table", "depth"])
def test_every_policy_is_lossless_when_greedy(tiny_target_f64: Target, name: str, family: str) -> None:
    target = tiny_target_f64
    requests = requests_for(target, 6, 40)
    expected = greedy_answers(target, requests)
    texts = texts_of(requests, expected)
    policy: Policy = {
        "eagle2": lambda: Eagle2Tree(10, 4, 3),
        "dyspec": lambda: DySpecTree(10, 4, 3),
        "sampled": lambda: branching(2, 2, 1),
        "stopped": lambda: StoppedChain(5, PathProbability(0.02)),
        "sampled chain": lambda: SampledChain(4, MaxProbability(0.01)),
    }[name]()
    drafter: Drafter = {
        "mixed": lambda: ScriptedDrafter(target.vocab_size, texts, "mixed"),
        "table": lambda: TableDrafter(random_log_probs(target.vocab_size, target.vocab_size)),
        "depth": lambda: DepthDrafter(random_log_probs(3, target.vocab_size)),
    }[family]()
    result = decode(target, requests, DecodeSettings(batch_size=4, ignore_eos=True), drafter=drafter, policy=policy)
    assert [generation.tokens for generation in result.generations] == expected
    assert family != "mixed" or result.accepted_length > 1.2


@pytest.mark.parametrize(("name", "temperature"), some_long([
    ("recycling", 0.0), ("recycling", 0.9), ("prompt_lookup", 0.0), ("prompt_lookup", 0.9), ("ngrams", 0.0),
    ("layer_skip", 0.9)], 9))
def test_every_policy_serves_drafters_that_name_candidates(tiny_target_f64: Target, name: str,
                                                           temperature: float) -> None:
    """Few guesses, other ones at every node, sometimes none: greedy output is the target's, and no batch matters."""
    target = tiny_target_f64
    requests = requests_for(target, 4, 16, temperature)
    plain = [g.tokens for g in decode(target, requests, DecodeSettings(ignore_eos=True)).generations]
    policies = (Eagle2Tree(8, 3, 3), DySpecTree(8, 3, 3), branching(2, 1, 1), StoppedChain(4, EarlyExit(0.5)),
                SampledChain(3, PathProbability(0.05)))
    for policy in policies:
        runs = [decode(target, requests, DecodeSettings(batch_size=size, ignore_eos=True),
                       drafter=baseline(name, target)[0], policy=policy) for size in (1, 3)]
        found = [[generation.tokens for generation in run.generations] for run in runs]
        if temperature == 0 or type(policy) in (Eagle2Tree, StoppedChain):
            assert found == [plain, plain]
        elif name in ("prompt_lookup", "layer_skip"):
            # The others remember across requests, so that batches change what is drafted.
            assert found[0] == found[1]


@pytest.mark.long
def test_sampled_drafts_do_not_depend_on_the_batch(tiny_target_f64: Target) -> None:
    """By rejection the tokens depend on the draft; on the batch and the order of the queue they do not."""
    target = tiny_target_f64
    requests = requests_for(target, 6, 30, 0.9)
    drafter = TableDrafter(random_log_probs(target.vocab_size, target.vocab_size, sharpness=3.0))
    policies = (branching(3, 2), DySpecTree(8, 3, 3), SampledChain(4, FixedLength(4)))
    for policy in policies:
        whole, alone = (decode(target, order, DecodeSettings(batch_size=size, ignore_eos=True), drafter=drafter,
                               policy=policy) for order, size in ((requests, 4), (requests[::-1], 1)))
        assert [g.tokens for g in whole.generations] == [g.tokens for g in alone.generations[::-1]]


def test_lossy_verification_says_so(tiny_target_f64: Target) -> None:
    target, requests = tiny_target_f64, requests_for(tiny_target_f64, 3, 20, 1.0)
    drafter = TargetDrafter(target)
    exact, lossy = (decode(target, requests, DecodeSettings(ignore_eos=True, lossy=rule), drafter=drafter,
                           policy=Chain(3)) for rule in (None, Typical(epsilon=0.001, delta=0.01)))
    assert (exact.stats.lossless, lossy.stats.lossless) == (True, False)
    assert lossy.accepted_length > exact.accepted_length


def test_oracle_chain_is_accepted_whole(tiny_target_f64: Target) -> None:
    target, request = tiny_target_f64, requests_for(tiny_target_f64, 1, 60)[0]
    answer = native_greedy(target, request.tokens, 61)
    request = Request(request.tokens, 0, 61)
    drafter = ScriptedDrafter(target.vocab_size, [[*request.tokens, *answer]], "oracle")
    generation = decode(target, [request], DecodeSettings(ignore_eos=True), drafter=drafter,
                        policy=Chain(4)).generations[0]
    # The first token comes from the prompt's pass; sixty more in passes of 4 accepted + 1 bonus.
    assert generation.tokens == answer
    assert generation.emitted == [5] * 12


@pytest.mark.parametrize("size", [1, 4, 8])
def test_batches_equal_rows_alone_and_share_passes(tiny_target_f64: Target, size: int) -> None:
    target = tiny_target_f64
    requests = requests_for(target, 8, 30)
    alone = [decode(target, [request], DecodeSettings(ignore_eos=True)).generations[0].tokens for request in requests]
    texts = texts_of(requests, alone)
    result = decode(target, requests, DecodeSettings(batch_size=size, ignore_eos=True),
                    drafter=ScriptedDrafter(target.vocab_size, texts, "mixed"), policy=Chain(3))
    assert [generation.tokens for generation in result.generations] == alone
    if size == 8:
        assert result.stats.target_calls == max(generation.passes for generation in result.generations)


def test_end_token_inside_an_accepted_block(tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    prompt = requests_for(target, 1, 40)[0].tokens
    free = native_greedy(target, prompt, 40)
    # Call a token of the answer's middle the end token: it then lies inside an accepted block of five.
    ending = next(token for place, token in enumerate(free) if place >= 9 and token not in free[:place])
    model = tiny_model(dtype=torch.float64)
    model.generation_config.eos_token_id = ending
    target = Target(model, target.tokenizer, name="ending")
    drafter = ScriptedDrafter(target.vocab_size, [[*prompt, *free]], "oracle")
    generation = decode(target, [Request(prompt, 0, 40)], DecodeSettings(), drafter=drafter,
                        policy=Chain(4)).generations[0]
    assert generation.tokens == native_greedy(target, prompt, 40, eos=True)
    assert generation.tokens[-1] == ending
    assert generation.finish == "eos"


def test_stop_text_and_length_inside_an_accepted_block(tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    prompt = requests_for(target, 1, 40)[0].tokens
    free = native_greedy(target, prompt, 40)
    drafter = ScriptedDrafter(target.vocab_size, [[*prompt, *free]], "oracle")
    for limit in range(1, 14):
        result = decode(target, [Request(prompt, 0, limit)], DecodeSettings(ignore_eos=True), drafter=drafter,
                        policy=Chain(4))
        assert result.generations[0].tokens == free[:limit]
    stop = target.tokenizer.decode(free[5:8])
    generation = decode(target, [Request(prompt, 0, 40)], DecodeSettings(ignore_eos=True, stop=(stop,)),
                        drafter=drafter, policy=Chain(4)).generations[0]
    assert generation.finish == "stop"
    text = target.tokenizer.decode(generation.tokens)
    assert stop in text
    assert stop not in target.tokenizer.decode(generation.tokens[:-1])


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), some_long([(0.7, 8, 0.9), (1.0, 0, 1.0), (1.3, 0, 0.8)], 3))
def test_sampled_output_does_not_depend_on_drafter_or_batch(tiny_target_f64: Target, temperature: float, top_k: int,
                                                            top_p: float) -> None:
    target, rng = tiny_target_f64, random.Random(5)
    requests = requests_for(target, 6, 40, temperature)
    settings = DecodeSettings(top_k=top_k, top_p=top_p, ignore_eos=True, seed=11)
    plain = [generation.tokens for generation in decode(target, requests, settings).generations]
    texts = texts_of(requests, plain)
    for mode, batch_size in (("random", 1), ("mixed", 4), ("oracle", 6)):
        batched = DecodeSettings(top_k=top_k, top_p=top_p, ignore_eos=True, seed=11, batch_size=batch_size)
        result = decode(target, requests, batched, drafter=ScriptedDrafter(target.vocab_size, texts, mode),
                        policy=StaticTree(random_topology(rng, 8)))
        assert [generation.tokens for generation in result.generations] == plain
    other = decode(target, requests, DecodeSettings(top_k=top_k, top_p=top_p, ignore_eos=True, seed=12))
    assert [generation.tokens for generation in other.generations] != plain


def g_test(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """p-value of a G-test; cells that expect fewer than five are merged, an impossible outcome is decisive."""
    if any(exact.get(outcome, 0.0) == 0.0 for outcome in counts):
        return 0.0
    total = sum(counts.values())
    cells = [(counts[outcome], probability * total) for outcome, probability in exact.items()
             if probability * total >= 5]
    rest = (total - sum(seen for seen, _ in cells), total - sum(wanted for _, wanted in cells))
    cells += [rest] if rest[1] > 1e-9 else []
    statistic = 2 * sum(seen * math.log(seen / wanted) for seen, wanted in cells if seen)
    return float(chi2.sf(statistic, len(cells) - 1))


def sampled_counts(target: Target, drafter: TargetDrafter, draws: int) -> Counter[tuple[int, ...]]:
    """Counts of the emitted triples of tokens; the second and third come from a drafted tree."""
    requests = [Request(PROMPT, index, 3, TEMPERATURE) for index in range(draws)]
    policy = StaticTree(Topology((-1, 0, 0, 0, 1, 1, 2), (0, 0, 1, 2, 0, 1, 0)))
    result = decode(target, requests, DecodeSettings(batch_size=256, top_k=TOP_K, ignore_eos=True), drafter=drafter,
                    policy=policy)
    assert result.accepted_length > 1.3
    return Counter(tuple(generation.tokens) for generation in result.generations)


def exact_distribution(drafter: TargetDrafter, temperature: float = 1.2) -> dict[tuple[int, ...], float]:
    """The probability of every triple, by enumeration of the target's processed distributions."""
    exact = {(): 1.0}
    for _ in range(3):
        exact = {(*prefix, int(token)): mass * float(row[token]) for prefix, mass in exact.items()
                 for row in [probabilities(drafter.logits(PROMPT + prefix), torch.tensor(temperature), TOP_K)]
                 for token in row.nonzero()[:, 0]}
    return exact


PROMPT, TEMPERATURE, TOP_K = (20, 31, 7), 1.2, 5


@pytest.mark.slow
def test_sampled_output_passes_a_g_test(tiny_target_f64: Target) -> None:
    drafter = TargetDrafter(tiny_target_f64)
    counts, exact = sampled_counts(tiny_target_f64, drafter, 10_000), exact_distribution(drafter)
    assert g_test(counts, exact) > 1e-3
    firsts, first_exact = Counter[tuple[int, ...]](), dict[tuple[int, ...], float]()
    for outcome, probability in exact.items():
        firsts[outcome[1:]] += counts[outcome]
        first_exact[outcome[1:]] = first_exact.get(outcome[1:], 0.0) + probability
    assert g_test(Counter({pair: seen for pair, seen in firsts.items() if seen}), first_exact) > 1e-3
    # The test has the power to tell a temperature from one a sixth lower.
    assert g_test(counts, exact_distribution(drafter, 1.0)) < 1e-3


class AnyLikelyChild(Equality):
    """Wrong: the likeliest child is taken without asking whether the target drew it."""

    def accept(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
        forced_BN = choose(logits_BNV, chances.choices_BN, sampling)
        forced_BN[:, 0] = tree.tokens_BN[:, 1]
        return follow(tree, forced_BN)


def choose_untempered(logits_BNV: Tensor, uniforms_BN: Tensor, sampling: Sampling) -> Tensor:
    """Wrong: the temperature is forgotten, as EAGLE's first bonus token did."""
    return choose(logits_BNV, uniforms_BN, replace(sampling, temperature_B=torch.ones_like(sampling.temperature_B)))


class DrawnAgain(Equality):
    """Wrong: the same random number at every depth, so that neighbouring tokens depend on each other."""

    def accept(self, tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, chances: Chances) -> Accepted:
        same_BN = chances.choices_BN[:, :1].expand_as(chances.choices_BN)
        return super().accept(tree, logits_BNV, sampling, replace(chances, choices_BN=same_BN))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wrong"),
                         [("Equality", AnyLikelyChild), ("choose", choose_untempered), ("Equality", DrawnAgain)])
def test_g_test_rejects_deliberately_wrong_rules(tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch, name: str,
                                                 wrong: Callable[..., object]) -> None:
    drafter = TargetDrafter(tiny_target_f64)
    exact = exact_distribution(drafter)
    monkeypatch.setattr(rules, name, wrong)
    if name == "choose":
        monkeypatch.setattr(verifier, name, wrong)
    assert g_test(sampled_counts(tiny_target_f64, drafter, 4_000), exact) < 1e-3

@pytest.mark.parametrize("window", [5, 40])
def test_long_prompts_and_windows_narrower_than_a_tree_keep_the_answers(window: int) -> None:
    """Passes see whole prompts of a hundred tokens, and windows count positions, which siblings share."""
    target = Target(random_model("Mistral", sliding_window=window).double(), None, name="windowed")
    requests = [Request(tuple((7 * row + 5 * place + place * place) % 90 + 4 for place in range(length)), row, 12)
                for row, length in enumerate((100, 9, 70))]
    expected = greedy_answers(target, requests)
    texts = texts_of(requests, expected)
    # A chain of seven with siblings in between, so that slots run ahead of positions.
    tree = StaticTree(Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1), *((0,) * depth
                                                                                       for depth in range(4, 8))]))
    for mode in ("mixed", "oracle"):
        drafter = ScriptedDrafter(target.vocab_size, texts, mode)
        settings = DecodeSettings(batch_size=2, prefill_chunk=48, ignore_eos=True)
        result = decode(target, requests, settings, drafter=drafter, policy=tree)
        assert [one.tokens for one in result.generations] == expected
    assert result.accepted_length > 4
