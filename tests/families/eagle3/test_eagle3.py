"""EAGLE-3, EAGLE-3.1 and EAGLE-4: taps, norms, widths, what a step trains, what is refused."""

import dataclasses
from typing import Any

import pytest
import torch
from draftsmith.modules import Eagle3, Eagle3Config, Target, UserError
from draftsmith.modules.parts.feature_drafter import chosen_taps
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from draftsmith.trainers import draft_module, train_config
from draftsmith.trainers.train_config import continued_settings
from support.answers import text
from support.families import IDS, randomised
from transformers import LlamaConfig, LlamaForCausalLM


def made(target: Target, **settings: Any) -> Eagle3:
    return randomised(Eagle3.create(Eagle3Config(**settings), target))


@pytest.mark.parametrize("norms", [{}, {"fc_norm": True}, {"norm_before_fc": True, "norm_before_residual": True}])
def test_it_starts_as_the_last_layer_when_that_is_its_tap(norms: dict[str, bool], tiny_target: Target) -> None:
    """With the target's own last norm and output layer it repeats the target's guess of the token before."""
    drafter = Eagle3.create(dataclasses.replace(Eagle3Config(taps=(0, 1)), **norms), tiny_target)  # type: ignore[arg-type]
    features = text(tiny_target, drafter, list(range(20, 30)))
    with torch.no_grad():
        hidden = drafter(features).hidden_BLKD[:, :, 0]
        torch.testing.assert_close(hidden, features.final(), atol=1e-4, rtol=1e-4)
        expected = tiny_target.logits(features.final())
        torch.testing.assert_close(drafter.project(hidden, 0), expected, atol=1e-3, rtol=1e-3)


def test_taps_are_the_outputs_of_layers_low_to_high(tiny_target: Target) -> None:
    """The official code appends what enters layers 2, L/2 and L - 3; `hidden_states[k]` is what enters layer k."""
    drafter = Eagle3.create(Eagle3Config(taps=(0, 1)), tiny_target)
    features = text(tiny_target, drafter, list(range(20, 30)))
    with tiny_target.native() as model, torch.no_grad():
        entering = model.model(features.tokens_BL, output_hidden_states=True).hidden_states
    torch.testing.assert_close(features.taps[0], entering[1], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        drafter.fc.weight.copy_(torch.cat([torch.eye(32), torch.zeros(32, 32)], dim=1))
        assert torch.equal(drafter.fuse(features.final(), features.taps), features.taps[0])
    assert chosen_taps(None, _deep(32)) == (1, 15, 28)
    assert chosen_taps(None, _deep(2)) == (0, 1)


def _deep(layers: int) -> Target:
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=8, intermediate_size=8, num_hidden_layers=layers, num_attention_heads=2))
    return Target(model, tiny_tokenizer(), name="deep")


def test_every_step_trains_the_steps_before_it(tiny_target: Target) -> None:
    drafter = made(tiny_target)
    features = text(tiny_target, drafter, list(range(20, 32)))
    states = drafter.rollout(features, 4, drafter.contexts(features))
    for step in range(4):
        gradient, = torch.autograd.grad(states[step].sum(), drafter.get_parameter("fc.weight"), retain_graph=True)
        assert float(gradient.abs().sum()) > 0


def test_norm_output_feeds_the_normalised_state_back(tiny_target: Target) -> None:
    plain, normed = (randomised(Eagle3.create(Eagle3Config(taps=(1,), norm_output=norm), tiny_target))
                     for norm in (False, True))
    own = torch.randn(1, 4, 32)
    assert torch.equal(plain.feed(own), own)
    torch.testing.assert_close(normed.feed(own), torch.nn.functional.rms_norm(own, (32,), normed.norm.weight, 1e-6))


def test_fc_norm_normalises_every_tapped_state(tiny_target: Target) -> None:
    drafter = made(tiny_target, fc_norm=True)
    features = text(tiny_target, drafter, list(range(20, 30)))
    normed = [weight * state / torch.sqrt(state.square().mean(-1, keepdim=True) + drafter.block.norm_eps)
              for weight, state in zip([drafter.get_parameter(f"fc_norm.{tap}.weight") for tap in (0, 1)],
                                       [features.taps[layer] for layer in (0, 1)], strict=True)]
    with torch.no_grad():
        torch.testing.assert_close(drafter.fuse(features.final(), features.taps),
                                   torch.cat(normed, dim=-1) @ drafter.fc.weight.mT, atol=1e-5, rtol=1e-5)


