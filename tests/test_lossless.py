"""The product's promise: whatever is drafted, the target's own words come out. Reference: transformers' `generate`."""

import random

import pytest
import torch
from drafters import ScriptedDrafter
from scipy.stats import chi2

from draftsmith.modules import Chain, DecodeSettings, Request, StaticTree, Target, Topology, decode
from draftsmith.modules.acceptance import probabilities


def native_greedy(target: Target, prompt: tuple[int, ...], count: int, *, eos: bool = False) -> list[int]:
    with target.native() as model:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0,
                             attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                             eos_token_id=list(target.eos_ids) if eos else None)
    return out[0, len(prompt):].tolist()


def random_topology(rng: random.Random, size: int) -> Topology:
    parents, ranks, used = [-1], [0], {}
    for node in range(1, size):
        parent = rng.randrange(node)
        used[parent] = used.get(parent, -1) + 1
        parents.append(parent)
        ranks.append(used[parent])
    return Topology(tuple(parents), tuple(ranks))


def requests_for(target: Target, count: int, new_tokens: int, temperature: float = 0.0) -> list[Request]:
    rng = random.Random(1)
    return [
        Request(tuple(rng.randrange(4, target.vocab_size) for _ in range(rng.randrange(2, 12))), index,
                new_tokens + rng.randrange(8), temperature)
        for index in range(count)
    ]


@pytest.mark.parametrize("mode", ["random", "wrong", "oracle", "mixed"])
def test_greedy_output_is_the_targets_own_in_float64(tiny_target_f64: Target, mode: str) -> None:
    target, rng = tiny_target_f64, random.Random(7)
    requests = requests_for(target, 12, 60)
    expected = [native_greedy(target, request.tokens, request.max_new_tokens) for request in requests]
    texts = [[*request.tokens, *answer] for request, answer in zip(requests, expected, strict=True)]
    for size in (2, 5, 9, 17):
        drafter = ScriptedDrafter(target.vocab_size, texts, mode)
        result = decode(target, requests, DecodeSettings(batch_size=rng.choice([1, 3, 5]), ignore_eos=True),
                        drafter=drafter, policy=StaticTree(random_topology(rng, size)))
        assert [generation.tokens for generation in result.generations] == expected
        if mode == "wrong":
            assert result.accepted_length == 1.0


def test_thousands_of_tokens_through_random_trees(tiny_target_f64: Target) -> None:
    target, rng = tiny_target_f64, random.Random(3)
    requests = requests_for(target, 24, 120)
    expected = [native_greedy(target, request.tokens, request.max_new_tokens) for request in requests]
    texts = [[*request.tokens, *answer] for request, answer in zip(requests, expected, strict=True)]
    assert sum(map(len, expected)) > 2500
    result = decode(target, requests, DecodeSettings(batch_size=8, ignore_eos=True),
                    drafter=ScriptedDrafter(target.vocab_size, texts, "mixed"), policy=StaticTree(random_topology(rng, 12)))
    assert [generation.tokens for generation in result.generations] == expected
    assert 1.0 < result.accepted_length < 4.0


def test_oracle_chain_is_accepted_whole(tiny_target_f64: Target) -> None:
    target, request = tiny_target_f64, requests_for(tiny_target_f64, 1, 60)[0]
    answer = native_greedy(target, request.tokens, 61)
    request = Request(request.tokens, 0, 61)
    drafter = ScriptedDrafter(target.vocab_size, [[*request.tokens, *answer]], "oracle")
    generation = decode(target, [request], DecodeSettings(ignore_eos=True), drafter=drafter, policy=Chain(4)).generations[0]
    # The first token comes from the prompt's pass; sixty more in passes of 4 accepted + 1 bonus.
    assert generation.tokens == answer
    assert generation.emitted == [5] * 12


@pytest.mark.parametrize("size", [1, 4, 8])
def test_batches_equal_rows_alone_and_share_passes(tiny_target_f64: Target, size: int) -> None:
    target = tiny_target_f64
    requests = requests_for(target, 8, 30)
    alone = [decode(target, [request], DecodeSettings(ignore_eos=True)).generations[0].tokens for request in requests]
    texts = [[*request.tokens, *answer] for request, answer in zip(requests, alone, strict=True)]
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
    original = target.model.generation_config.eos_token_id
    target.model.generation_config.eos_token_id = ending
    try:
        drafter = ScriptedDrafter(target.vocab_size, [[*prompt, *free]], "oracle")
        generation = decode(target, [Request(prompt, 0, 40)], DecodeSettings(), drafter=drafter, policy=Chain(4)).generations[0]
        assert generation.tokens == native_greedy(target, prompt, 40, eos=True)
    finally:
        target.model.generation_config.eos_token_id = original
    assert generation.tokens[-1] == ending
    assert generation.finish == "eos"


