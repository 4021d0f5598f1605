"""A draft joined with a drafter without training, by name: what the name becomes, and that no answer changes."""

import pytest
from draftsmith.modules import (
    PARTNERS,
    POLICIES,
    SPARSE,
    SPECDEC,
    DecodeSettings,
    Ensemble,
    PromptLookup,
    Request,
    Target,
    Topology,
    Union,
    UserError,
    decode,
    parse_joined,
    policy_named,
)
from draftsmith.modules.baselines.joined_policies import PolicyName, joined_drafter, joined_policy
from draftsmith.modules.baselines.registry import COPIED
from support.families import CASES, randomised
from support.tiers import some_long

TREE = Topology((-1, 0, 0, 1), (0, 0, 1, 0))


@pytest.mark.parametrize(("name", "parts"), [
    ("static", PolicyName(own="static")), ("static+lookup", PolicyName(own="static", partner="lookup")),
    ("eagle2-32+recycling-8", PolicyName(own="eagle2-32", partner="recycling", size=8)),
    ("sampled-chain-3+layer_skip-2", PolicyName(own="sampled-chain-3", partner="layer_skip", size=2)),
    ("specdec-0.5+suffix", PolicyName(own="specdec-0.5", partner="suffix")),
])
def test_a_name_has_its_parts(name: str, parts: PolicyName) -> None:
    assert parse_joined(name) == parts


@pytest.mark.parametrize(("name", "message"), [
    ("static+", r"'static\+' joins '', which is no drafter without training; choose from lookup, suffix"),
    ("static+magic", r"joins 'magic', which is no drafter.*such as static\+lookup"),
    ("static+lookup+ngrams", r"joins 'lookup\+ngrams', which is no drafter"),
    *((name, "adds to fastest, which chooses static, static.lookup or none and their sizes by itself; ask for fastest "
             "alone, or for static.lookup") for name in ("fastest+lookup", "fastest-16", "fastest-16+ngrams")),
    ("lookup", "there is no policy 'lookup'"), ("+lookup", "there is no policy ''"),
    ("static-0+lookup", "static wants a whole number"),
    ("static+lookup-0", "ends in '0'; lookup wants a whole number of at least 1 and at most 1024"),
    ("static+ngrams-1", "ngrams wants a whole number of at least 2"),
    ("static+lookup-9999", "at most 1024; choose one"), ("static+lookup-", "ends in ''; lookup wants"),
])
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_joined(name)


@pytest.mark.parametrize(("name", "nodes"), [
    ("static+lookup", 4 + 7), ("static+lookup-5", 4 + 5), ("eagle2-9+recycling-8", 9 + 7), ("chain-2+suffix", 3 + 10),
    ("sampled+lookup-12", 4 + 12),
])
def test_a_pass_has_room_for_all_guesses_of_both(tiny_target: Target, name: str, nodes: int) -> None:
    parts, drafter = parse_joined(name), CASES["eagle"].make(tiny_target)
    policy = joined_policy(parts, policy_named(parts.own, TREE, drafter), tiny_target)
    assert policy.max_size == nodes
    policy.check(joined_drafter(parts, drafter, tiny_target))


def test_a_chain_of_its_own_length_is_copied(tiny_target: Target) -> None:
    """One lookup serves the policy of its name and that with the sizes found to be the fastest."""
    drafter = CASES["eagle"].make(tiny_target)
    ensemble = joined_drafter(parse_joined("static+lookup"), drafter, tiny_target)
    assert isinstance(ensemble, Ensemble)
    assert isinstance(ensemble.parts[0], PromptLookup)
    own = policy_named("static", TREE, drafter)
    for copied in (1, COPIED):
        union = joined_policy(parse_joined(f"static+lookup-{copied}"), own, tiny_target)
        union.check(ensemble)
        assert union.max_size == 4 + copied
    with pytest.raises(UserError, match="8 tokens deep"):
        joined_policy(parse_joined(f"static+lookup-{COPIED + 1}"), own, tiny_target).check(ensemble)


def answers(target: Target, name: str, temperature: float) -> tuple[list[list[int]], float]:
    """Answers to prompts that repeat themselves, and the tokens of a pass."""
    parts, drafter = parse_joined(name), randomised(CASES["eagle"].make(target))
    policy = joined_policy(parts, policy_named(parts.own, TREE, drafter), target)
    requests = [Request((3 + row, 9, 30, 3 + row, 9, 30, 3 + row), row, 24, temperature) for row in range(3)]
    found = decode(target, requests, DecodeSettings(batch_size=2, ignore_eos=True),
                   drafter=joined_drafter(parts, drafter, target), policy=policy)
    plain = decode(target, requests, DecodeSettings(ignore_eos=True))
    assert isinstance(policy, Union)
    if temperature == 0 or not policy.samples:
        assert [one.tokens for one in found.generations] == [one.tokens for one in plain.generations]
    return [one.tokens for one in found.generations], found.accepted_length


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", some_long(
    [f"{kind}+lookup" for kind in POLICIES if kind not in ("confident", SPARSE, SPECDEC)], 5))
def test_lookup_next_to_any_policy_changes_no_answer(tiny_target_f64: Target, name: str, temperature: float) -> None:
    answers(tiny_target_f64, name, temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("partner", some_long(PARTNERS, 5))
def test_any_partner_changes_no_answer(tiny_target_f64: Target, partner: str, temperature: float) -> None:
    assert answers(tiny_target_f64, f"static+{partner}", temperature)[1] > 1