def test_norm_before_fc_normalises_all_tapped_states_together(tiny_target: Target) -> None:
    drafter = made(tiny_target, norm_before_fc=True)
    features = text(tiny_target, drafter, list(range(20, 30)))
    joined = torch.cat([features.taps[layer] for layer in (0, 1)], dim=-1)
    rms = torch.sqrt(joined.square().mean(-1, keepdim=True) + drafter.block.norm_eps)
    with torch.no_grad():
        torch.testing.assert_close(drafter.fuse(features.final(), features.taps),
                                   (drafter.get_parameter("input_norm.weight") * joined / rms) @ drafter.fc.weight.mT,
                                   atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match=r"fc_norm and norm_before_fc are both true, .*; choose one"):
        Eagle3Config(fc_norm=True, norm_before_fc=True)


def test_norm_before_residual_adds_to_the_normalised_state(tiny_target: Target) -> None:
    """With zero outputs of attention and MLP the layer passes on its residual."""
    drafter = Eagle3.create(Eagle3Config(taps=(1,), norm_before_residual=True), tiny_target)
    with torch.no_grad():
        drafter.midlayer.hidden_norm.weight.normal_()
    features, read = text(tiny_target, drafter, [20, 21, 22, 23]), torch.randn(1, 4, 32)
    passed = drafter.midlayer(torch.randn(1, 4, 32), read, next(drafter.contexts(features)))
    wanted = torch.nn.functional.rms_norm(read, (32,), drafter.midlayer.hidden_norm.weight, drafter.block.norm_eps)
    torch.testing.assert_close(passed, wanted)


@pytest.mark.parametrize("normed", [False, True])
def test_wider_layers_start_as_the_last_layer_too(normed: bool, tiny_target: Target) -> None:
    """Wider layers can hold all of the target's states; only the shape differs."""
    drafter = Eagle3.create(Eagle3Config(hidden_size=48, fc_norm=normed), tiny_target)
    assert (drafter.block.num_heads, drafter.block.num_kv_heads, drafter.block.head_dim) == (6, 3, 8)
    features = text(tiny_target, drafter, list(range(20, 30)))
    with torch.no_grad():
        found = drafter.project(drafter(features).hidden_BLKD[:, :, 0], 0)
        torch.testing.assert_close(found, tiny_target.logits(features.final()), atol=2e-3, rtol=1e-3)


def test_narrower_layers_start_with_principal_components(tiny_target: Target) -> None:
    drafter = Eagle3.create(Eagle3Config(hidden_size=24), tiny_target)
    features = text(tiny_target, drafter, list(range(20, 44)))
    with torch.no_grad():
        found = drafter.project(drafter(features).hidden_BLKD[:, :, 0], 0).flatten()
        wanted = tiny_target.logits(features.final()).flatten()
    assert float(torch.corrcoef(torch.stack([found, wanted]))[0, 1]) > 0.8


def test_its_own_embedding_is_trained(tiny_target: Target) -> None:
    drafter = made(tiny_target, steps=2, hidden_size=24)
    features = text(tiny_target, drafter, [20, 21, 22, 23])
    drafter.rollout(features, 2, drafter.contexts(features))[1].sum().backward()
    table_VD = drafter.get_parameter("embed_tokens.weight")
    assert table_VD.grad is not None
    assert table_VD.grad.abs().sum(-1).nonzero()[:, 0].tolist() == [21, 22, 23]


@pytest.mark.parametrize(("config", "told"), [
    (Eagle3Config(hidden_size=24, output="shared"),
     "output is 'shared', but the output layer of tiny-random reads states 32 wide, not of hidden_size 24; set output"),
    (Eagle3Config(head_rank=33, candidates=9),
     "head_rank must be at most 32, the width of the draft's states, got 33; lower drafter.head_rank"),
    (Eagle3Config(head_rank=25, candidates=9, hidden_size=24), "head_rank must be at most 24, the width"),
    (Eagle3Config(head_rank=8), "candidates must be at most 100, the draft vocabulary, got 512; lower drafter.candid"),
])
def test_widths_that_do_not_go_together_are_refused(config: Eagle3Config, told: str, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=told):
        Eagle3.create(config, tiny_target)
    with pytest.raises(UserError, match=told):
        draft_module(Eagle3)(tiny_target, train_config(Eagle3)(drafter=config, start="a draft"))