def test_stop_text_and_length_inside_an_accepted_block(tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    prompt = requests_for(target, 1, 40)[0].tokens
    free = native_greedy(target, prompt, 40)
    drafter = ScriptedDrafter(target.vocab_size, [[*prompt, *free]], "oracle")
    for limit in range(1, 14):
        result = decode(target, [Request(prompt, 0, limit)], DecodeSettings(ignore_eos=True), drafter=drafter, policy=Chain(4))
        assert result.generations[0].tokens == free[:limit]
    stop = target.tokenizer.decode(free[5:8])
    generation = decode(target, [Request(prompt, 0, 40)], DecodeSettings(ignore_eos=True, stop=(stop,)), drafter=drafter,
                        policy=Chain(4)).generations[0]
    assert generation.finish == "stop"
    text = target.tokenizer.decode(generation.tokens)
    assert stop in text
    assert stop not in target.tokenizer.decode(generation.tokens[:-1])


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 8, 1.0), (1.3, 0, 0.8)])
def test_sampled_output_does_not_depend_on_drafter_or_batch(tiny_target_f64: Target, temperature: float, top_k: int,
                                                            top_p: float) -> None:
    target, rng = tiny_target_f64, random.Random(5)
    requests = requests_for(target, 6, 40, temperature)
    settings = DecodeSettings(top_k=top_k, top_p=top_p, ignore_eos=True, seed=11)
    plain = [generation.tokens for generation in decode(target, requests, settings).generations]
    texts = [[*request.tokens, *answer] for request, answer in zip(requests, plain, strict=True)]
    for mode, batch_size in (("random", 1), ("mixed", 4), ("oracle", 6)):
        batched = DecodeSettings(top_k=top_k, top_p=top_p, ignore_eos=True, seed=11, batch_size=batch_size)
        result = decode(target, requests, batched, drafter=ScriptedDrafter(target.vocab_size, texts, mode),
                        policy=StaticTree(random_topology(rng, 8)))
        assert [generation.tokens for generation in result.generations] == plain
    other = decode(target, requests, DecodeSettings(top_k=top_k, top_p=top_p, ignore_eos=True, seed=12))
    assert [generation.tokens for generation in other.generations] != plain


def g_test(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """p-value of a G-test; cells that expect fewer than five are merged."""
    big = expected * counts.sum() >= 5
    observed = torch.cat([counts[big], counts[~big].sum()[None]]).double()
    wanted = torch.cat([expected[big], expected[~big].sum()[None]]).double() * counts.sum()
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = 2 * (observed[observed > 0] * (observed[observed > 0] / wanted[observed > 0]).log()).sum()
    return float(chi2.sf(float(statistic), len(wanted) - 1))


def sampled_pair_counts(target: Target, prompt: tuple[int, ...], draws: int, temperature: float, top_k: int) -> torch.Tensor:
    """Counts of the second and third sampled token (both behind a drafted tree), [V, V]."""
    requests = [Request(prompt, index, 3, temperature) for index in range(draws)]
    drafter = ScriptedDrafter(target.vocab_size, [], "random")
    policy = StaticTree(Topology((-1, 0, 0, 0, 1, 1, 2), (0, 0, 1, 2, 0, 1, 0)))
    result = decode(target, requests, DecodeSettings(batch_size=256, top_k=top_k, ignore_eos=True), drafter=drafter, policy=policy)
    counts = torch.zeros(target.vocab_size, target.vocab_size)
    for generation in result.generations:
        counts[generation.tokens[0], generation.tokens[1]] += 1
    return counts


def exact_pair_distribution(target: Target, prompt: tuple[int, ...], temperature: float, top_k: int) -> torch.Tensor:
    one = torch.tensor(temperature, dtype=torch.float64)
    with target.native() as model, torch.no_grad():
        first = probabilities(model(torch.tensor([prompt])).logits[0, -1], one, top_k)
        rows = torch.tensor([[*prompt, token] for token in range(target.vocab_size)])
        second = probabilities(model(rows).logits[:, -1], one, top_k)
    return first[:, None] * second


@pytest.mark.slow
def test_g_test_accepts_the_loop_and_rejects_wrong_rules(tiny_target_f64: Target) -> None:
    target, prompt = tiny_target_f64, (20, 31, 7)
    exact = exact_pair_distribution(target, prompt, 1.0, 6)
    counts = sampled_pair_counts(target, prompt, 20_000, 1.0, 6)
    assert g_test(counts.flatten(), exact.flatten()) > 1e-3
    assert g_test(counts.sum(1), exact.sum(1)) > 1e-3
    # The same test must have the power to see a wrong temperature of the bonus and a wrong filter.
    assert g_test(counts.flatten(), exact_pair_distribution(target, prompt, 1.15, 6).flatten()) < 1e-3
    assert g_test(counts.flatten(), exact_pair_distribution(target, prompt, 1.0, 5).flatten() + 1e-9) < 1e-3
