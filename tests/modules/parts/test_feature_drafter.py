"""Drafters over the target's states: steps of EAGLE's training against their plain twin, trees against paths, discarded
states, learning."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from draftsmith.modules import Eagle, Eagle3, Eagle3Config, EagleConfig, Falcon, Features, Target, UserError
from draftsmith.modules.parts.decoder_block import AttentionContext
from draftsmith.modules.parts.feature_drafter import EagleDrafter
from draftsmith.modules.parts.training_time_test import step_attentions
from draftsmith.modules.target.attention.segment_attention import narrowed
from draftsmith.trainers import draft_module, train_config
from families.eagle.reference import plain_steps
from support.answers import check_tree, level, news, packed, read, text
from support.cases import cycle_rows, cycle_target
from support.families import randomised

MAKERS: dict[str, Callable[[Target], EagleDrafter]] = {
    "eagle": lambda target: Eagle.create(EagleConfig(), target),
    "eagle-fspad": lambda target: Eagle.create(
        EagleConfig(feature_sampling=True, partial_alignment=True, steps=2), target),
    "eagle3": lambda target: Eagle3.create(Eagle3Config(), target),
    "eagle3-norm": lambda target: Eagle3.create(Eagle3Config(taps=(1,), norm_output=True), target),
    "eagle3-layers": lambda target: Eagle3.create(Eagle3Config(num_layers=3), target),
    "eagle3-window": lambda target: Eagle3.create(Eagle3Config(num_layers=2, steps=6, window=6, qk_norm=True), target),
}


def made(name: str, target: Target) -> EagleDrafter:
    return randomised(MAKERS[name](target).to(target.dtype))


def masked(features: Features, window: int | None = None) -> Iterator[AttentionContext]:
    """The steps' attentions with a mask in place of segments, as on a GPU."""
    return step_attentions(AttentionContext(positions_BN=features.positions_BL, window=window,
                                            visible_BNW=narrowed(features.visible(), window)))