@pytest.mark.parametrize(("config", "told"), [
    (Eagle3Config(taps=(0, 3)), "tap 3 is not a layer of tiny-random; choose from 0 to 1"),
    (Eagle3Config(taps=(-1, 0)), "tap -1 is not a layer of tiny-random; choose from 0 to 1"),
    (Eagle3Config(taps=(0, 2)), "tap 2 would be the state after the last norm of tiny-random, which is no layer's "
                                "output; its last layer is 1"),
])
def test_a_tap_must_be_a_layer(config: Eagle3Config, told: str, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=told):
        Eagle3.create(config, tiny_target)
    with pytest.raises(UserError, match=told):
        draft_module(Eagle3)(tiny_target, train_config(Eagle3)(drafter=config))


@pytest.mark.parametrize(("settings", "told"), [
    ({"taps": ()}, r"taps must be ascending numbers of layers, at least one, got \[\]"),
    ({"taps": (2, 1)}, r"taps must be ascending .* got \[2, 1\]"),
    ({"steps": 0}, "steps must be at least 1, got 0"),
    ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
    ({"head_rank": 0}, "head_rank must be at least 1, got 0"),
    ({"candidates": 0}, "candidates must be at least 1, got 0"),
    ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ({"output": "own"}, "output must be one of shared, copy, got 'own'"),
])
def test_impossible_eagle3_settings_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Eagle3Config(**settings)  # type: ignore[arg-type]


def test_states_without_taps_and_a_feature_loss_are_refused(tiny_target: Target) -> None:
    drafter = Eagle3.create(Eagle3Config(steps=2), tiny_target)
    features = text(tiny_target, drafter, list(range(20, 30)))
    with pytest.raises(ValueError, match=r"outputs of the target's layers \[0\] are missing; encode with drafter.taps"):
        drafter(dataclasses.replace(features, taps={1: features.taps[1]}))
    module = draft_module(Eagle3)(tiny_target, train_config(Eagle3)(feature_weight=1.0))
    module.drafter = drafter
    with pytest.raises(UserError, match="estimate none of the target's; set feature_weight to 0"):
        module.loss(features)


# The candidate head of EAGLE-4 ----------------------------------------------------------------------------------------


def headed(target: Target, start: Eagle3, **settings: Any) -> Eagle3:
    ids = start.token_ids
    return Eagle3.create(dataclasses.replace(start.config, **settings), target, ids, start).eval()


