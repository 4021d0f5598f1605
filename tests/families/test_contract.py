"""Tests of every drafter family: alignment, train equals decode, losslessness, learning, artifacts."""

import json
import random
from dataclasses import replace
from functools import cache
from itertools import cycle, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.export import load_artifact, save_artifact
from draftsmith.modules import (
    DRAFTERS,
    Chain,
    DecodeSettings,
    Drafter,
    Drafts,
    DySpecTree,
    Eagle2Tree,
    Features,
    Policy,
    Request,
    Scores,
    StaticTree,
    Target,
    Topology,
    UserError,
    decode,
    ranked_text,
)
from draftsmith.modules.target.draft_vocabulary import OwnOutput
from draftsmith.trainers import DraftModule, fit
from draftsmith.trainers.chunked_losses import supervise
from safetensors.torch import load_file
from support.answers import frontier, observed
from support.cases import CycleData, cycle_target
from support.families import CASES, randomised
from support.tiers import FIRST_CASES, others_long
from torch import Tensor

TREE = Topology((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0))
"""A root, two children, and three grandchildren: two depths, which every family can score."""
LENGTHS = (9, 14, 6)
CORRECTED = tuple(name for name in CASES if name.startswith("block"))
"""Cases of drafters of blocks, which differ in their correction, or in what their slots see and predict."""
LEARNING = (*FIRST_CASES, *(name for name in CORRECTED if name not in FIRST_CASES), "medusa-2", "hydra++",
            "eagle-hass-reduced", "eagle-fspad-reduced", "eagle3-layers", "falcon-official", "draft-lm-depths")
"""Cases that learn in ways of their own. Of the others the loss by hand and decoding as in training are tested."""


def test_every_family_has_a_case(tiny_target: Target) -> None:
    assert {CASES[name].make(tiny_target).family for name in CASES} == {family.family for family in DRAFTERS}


@pytest.mark.parametrize("name", CASES)
def test_state_size_is_the_width_of_the_states(name: str, tiny_target: Target) -> None:
    drafter, target = made(name, tiny_target)
    drafts = drafter(target.encode(Features.from_rows(conversations(target)), drafter.taps))
    found = [states.shape[-1] for states in (drafts.hidden_BLKD, drafts.estimated_BLKD) if states is not None]
    assert sum(found) == drafter.state_size


@cache
def judge(name: str, original: Target) -> Target:
    """The target that verifies drafts, one object for all tests."""
    return CASES[name].verifier(original)


def made(name: str, original: Target) -> tuple[Drafter, Target]:
    """A drafter and the target that verifies its drafts: the original, unless it is trained too. Equal every time."""
    target = judge(name, original)
    torch.manual_seed(7)
    return randomised(CASES[name].make(target).to(target.dtype)), target


def test_a_trained_target_differs_from_the_original(tiny_target: Target) -> None:
    """Otherwise the cases of such a family would test nothing."""
    features = Features.from_rows(conversations(tiny_target))
    for name in CASES:
        target = judge(name, tiny_target)
        assert (target is not tiny_target) == CASES[name].module(tiny_target).changes_target, name
        if target is not tiny_target:
            ours, theirs = (one.logits(one.encode(features).final()).argmax(-1) for one in (target, tiny_target))
            assert float((ours == theirs).float().mean()) < 0.9


def conversations(target: Target, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[list[int], list[bool]]]:
    """Random rows with alternating prompts and answers."""
    rng = random.Random(5)
    return [([rng.randrange(4, target.vocab_size) for _ in range(length)],
             [place >= 2 and place % 5 != 4 for place in range(length)]) for length in lengths]


def alone(target: Target, drafter: Drafter, row: tuple[list[int], list[bool]]) -> Features:
    return target.encode(Features.from_rows([row]), drafter.taps)