# The steps of training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_steps_and_gradients_equal_one_softmax_over_all_keys(name: str, tiny_target_f64: Target) -> None:
    drafter = made(name, tiny_target_f64)
    features = packed(tiny_target_f64, drafter)
    inside = features.segments_BL >= 0
    found = []
    for attentions in (lambda rows, _window: drafter.contexts(rows), masked, plain_steps):
        drafter.zero_grad()
        contexts = attentions(features, drafter.window)
        states = torch.stack(drafter.rollout(features, 5, contexts), dim=2)[inside]
        (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
        found.append((states.detach(), [p.grad.clone() for p in drafter.parameters() if p.grad is not None]))
    plain_states, plain_grads = found.pop()
    for states, grads in found:
        torch.testing.assert_close(states, plain_states, atol=1e-10, rtol=1e-10)
        assert len(grads) == len(plain_grads) > 0
        for one, other in zip(grads, plain_grads, strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("size", [1.0, 40.0])
def test_scores_of_any_size_are_combined_exactly(size: float, tiny_target: Target) -> None:
    """A diagonal with nearly all of the mass, or nearly none."""
    drafter = made("eagle", tiny_target)
    features = packed(tiny_target, drafter)
    with torch.no_grad():
        for parameter in (drafter.get_parameter("layers.0.self_attn.q_proj.weight"),
                          drafter.get_parameter("layers.0.self_attn.k_proj.weight")):
            parameter *= size
        joined, with_mask, plain = (drafter.rollout(features, 4, attentions(features))
                                    for attentions in (drafter.contexts, masked, plain_steps))
    inside = features.segments_BL >= 0
    for one, other, twin in zip(joined, with_mask, plain, strict=True):
        torch.testing.assert_close(one[inside], twin[inside], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(other[inside], twin[inside], atol=1e-4, rtol=1e-4)


def test_memory_for_backward_grows_with_the_steps_alone(tiny_target: Target) -> None:
    """No scores have the size T x T J: each further step stores as much as the one before it, on longer rows too."""
    def kept(steps: int, length: int) -> int:
        drafter = made("eagle", tiny_target)
        features, sizes = text(tiny_target, drafter, [9] * length), dict[int, int]()
        own = {parameter.data_ptr() for parameter in drafter.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (sizes.__setitem__(tensor.data_ptr(), tensor.numel() * tensor.is_floating_point()),
                            tensor)[1], lambda tensor: tensor
        ):
            states = drafter.rollout(features, steps, drafter.contexts(features))
        assert len(states) == steps
        return sum(size for place, size in sizes.items() if place not in own)

    step = kept(3, 64) - kept(2, 64)
    assert kept(8, 64) - kept(7, 64) < 1.3 * step
    assert kept(3, 256) - kept(2, 256) < 4.2 * step


@pytest.mark.parametrize("name", MAKERS)
def test_steps_that_do_not_fit_a_row_are_refused(name: str, tiny_target: Target) -> None:
    drafter = made(name, tiny_target).train()
    least = drafter.trained_steps + 2
    drafter(text(tiny_target, drafter, [9] * least))
    with pytest.raises(UserError, match=rf"{drafter.trained_steps} draft steps need rows of at least {least} tokens, "
                                        rf"got {least - 1}; lower steps or raise row_length"):
        drafter(text(tiny_target, drafter, [9] * (least - 1)))


# Decoding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_deep_drafts_equal_the_steps_of_training(name: str, tiny_target: Target) -> None:
    drafter, tokens = made(name, tiny_target), list(range(20, 34))
    features = text(tiny_target, drafter, tokens)
    with torch.no_grad():
        steps = drafter.rollout(features, 6, drafter.contexts(features))
        state = read(drafter, features, 3, 1, 3)
        torch.testing.assert_close(state.own.values[0], steps[0][0, 6], atol=1e-5, rtol=1e-5)
        drafter.expand(state, level([0], [-1], tokens[7:8]))
        for depth in range(1, 6):
            drafter.expand(state, level([depth], [depth - 1], [tokens[7 + depth]]))
            torch.testing.assert_close(state.own_RMD[0, -1], steps[depth][0, 6], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MAKERS)
def test_a_node_scores_like_its_path_alone(name: str, tiny_target: Target) -> None:
    drafter = made(name, tiny_target)
    check_tree(drafter, text(tiny_target, drafter, list(range(20, 34))),
               [([0], [-1]), ([1, 2, 3], [0, 0, 0]), ([7, 4, 6], [2, 1, 2]), ([9, 8], [7, 4])])


@pytest.mark.parametrize("name", MAKERS)
def test_drafted_states_are_discarded_and_the_targets_are_read(name: str, tiny_target: Target) -> None:
    drafter, tokens = made(name, tiny_target), list(range(20, 34))
    features = text(tiny_target, drafter, tokens)
    used, fresh = read(drafter, features, 5), read(drafter, features, 9)
    for nodes, above in (([0], [-1]), ([1, 2], [0, 0]), ([3, 4], [1, 2])):
        drafter.expand(used, level(nodes, above, [60 + node for node in nodes]))
    drafter.observe(used, torch.tensor([0]), news(features, 5, 4))
    assert used.rows.cache.host_lengths == [9]
    storages = [state.rows.cache.storage for state in (used, fresh)]
    assert storages[0] is not None
    assert storages[1] is not None
    torch.testing.assert_close(storages[0][..., :9, :], storages[1][..., :9, :], atol=1e-5, rtol=1e-5)
    for nodes, above in (([0], [-1]), ([1, 2], [0, 0])):
        asked = level(nodes, above, [40 + node for node in nodes])
        torch.testing.assert_close(drafter.expand(used, asked).log_probs_BFHQ,
                                   drafter.expand(fresh, asked).log_probs_BFHQ, atol=1e-5, rtol=1e-5)


# Learning -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [Eagle, Falcon])
def test_training_learns_the_targets_states_and_tokens(family: Any, tiny_target: Target) -> None:
    """With the default objective, the papers' own, on the target's own states and distributions."""
    module = draft_module(family)(tiny_target, train_config(family)())
    drafter = module.drafter = family.create(family.config_class(), tiny_target).train()
    features, losses = packed(tiny_target, drafter), []
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        learned = module.loss(features)
        learned.total.backward()
        optimizer.step()
        losses.append(float(learned.total.detach()))
    assert learned.offsets == tuple(range(2, 2 + drafter.trained_steps))
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(("family", "weights"), [(Eagle3, (1.0, 0.8, 0.8**2)), (Eagle, (1.0, 1.0, 1.0))])
def test_each_step_has_its_weight(family: Any, weights: tuple[float, ...]) -> None:
    target = cycle_target()
    module = draft_module(family)(target, train_config(family)(drafter=family.config_class(steps=3)))
    module.configure_model()
    module.train()
    learned = module.loss(target.encode(cycle_rows(3), module.drafter.taps))
    assert learned.weights == weights
    parts = [float(row[2]) for row in learned.sums_KC]
    expected = sum(part * weight for part, weight in zip(parts, weights, strict=True))
    assert float(learned.total.detach()) == pytest.approx(expected)