@pytest.mark.parametrize("settings", [{}, {"output": "shared"}, {"hidden_size": 24}, {"vocabulary_size": len(IDS)}])
def test_a_candidate_head_is_the_svd_of_the_output_layer_and_learns_alone(
    settings: dict[str, Any], tiny_target: Target
) -> None:
    """Its product is the nearest of its rank; the loss is the cross entropy with the whole layer at every depth."""
    config = Eagle3Config(steps=3, fc_norm=True, norm_output=True, **settings)
    start = randomised(Eagle3.create(config, tiny_target, IDS if config.vocabulary_size else None))
    drafter = headed(tiny_target, start, head_rank=5, candidates=20)
    whole_QD = start.output_rows().weight_QD if start.lm_head is None else start.lm_head.weight
    left, sizes, right = torch.linalg.svd(whole_QD.detach().double(), full_matrices=False)
    assert drafter.head is not None
    torch.testing.assert_close((drafter.head.up.weight @ drafter.head.down.weight).double(),
                               (left[:, :5] * sizes[:5]) @ right[:5], atol=1e-4, rtol=1e-4)
    assert [name for name, one in drafter.named_parameters() if one.requires_grad] == [
        "head.down.weight", "head.up.weight"]
    assert all(torch.equal(one, drafter.state_dict()[name]) for name, one in start.state_dict().items())
    counts = torch.zeros(100).index_fill(0, IDS, 1.0)
    module = draft_module(Eagle3)(tiny_target, train_config(Eagle3)(drafter=drafter.config, start="a draft"),
                                  token_counts=counts)
    module.drafter = drafter.train()
    features = text(tiny_target, drafter, IDS.tolist())
    module.loss(features).total.backward()
    found = {name: one.grad for name, one in drafter.named_parameters() if one.grad is not None}
    hidden, factors, expected = drafter(features).hidden_BLKD[0], drafter.head.requires_grad_(True), torch.zeros(())
    for step, weight in enumerate(module.weights(3)):
        places = features.labels(step + 2)[1][0]
        product_QD = factors.up.weight @ factors.down.weight
        logits, full = (hidden[places, step] @ rows_QD.mT for rows_QD in (product_QD, whole_QD))
        expected = expected + weight * torch.nn.functional.cross_entropy(
            logits, full.detach().softmax(-1), reduction="sum")
    wanted = torch.autograd.grad(expected, list(drafter.head.parameters()))
    assert [*found] == ["head.down.weight", "head.up.weight"]
    for grad, one in zip(found.values(), wanted, strict=True):
        torch.testing.assert_close(grad, one, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("settings", [{}, {"vocabulary_size": len(IDS)}])
def test_the_best_by_the_product_are_scored_by_the_whole_layer(settings: dict[str, Any], tiny_target: Target) -> None:
    config = Eagle3Config(steps=2, **settings)
    start = randomised(Eagle3.create(config, tiny_target, IDS if settings else None))
    states = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
    for rank, count in ((4, 6), (32, 6), (4, len(IDS))):
        drafter = headed(tiny_target, start, head_rank=rank, candidates=count)
        assert drafter.head is not None
        ids = torch.arange(100) if start.token_ids is None else start.token_ids
        with torch.no_grad():
            scores, whole = drafter.scored(states), start.project(states, 0)
            entries = (drafter.head.up(drafter.head.down(states)) if rank < 32 else whole).topk(count, -1).indices
            alone = torch.full_like(whole, -torch.inf).scatter(-1, entries, whole.gather(-1, entries))
            torch.testing.assert_close(drafter.project(states, 0), alone)
        assert scores.candidates_BFHQ is not None
        order = scores.candidates_BFHQ.argsort(-1)
        expected = ids[entries].sort(-1)
        assert torch.equal(scores.candidates_BFHQ.gather(-1, order)[:, :, 0], expected.values)
        torch.testing.assert_close(scores.log_probs_BFHQ.gather(-1, order)[:, :, 0],
                                   whole.gather(-1, entries).log_softmax(-1).gather(-1, expected.indices))


def test_a_head_is_made_carried_on_or_left_out_as_the_recipe_says(tiny_target: Target) -> None:
    start = made(tiny_target, fc_norm=True)
    first = randomised(headed(tiny_target, start, head_rank=6, candidates=30))
    settings = train_config(Eagle3)
    with pytest.raises(UserError, match=r"drafter.head_rank is 6, which trains the candidate head of a finished .*; "
                                        r"name its artifact with train.start, or leave head_rank out"):
        settings(drafter=first.config)
    for rank in (6, 4, None):
        given = settings(drafter=Eagle3Config(head_rank=rank, candidates=40), start="an artifact")
        config = continued_settings(given.drafter, first.config)
        assert (config.head_rank, config.candidates, config.fc_norm) == (rank, 40, True)  # type: ignore[attr-defined]
        again = Eagle3.create(config, tiny_target, None, first)
        mine, theirs = again.state_dict(), first.state_dict()
        equal = {name for name, one in mine.items() if name in theirs and one.equal(theirs[name])}
        assert mine.keys() - equal == ({"head.down.weight", "head.up.weight"} if rank == 4 else set())
        assert (again.head is None) == (rank is None)
        assert all(one.requires_grad for name, one in again.named_parameters() if rank is None or "head." in name[:5])
    # Over other tokens it keeps its rows, and those of further ones are the nearest to the output layer's.
    fewer = Eagle3.create(dataclasses.replace(first.config, vocabulary_size=len(IDS), candidates=9), tiny_target, IDS,
                          first)
    again = Eagle3.create(first.config, tiny_target, None, fewer)
    down, up = first.get_parameter("head.down.weight"), again.get_parameter("head.up.weight")
    assert torch.equal(fewer.get_parameter("head.down.weight"), down)
    assert torch.equal(again.get_parameter("head.down.weight"), down)
    assert torch.equal(fewer.get_parameter("head.up.weight"), first.get_parameter("head.up.weight")[IDS])
    others = ~torch.isin(torch.arange(len(up)), IDS)
    assert torch.equal(up[IDS], fewer.get_parameter("head.up.weight"))
    nearest = torch.linalg.lstsq(down.mT, again.full_rows[others].mT).solution.mT
    torch.testing.assert_close(up[others], nearest, atol=1e-4, rtol=1e-4)


def test_an_artifact_from_before_the_head_is_read(tiny_target: Target) -> None:
    described = Eagle3.create(Eagle3Config(steps=2), tiny_target).describe()
    older = {name: value for name, value in described.items() if name not in ("head_rank", "candidates")}
    assert Eagle3.rebuild(older, tiny_target.identity).describe() == described
    # Settings that artifacts always had are not filled in.
    for lost in ("block", "norm_output", "steps"):
        with pytest.raises(UserError, match="is described by"):
            Eagle3.rebuild({name: value for name, value in older.items() if name != lost}, tiny_target.identity)