def packed(target: Target, drafter: Drafter, rows: list[tuple[list[int], list[bool]]], *, left: int = 0) -> Features:
    """All rows in one, with `left` positions of padding before them and three after."""
    tokens, supervised, segments, positions = [0] * left, [False] * left, [-1] * left, [0] * left
    for number, (row, flags) in enumerate(rows):
        tokens += row
        supervised += flags
        segments += [number] * len(row)
        positions += range(len(row))
    features = Features(tokens_BL=torch.tensor([tokens + [0] * 3]),
                        supervised_BL=torch.tensor([supervised + [False] * 3]),
                        segments_BL=torch.tensor([segments + [-1] * 3]),
                        positions_BL=torch.tensor([positions + [0] * 3]))
    return target.encode(features, drafter.taps)


def starts(lengths: tuple[int, ...], left: int) -> list[int]:
    return [left + sum(lengths[:row]) for row in range(len(lengths))]


# Alignment ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", others_long(CASES))
@pytest.mark.parametrize("left", [0, 4])
def test_other_segments_and_padding_change_nothing(name: str, left: int, tiny_target_f64: Target) -> None:
    """In float64: each step of some reads the rounding of the one before it, and makes it larger."""
    (drafter, target), rows = made(name, tiny_target_f64), conversations(tiny_target_f64)
    with torch.no_grad():
        together = drafter(packed(target, drafter, rows, left=left)).hidden_BLKD[0]
        for row, start in zip(rows, starts(LENGTHS, left), strict=True):
            features = alone(target, drafter, row)
            drafts = drafter(features)
            for step, offset in enumerate(drafts.offsets):
                places = features.labels(offset)[1][0].nonzero()[:, 0]
                torch.testing.assert_close(together[start + places, step], drafts.hidden_BLKD[0, places, step],
                                           atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", others_long(CASES))
def test_no_guess_reads_the_token_it_guesses(name: str, tiny_target: Target) -> None:
    (drafter, target), row = made(name, tiny_target), conversations(tiny_target)[1]
    with torch.no_grad():
        before = drafter(alone(target, drafter, row))
        for changed in range(2, len(row[0])):
            tokens = list(row[0])
            tokens[changed] = 4 + (tokens[changed] + 7) % (target.vocab_size - 4)
            after = drafter(alone(target, drafter, (tokens, row[1])))
            for step, offset in enumerate(before.offsets):
                known = max(0, changed - offset + 1)
                torch.testing.assert_close(after.hidden_BLKD[0, :known, step], before.hidden_BLKD[0, :known, step],
                                           atol=1e-5, rtol=1e-5)
                if offset == before.offsets[0]:
                    assert not torch.allclose(after.hidden_BLKD[0, known:, step], before.hidden_BLKD[0, known:, step])


Answer = tuple[int, Tensor, list[int], Tensor]
"""An offset, log-probabilities [L, Q], the tokens they are of, and the distance [L] from the target's state, if any."""


def answers(name: str, original: Target, row: tuple[list[int], list[bool]]) -> list[Answer]:
    """The terms of a row's loss in their order: the target's own next token, if the target is trained too, and then
    every draft step."""
    drafter, target = made(name, original)
    features = alone(target, drafter, row)
    drafts, every = drafter(features), list(range(target.vocab_size))
    entries = every if drafter.token_ids_Q is None else drafter.token_ids_Q.tolist()
    final_LD, none_L = features.final()[0], torch.zeros(len(row[0]))
    own = [] if target is original else [(1, target.logits(final_LD).log_softmax(-1), every, none_L)]
    held = drafts.hidden_BLKD if drafts.estimated_BLKD is None else drafts.estimated_BLKD
    found = []
    for step, offset in enumerate(drafts.offsets):
        apart_L = none_L.clone()
        if drafts.estimates is not None:
            known = max(0, len(row[0]) - drafts.estimates[step])
            states = held[0, :known, step], final_LD[drafts.estimates[step] :]
            apart_L[:known] = torch.nn.functional.smooth_l1_loss(*states, reduction="none").mean(-1)
        found.append((offset, drafter.project(drafts.hidden_BLKD[0, :, step], step).log_softmax(-1), entries, apart_L))
    return own + found


def placed(name: str, original: Target, **settings: Any) -> DraftModule:
    """The module at three quarters of a run, when all weights are trained, with the weights of `made`."""
    module = CASES[name].module(original, max_minutes=1.0, **settings)
    module.configure_model()
    # After the steps that any run makes, whose progress time alone does not decide.
    module.__class__ = type("Late", (type(module),), {"global_step": 10})
    module.seconds = 45.0
    adapter = CASES[name].change(original)
    module.restore({**made(name, original)[0].state_dict(), **({} if adapter is None else adapter.tensors())})
    return module.eval()


@pytest.mark.parametrize("name", others_long(CASES))
def test_the_loss_equals_the_sum_over_labels_by_hand(name: str, tiny_target: Target) -> None:
    rows, module = conversations(tiny_target), placed(name, tiny_target, objective="hard")
    expected, count = 0.0, 0
    with torch.no_grad():
        total, sums_KC, weights, _ = module.loss(packed(tiny_target, module.drafter, rows, left=2))
        for tokens, flags in rows:
            given = answers(name, tiny_target, (tokens, flags))
            original_LV = tiny_target.logits(tiny_target.encode(Features.from_rows([(tokens, flags)])).final()[0])
            for number, (weight, (offset, log_probs_LQ, ids, apart_L)) in enumerate(zip(weights, given, strict=True)):
                for place in range(len(tokens) - offset):
                    if flags[place + offset] and tokens[place + offset] in ids:
                        log_q = log_probs_LQ[place, ids.index(tokens[place + offset])]
                        if module.changes_target and number == 0:
                            # A changed target's own predictions are compared with the original's.
                            log_q = (original_LV[place].softmax(-1) * log_probs_LQ[place]).sum()
                        expected -= weight * float(log_q)
                        expected += weight * module.config.feature_weight * float(apart_L[place])
                        count += 1
    assert all(weights)
    assert weights == module.weights(len(weights))
    assert count == int(sums_KC[:, 0].sum())
    assert float(total) == pytest.approx(expected, rel=1e-4)


def test_supervision_follows_the_predicted_token(tiny_target: Target) -> None:
    (drafter, target), rows = made("medusa", tiny_target), conversations(tiny_target)
    found = supervise(packed(target, drafter, rows), (1, 3))
    written = [token for tokens, flags in rows for place, token in enumerate(tokens) if flags[place] and place >= 1]
    assert sorted(found.labels_NK[:, 0].tolist()) == sorted(written)


# Train equals decode --------------------------------------------------------------------------------------------------


def chain_scores(drafter: Drafter, features: Features, observations: list[tuple[list[int], int, list[int]]],
                 roots: list[int], depth: int) -> Tensor:
    """Log-probabilities [B, depth, Q] of the true tokens' successors, drafted step by step."""
    rows = torch.arange(len(roots))
    state = drafter.start(len(roots), 64)
    for seen in observations:
        drafter.observe(state, torch.tensor(seen[0]), observed(features, *seen))
    levels: list[Tensor] = []
    for node in range(depth):
        tokens_BF = features.tokens_BL[rows, torch.tensor(roots) + node][:, None]
        scores = drafter.expand(state, frontier([node], [node - 1], tokens_BF))
        if scores.candidates_BFHQ is not None:
            # Candidates alone have a chance.
            known = scores.log_probs_BFHQ
            blank_BFHV = known.new_full((*known.shape[:3], drafter.vocab_size), -torch.inf)
            scores = Scores(log_probs_BFHQ=blank_BFHV.scatter(-1, scores.candidates_BFHQ, known))
        levels += scores.log_probs_BFHQ[:, 0].unbind(1)
        if len(levels) >= depth:
            break
    return torch.stack(levels[:depth], dim=1)


@pytest.mark.parametrize("name", CASES)
def test_train_equals_decode(name: str, tiny_target: Target) -> None:
    (drafter, target), depth = made(name, tiny_target), 2
    rows = conversations(target, (16, 16, 16))
    with torch.no_grad():
        features = target.encode(Features.from_rows(rows), drafter.taps)
        drafts = drafter(features)
        # All rows at once, two of them in another order, one alone, and one without news, which keeps its state.
        seen = [([0, 1, 2], 0, [5, 2, 5]), ([2, 0], 5, [3, 1]), ([0], 6, [1]), ([1], 2, [0])]
        found = chain_scores(drafter, features, seen, [7, 2, 8], depth)
        for row, root in enumerate([7, 2, 8]):
            for level in range(depth):
                index, step = root + 1 - drafts.offsets[0], level
                if drafter.unrolls is not None:
                    index, step = index + level, drafter.unrolls
                logits_Q = drafter.project(drafts.hidden_BLKD[row, index, step], step)
                torch.testing.assert_close(found[row, level], logits_Q.log_softmax(-1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", others_long(CASES))
def test_rows_can_be_cleared_moved_and_removed(name: str, tiny_target: Target) -> None:
    drafter, target = made(name, tiny_target)
    features = target.encode(Features.from_rows(conversations(target, (16, 16, 16))), drafter.taps)
    order = torch.tensor([2, 1])
    root = frontier([0], [-1], features.tokens_BL[[2, 1], [6, 4]][:, None])
    with torch.no_grad():
        state = drafter.start(3, 64)
        drafter.observe(state, torch.arange(3), observed(features, [0, 1, 2], 0, [5, 4, 6]))
        state.keep(order)
        kept = drafter.expand(state, root).log_probs_BFHQ
        fresh = drafter.start(2, 64)
        drafter.observe(fresh, torch.arange(2), observed(features, [2, 1], 0, [6, 4]))
        torch.testing.assert_close(kept, drafter.expand(fresh, root).log_probs_BFHQ, atol=1e-5, rtol=1e-4)
        poisoned = observed(features, [0], 0, [5])
        poisoned.final_BND[:] = torch.nan
        drafter.observe(state, torch.tensor([0]), poisoned)
        state.clear(torch.tensor([0]))
        drafter.observe(state, torch.tensor([0]), observed(features, [2], 0, [6]))
        torch.testing.assert_close(drafter.expand(state, root).log_probs_BFHQ[0], kept[0], atol=1e-5, rtol=1e-4)


# Losslessness ---------------------------------------------------------------------------------------------------------


POLICIES: dict[str, Policy] = {"chain": Chain(2), "tree": StaticTree(TREE), "eagle-2": Eagle2Tree(7, 2, 3),
                               "dyspec": DySpecTree(6)}


def requests(target: Target, temperature: float = 0.0) -> list[Request]:
    rng = random.Random(11)
    return [Request(tuple(rng.randrange(4, target.vocab_size) for _ in range(rng.randrange(2, 9))), index,
                    20 + rng.randrange(9), temperature) for index in range(7)]


@cache
def reference(target: Target) -> list[list[int]]:
    """Answers of transformers' own generate."""
    answers = []
    for request in requests(target):
        prompt = torch.tensor([request.tokens])
        with target.native() as model:
            out = model.generate(prompt, max_new_tokens=request.max_new_tokens, do_sample=False, pad_token_id=0,
                                 attention_mask=torch.ones_like(prompt), eos_token_id=None)
        answers.append(out[0, prompt.shape[1] :].tolist())
    return answers


@pytest.mark.parametrize(("name", "policy", "batch_size"), others_long(
    [(name, policy, size) for name in CASES for policy, size in zip(POLICIES, cycle((3, 1)), strict=False)
     # Every policy with a family's first case and with each correction; with other cases a batch and a row alone.
     if name in (*FIRST_CASES, *CORRECTED) or policy in ("tree", "eagle-2")]))
def test_greedy_answers_equal_those_of_generate(
    name: str, policy: str, batch_size: int, tiny_target_f64: Target
) -> None:
    drafter, target = made(name, tiny_target_f64)
    # In a batch rows end and others take their places; a row alone knows nothing of the others.
    asked = requests(target) if batch_size > 1 else requests(target)[:2]
    result = decode(target, asked, DecodeSettings(batch_size=batch_size, ignore_eos=True, prefill_chunk=4),
                    drafter=drafter, policy=POLICIES[policy])
    assert [generation.tokens for generation in result.generations] == reference(target)[: len(asked)]


@pytest.mark.parametrize("name", others_long(CASES))
def test_sampled_answers_equal_those_of_the_target_alone(name: str, tiny_target_f64: Target) -> None:
    settings, (drafter, target) = DecodeSettings(batch_size=3, ignore_eos=True, seed=4), made(name, tiny_target_f64)
    asked = requests(target, temperature=0.9)
    plain = decode(target, asked, settings)
    drafted = decode(target, asked, settings, drafter=drafter, policy=StaticTree(TREE))
    assert [one.tokens for one in drafted.generations] == [one.tokens for one in plain.generations]


@pytest.mark.parametrize("name", others_long(CASES))
def test_the_target_processes_each_node_once(name: str, tiny_target: Target) -> None:
    (drafter, target), request = made(name, tiny_target), requests(tiny_target)[0]
    seen: dict[int, int] = dict.fromkeys(range(target.num_layers), 0)

    def count(layer: int) -> object:
        def hook(_module: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            seen[layer] += (args[0] if args else kwargs["hidden_states"]).shape[1]
        return hook

    # A layer that a pass skips is called and does nothing: its attention is not.
    handles = [block.self_attn.register_forward_pre_hook(count(layer), with_kwargs=True)
               for layer, block in enumerate(target.decoder.layers)]
    result = decode(target, [request], DecodeSettings(ignore_eos=True), drafter=drafter, policy=StaticTree(TREE))
    for handle in handles:
        handle.remove()
    nodes = len(request.tokens) + TREE.size * result.stats.target_calls
    # Virtual nodes come after the prompt's last token and after every node of a tree.
    nodes += drafter.virtual_nodes * (1 + TREE.size * result.stats.target_calls)
    assert set(seen.values()) == {nodes}
    assert result.stats.target_calls == len(result.generations[0].emitted)


# Learning -------------------------------------------------------------------------------------------------------------


def trained(name: str, folder: Path) -> DraftModule:
    """By the labels: the cycle is not the target's own text, so its distributions do not help."""
    steps = CASES[name].steps
    module = CASES[name].module(CASES[name].teacher(), objective="hard", max_steps=steps, lr=CASES[name].lr,
                                warmup_steps=2, validate_every=steps, checkpoint_every=steps, validation_nodes=4,
                                accelerator="cpu")
    fit(module, CycleData(), folder, progress=False)
    return module


def accuracy(module: DraftModule) -> float:
    """Share of held-out tokens that are the first step's best guess, with the trained target."""
    target = module.target if module.adapter is None else module.target.adapted(module.adapter)
    module.drafter.bind(target)
    rows = [target.encode(rows, module.drafter.taps) for rows in CycleData(held_out=6).validation_features()]
    return float((ranked_text(module.drafter, rows).ranks_PK[:, 0] == 0).double().mean())


@pytest.mark.parametrize("name", others_long(LEARNING, ("medusa",)))
def test_training_learns_a_deterministic_text(name: str, tmp_path: Path) -> None:
    before = CASES[name].teacher().identity.weights_hash
    module = trained(name, tmp_path)
    target = module.target
    assert accuracy(module) > CASES[name].learned
    assert Target(target.model, target.tokenizer, name="tiny-trained").identity.weights_hash == before


@pytest.mark.parametrize("name", CASES)
def test_a_new_drafter_depends_on_the_seed_alone(name: str) -> None:
    target, weights = cycle_target(), []
    for chance in (1, 2):
        torch.manual_seed(chance)
        module = CASES[name].module(target, seed=5)
        module.configure_model()
        weights.append(module.trained())
    assert all(torch.equal(weights[1][key], tensor) for key, tensor in weights[0].items())


@pytest.mark.long
@pytest.mark.parametrize("name", ["medusa", "eagle3", "block", "draft-lm"])
def test_labels_one_position_off_do_not_train_a_useful_drafter(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = type(CASES[name].make(cycle_target()))
    right = family.forward

    def off_by_one(drafter: Drafter, features: Features) -> Drafts:
        drafts = right(drafter, features)
        return replace(drafts, offsets=tuple(offset + 1 for offset in drafts.offsets))

    with monkeypatch.context() as wrong:
        wrong.setattr(family, "forward", off_by_one)
        module = trained(name, tmp_path)
    assert accuracy(module) < 0.5


# Borrowed parts and artifacts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_borrowed_weights_are_not_parameters(name: str, tiny_target: Target) -> None:
    (drafter, target), module = made(name, tiny_target), placed(name, tiny_target)
    theirs = {parameter.data_ptr() for one in (tiny_target, target) for parameter in one.model.parameters()}
    own = [*drafter.parameters(), *drafter.state_dict().values()]
    own += [*module.parameters(), *module.state_dict().values(), *module.trained().values()]
    assert not any(tensor.data_ptr() in theirs for tensor in own)
    assert set(drafter.state_dict()) >= {parameter for parameter, _ in drafter.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_an_unbound_drafter_refuses_to_run(name: str, tiny_target: Target) -> None:
    """Bound before or after its weights are loaded it has the states of the original."""
    drafter, target = made(name, tiny_target)
    described, features = json.loads(json.dumps(drafter.describe())), alone(target, drafter, conversations(target)[0])
    for loads_first in (True, False):
        other = type(drafter).rebuild(described, target.identity)
        if loads_first:
            with pytest.raises(RuntimeError, match="not bound to a target"):
                other(features)
            with pytest.raises(RuntimeError, match="not bound to a target"):
                other.expand(other.start(1, 64), frontier([0], [-1], [[5]]))
            other.load_state_dict(drafter.state_dict())
        other.bind(target)
        if not loads_first:
            other.load_state_dict(drafter.state_dict())
        with torch.no_grad():
            found, wanted = (one.eval()(features).hidden_BLKD for one in (other, drafter))
            assert torch.equal(found, wanted)
            assert torch.equal(other.project(found[:, :, -1], 0), drafter.project(wanted[:, :, -1], 0))


@pytest.mark.parametrize("name", FIRST_CASES)
def test_what_does_not_fit_the_target_is_refused(name: str, tiny_target: Target) -> None:
    drafter, target = made(name, tiny_target)
    with pytest.raises(UserError, match="is described by"):
        type(drafter).rebuild({"unknown": 4}, target.identity)
    config = replace(drafter.config, vocabulary_size=7)
    with pytest.raises(UserError, match="vocabulary_size is 7 but 6 token ids were given"):
        type(drafter).create(config, target, torch.arange(6), drafter)
    other: Any = SimpleNamespace(hidden_size=32, vocab_size=90, identity=SimpleNamespace(name="odd"), tokenizer=None)
    with pytest.raises(UserError, match=r"32 and 100 tokens, but odd has width 32 and 90|of 100 tokens, odd one of 90"):
        drafter.bind(other)
    if drafter.family != "draft_lm":  # A draft model has a width of its own
        other.hidden_size, other.vocab_size = 16, 100
        with pytest.raises(UserError, match="but odd has width 16"):
            drafter.bind(other)


def copies(drafter: Drafter, target: Target) -> list[str]:
    """Names of own matrices that equal one of the target's, or its rows of the draft vocabulary."""
    theirs = [weight for weight in target.model.parameters() if weight.ndim == 2]
    if drafter.token_ids_Q is not None:
        theirs += [weight[drafter.token_ids_Q] for weight in theirs if len(weight) == target.vocab_size]
    return [name for name, own in drafter.state_dict().items() if any(torch.equal(own, weight) for weight in theirs)]


@pytest.mark.parametrize("name", CASES)
def test_weights_that_were_never_loaded_are_nan(name: str, tiny_target: Target) -> None:
    """A weight that starts as a copy of the target's, as an output layer of the target's width does, is NaN before."""
    # With the target's own seed a new model of its shape would equal the target.
    torch.manual_seed(1)
    target = judge(name, tiny_target)
    drafter = CASES[name].make(target)
    copied = copies(drafter, target)
    assert copied or not any(isinstance(layer, OwnOutput) and layer.in_features == target.hidden_size
                             for layer in drafter.modules())
    empty = type(drafter).rebuild(drafter.describe(), target.identity).state_dict()
    assert [weight for weight in copied if not bool(empty[weight].isnan().all())] == []


@pytest.mark.parametrize("name", others_long(CASES))
def test_a_loaded_artifact_gives_the_same_states(name: str, tiny_target: Target, tmp_path: Path) -> None:
    (drafter, target), adapter = made(name, tiny_target), CASES[name].change(tiny_target)
    save_artifact(tmp_path / "artifact", drafter, tiny_target.identity, {}, TREE, adapter)
    loaded = load_artifact(tmp_path / "artifact", tiny_target)
    row = conversations(tiny_target)[1]
    with torch.no_grad():
        theirs, ours = (one(alone(beside, drafter, row)).hidden_BLKD
                        for one, beside in ((loaded.drafter, loaded.target), (drafter, target)))
    assert torch.equal(theirs, ours)
    assert load_file(tmp_path / "artifact" / "model.safetensors").keys() == placed(name, tiny_target).trained().keys()
    again = tmp_path / "again"
    save_artifact(again, loaded.drafter, tiny_target.identity, {}, TREE, loaded.adapter)
    for file in ("config.json", "model.safetensors"):
        assert (again / file).read_bytes() == (tmp_path / "artifact" / file).read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_a_tree_deeper_than_the_reach_is_refused(name: str, tiny_target: Target) -> None:
    drafter, _ = made(name, tiny_target)
    if drafter.reach is None:
        Chain(40).check(drafter)
        return
    with pytest.raises(UserError, match=f"answers {drafter.reach}"):
        Chain(drafter.reach + 1).check(drafter)


@pytest.mark.parametrize("name", others_long(CASES))
def test_guesses_do_not_depend_on_earlier_frontiers(name: str, tiny_target: Target) -> None:
    """A node's children depend on its path alone, with siblings in one frontier or one tree after the other.

    An observation, here of no tokens, comes between two trees: the first call after it has the root as its frontier.
    """
    drafter, target = made(name, tiny_target)
    features = target.encode(Features.from_rows(conversations(target, (12,))), drafter.taps)
    answers = []
    with torch.no_grad():
        for order in ((0, 1), (1, 0)):
            state = drafter.start(1, 64)
            drafter.observe(state, torch.tensor([0]), observed(features, [0], 0, [5]))
            trees = [Chain(2), StaticTree(TREE)]
            grown = {}
            for place in order:
                drafter.observe(state, torch.tensor([0]), observed(features, [0], 5, [0]))
                grown[place] = trees[place].grow(drafter, state, features.tokens_BL[:, 5])
            answers.append(grown)
    for (_, left), (_, right) in pairwise(sorted(one.items()) for one in answers):
        assert torch.equal(left[1].tokens_BN, right[1].tokens_BN)
