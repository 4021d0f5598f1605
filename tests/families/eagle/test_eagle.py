"""EAGLE-1 and EAGLE-3: training steps against their plain twins, trees against paths, discarded states, learning."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.modules import (
    Eagle,
    Eagle3,
    Eagle3Config,
    EagleConfig,
    Features,
    Frontier,
    Observation,
    Target,
    UserError,
)
from draftsmith.modules.parts.decoder_block import AttentionContext
from draftsmith.modules.parts.feature_drafter import EagleDrafter, EagleState, chosen_taps
from draftsmith.modules.parts.shared_embeddings import shifted
from draftsmith.modules.parts.training_time_test import step_attentions
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.trainers import DraftModule, draft_module, train_config
from families.eagle.reference import fspad, harmonised, plain_steps
from support.cycle import cycle_rows, cycle_target
from support.families import randomised
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

FSPAD = EagleConfig(feature_sampling=True, partial_alignment=True, steps=2)
MAKERS: dict[str, Callable[[Target], EagleDrafter]] = {
    "eagle": lambda target: Eagle.create(EagleConfig(), target),
    "eagle-fspad": lambda target: Eagle.create(FSPAD, target),
    "eagle3": lambda target: Eagle3.create(Eagle3Config(), target),
    "eagle3-norm": lambda target: Eagle3.create(Eagle3Config(taps=(1,), norm_output=True), target),
    "eagle3-layers": lambda target: Eagle3.create(Eagle3Config(num_layers=3), target),
}


def made(name: str, target: Target) -> EagleDrafter:
    return randomised(MAKERS[name](target).to(target.dtype))


def packed(target: Target, drafter: EagleDrafter, length: int = 14) -> Features:
    """Rows of two segments with padding between and after them."""
    chance = random.Random(2)
    segments = [[0] * cut + [-1] + [1] * (length - cut - 3) + [-1] * 2 for cut in (3, 6, 8)]
    positions = [[row[:place].count(segment) for place, segment in enumerate(row)] for row in segments]
    tokens = torch.randint(4, target.vocab_size, (3, length), generator=torch.Generator().manual_seed(1))
    return target.encode(Features(
        tokens_BL=tokens, segments_BL=torch.tensor(segments), positions_BL=torch.tensor(positions),
        supervised_BL=torch.tensor([[chance.random() < 0.8 and segment >= 0 for segment in row] for row in segments]),
    ), drafter.taps)


def masked(features: Features) -> Iterator[AttentionContext]:
    """The steps' attentions with a mask in place of segments, as on a GPU."""
    return step_attentions(AttentionContext(positions_BN=features.positions_BL, visible_BNW=features.visible()))


def text(target: Target, drafter: EagleDrafter, tokens: list[int]) -> Features:
    return target.encode(Features.from_rows([(tokens, [True] * len(tokens))]), drafter.taps)


def news(features: Features, first: int, count: int) -> Observation:
    """The next tokens of the only row, two columns of garbage after them."""
    def cut(states: Tensor) -> Tensor:
        return torch.cat([states[:, first : first + count], torch.full_like(states[:, :2], torch.nan)], dim=1)

    tokens = torch.cat([features.tokens_BL[:, first : first + count], torch.tensor([[7, 8]])], dim=1)
    return Observation(tokens_BN=tokens, counts_B=torch.tensor([count]), final_BND=cut(features.final()),
                       taps={layer: cut(states) for layer, states in features.taps.items()},
                       roots_B=features.tokens_BL[:, first + count])


def read(drafter: EagleDrafter, features: Features, *counts: int) -> EagleState:
    state, first = drafter.start(1, 64), 0
    for count in counts:
        drafter.observe(state, torch.tensor([0]), news(features, first, count))
        first += count
    return state


def level(nodes: list[int], parents: list[int], tokens: list[int]) -> Frontier:
    return Frontier(nodes_BF=torch.tensor([nodes]), parents_BF=torch.tensor([parents]),
                    tokens_BF=torch.tensor([tokens]))


# The steps of training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_steps_and_gradients_equal_one_softmax_over_all_keys(name: str, tiny_target_f64: Target) -> None:
    drafter = made(name, tiny_target_f64)
    features = packed(tiny_target_f64, drafter)
    inside = features.segments_BL >= 0
    found = []
    for attentions in (drafter.contexts, masked, plain_steps):
        drafter.zero_grad()
        states = torch.stack(drafter.rollout(features, 5, attentions(features)), dim=2)[inside]
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
    drafter, tokens = made(name, tiny_target), list(range(20, 34))
    features = text(tiny_target, drafter, tokens)
    levels = [([0], [-1]), ([1, 2, 3], [0, 0, 0]), ([7, 4, 6], [2, 1, 2]), ([9, 8], [7, 4])]
    parents = {node: parent for nodes, above in levels for node, parent in zip(nodes, above, strict=True)}
    grown = read(drafter, features, 6)
    for nodes, above in levels:
        scores = drafter.expand(grown, level(nodes, above, [tokens[6] if node == 0 else 50 + node for node in nodes]))
        for column, node in enumerate(nodes):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            alone = read(drafter, features, 6)
            for depth, step in enumerate(path):
                told = drafter.expand(alone, level([depth], [depth - 1], [tokens[6] if step == 0 else 50 + step]))
            torch.testing.assert_close(scores.log_probs_BFHQ[0, column], told.log_probs_BFHQ[0, 0],
                                       atol=1e-5, rtol=1e-4)


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


# EAGLE-1 and HASS -----------------------------------------------------------------------------------------------------


def test_a_new_drafter_passes_the_targets_state_on(tiny_target: Target) -> None:
    drafter = Eagle.create(EagleConfig(), tiny_target)
    features = text(tiny_target, drafter, list(range(20, 30)))
    with torch.no_grad():
        drafter.fc.weight[:, :32], drafter.fc.bias[:] = 0, 0
        torch.testing.assert_close(drafter(features).hidden_BLKD[:, :, 0], features.final())


def test_each_step_is_compared_with_the_state_it_estimates(tiny_target: Target) -> None:
    config = train_config(Eagle)(drafter=EagleConfig(steps=2), feature_weight=10.0)
    module = draft_module(Eagle)(tiny_target, config)
    drafter = module.drafter = Eagle.create(config.drafter, tiny_target)
    randomised(drafter).train()
    features = packed(tiny_target, drafter)
    with torch.no_grad():
        told = module.loss(features)
        plain = draft_module(Eagle)(tiny_target, dataclasses.replace(config, feature_weight=0.0))
        plain.drafter = drafter
        expected, states = 0.0, drafter.rollout(features, 2, drafter.contexts(features))
        for step, offset in ((0, 2), (1, 3)):
            for row, place in features.labels(offset)[1].nonzero().tolist():
                expected += 10 * float(torch.nn.functional.smooth_l1_loss(
                    states[step][row, place], features.final()[row, place + 1 + step]))
        assert float(told.total - plain.loss(features).total) == pytest.approx(expected, rel=1e-4)


def test_passes_equal_those_of_hass(tiny_target_f64: Target) -> None:
    """Its streams are numbered by the state's position, here by the start of the draft, k positions before."""
    drafter = made("eagle", tiny_target_f64)
    features = text(tiny_target_f64, drafter, list(range(20, 32)))
    embedded_LD = shifted(drafter.embed(features.tokens_BL), features, 1)[0]
    with torch.no_grad():
        steps = drafter.rollout(features, 3, drafter.contexts(features))
        passes = harmonised(drafter, features.final()[0], embedded_LD, 3)
    for k in range(3):
        torch.testing.assert_close(steps[k][0, : 12 - k - 1], passes[k][k:-1], atol=1e-10, rtol=1e-10)


def test_no_gradient_of_a_pass_goes_through_the_one_before(tiny_target: Target) -> None:
    drafter = randomised(Eagle.create(EagleConfig(steps=2), tiny_target))
    features = text(tiny_target, drafter, list(range(20, 32)))
    first, second = drafter.rollout(features, 2, drafter.contexts(features))
    first.retain_grad()
    second.sum().backward()
    assert first.grad is None
    assert drafter.fc.weight.grad is not None


def test_noise_is_added_in_training_alone(tiny_target: Target) -> None:
    drafter = randomised(Eagle.create(EagleConfig(noise=0.1), tiny_target))
    final = text(tiny_target, drafter, list(range(20, 30))).final()
    assert torch.equal(drafter.fuse(final, {}), final)
    apart = drafter.train().fuse(final, {}) - final
    assert 0.05 < float(apart.abs().max()) <= 0.1 + 1e-6


def test_training_learns_the_targets_states_and_tokens(tiny_target: Target) -> None:
    """With the paper's own objective, on the target's own states and distributions."""
    module = draft_module(Eagle)(tiny_target, train_config(Eagle)())
    drafter = module.drafter = Eagle.create(EagleConfig(), tiny_target)
    features = packed(tiny_target, drafter)
    optimizer = torch.optim.AdamW(drafter.train().parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        told = module.loss(features)
        told.total.backward()
        optimizer.step()
        losses.append(float(told.total.detach()))
    assert losses[-1] < 0.6 * losses[0]


def test_the_rotary_base_is_the_targets_unless_given(tiny_target: Target) -> None:
    model = tiny_model()
    model.config.rope_parameters["rope_theta"] = 5e5
    other = Target(model, tiny_tokenizer(), name="tiny-random")
    assert Eagle.create(EagleConfig(), other).block.rope_base == 5e5
    assert Eagle.create(EagleConfig(rope_base=1e4), other).block.rope_base == 1e4
    assert Eagle.create(EagleConfig(), tiny_target).block.rope_base == 1e4


# FSPAD ----------------------------------------------------------------------------------------------------------------


def halved(target: Target) -> tuple[DraftModule, Features]:
    """A drafter with both changes in training, and a batch."""
    module = draft_module(Eagle)(target, train_config(Eagle)(drafter=FSPAD))
    drafter = module.drafter = Eagle.create(FSPAD, target)
    randomised(drafter).train()
    return module, packed(target, drafter)


def test_two_states_are_computed_and_the_second_is_fed_back(tiny_target_f64: Target) -> None:
    drafter = made("eagle-fspad", tiny_target_f64)
    features = text(tiny_target_f64, drafter, list(range(20, 30)))
    itself = AttentionContext(positions_BN=features.positions_BL, visible_BNW=torch.eye(10, dtype=torch.bool)[None])
    group = drafter.block.num_heads // drafter.block.num_kv_heads
    with torch.no_grad():
        steps = drafter.rollout(features, 3, lambda _step: itself)
        for place in range(7):
            read = features.final()[0, place]
            for step, own in enumerate(steps):
                embedded = shifted(drafter.embed(features.tokens_BL), features, 1 + step)[0, place]
                logit, read = fspad(drafter.state_dict(), embedded, read, group)
                torch.testing.assert_close(drafter.finish(own)[0, place], logit, atol=1e-10, rtol=1e-10)
                torch.testing.assert_close(drafter.feed(own)[0, place], read, atol=1e-10, rtol=1e-10)
                assert not torch.allclose(logit, read)


def test_the_output_layer_reads_the_first_state_alone_in_training_and_while_decoding(tiny_target: Target) -> None:
    drafter = made("eagle-fspad", tiny_target)
    features = text(tiny_target, drafter, list(range(20, 34)))
    with torch.no_grad():
        steps, drafts = drafter.rollout(features, 6, drafter.contexts(features)), drafter(features)
        state = read(drafter, features, 7)
        assert drafts.estimated_BLKD is not None
        for step, own in enumerate(steps):
            torch.testing.assert_close(drafts.hidden_BLKD[:, :, step], own[..., :32])
            torch.testing.assert_close(drafts.estimated_BLKD[:, :, step], own[..., 32:])
            told = drafter.expand(state, level([step], [step - 1], features.tokens_BL[0, 7 + step : 8 + step].tolist()))
            expected = tiny_target.logits(own[0, 6, :32]).log_softmax(-1)
            torch.testing.assert_close(told.log_probs_BFHQ[0, 0, 0], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("kept", "taught", "untouched"), [("feature", slice(32, 64), slice(0, 32)),
                                                         ("token", slice(0, 32), slice(32, 64))])
def test_each_loss_trains_its_own_state_only(kept: str, taught: slice, untouched: slice, tiny_target: Target) -> None:
    """The rows of `down_proj` that lead to one state get no gradient of the other's loss, at any step."""
    module, features = halved(tiny_target)
    drafts = module.drafter(features)
    assert drafts.estimated_BLKD is not None
    if kept == "feature":
        drafts = dataclasses.replace(drafts, hidden_BLKD=drafts.hidden_BLKD.detach())
    else:
        drafts = dataclasses.replace(drafts, estimated_BLKD=drafts.estimated_BLKD.detach())
    total, _ = module._vocabulary_loss(module.weights(2), None)(drafts, features)
    total.backward()
    gradient = module.drafter.get_parameter("layers.0.mlp.down_proj.weight").grad
    assert gradient is not None
    assert float(gradient[untouched].abs().max()) == 0
    assert float(gradient[taught].abs().min(dim=0).values.max()) > 0


def test_both_states_start_as_the_targets_and_all_weights_get_gradients(tiny_target: Target) -> None:
    module = draft_module(Eagle)(tiny_target, train_config(Eagle)(drafter=FSPAD))
    drafter = module.drafter = Eagle.create(FSPAD, tiny_target)
    features = text(tiny_target, drafter, list(range(20, 30)))
    plain = Eagle.create(EagleConfig(steps=2), tiny_target)
    plain.fc.load_state_dict(drafter.fc.state_dict())
    with torch.no_grad():
        drafts, expected = drafter(features), plain(features).hidden_BLKD
        assert drafts.estimated_BLKD is not None
        assert torch.equal(drafts.hidden_BLKD, expected)
        assert torch.equal(drafts.estimated_BLKD, expected)
        drafter.fc.weight[:, :32], drafter.fc.bias[:] = 0, 0
        torch.testing.assert_close(drafter(features).hidden_BLKD[:, :, 0], features.final())
    optimizer = torch.optim.SGD(drafter.train().parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        module.loss(features).total.backward()
        optimizer.step()
    unreached = [name for name, weight in drafter.named_parameters()
                 if weight.grad is None or not float(weight.grad.abs().sum()) > 0]
    assert unreached == []


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_fspad_adds_the_expected_number_of_weights(sampling: bool, partial: bool, tiny_target: Target) -> None:
    """Width 32 and a gated MLP of 64: three matrices and a norm, and half a matrix more."""
    plain = Eagle.create(EagleConfig(), tiny_target)
    drafter = Eagle.create(EagleConfig(feature_sampling=sampling, partial_alignment=partial), tiny_target)
    more = 4 * ((3 * 32 * 64 + 32) * sampling + 32 * 64 * partial)
    assert drafter.block.intermediate_size == 64
    size, least = (sum(weight.nbytes for weight in one.parameters()) for one in (drafter, plain))
    assert size == least + more
    own = set(drafter.state_dict()) - set(plain.state_dict())
    assert own == {f"sampling.{part}.weight" for part in ("norm", "gate_proj", "up_proj", "down_proj") if sampling}


def test_a_state_without_a_loss_is_refused() -> None:
    with pytest.raises(UserError, match=r"partial_alignment has a state that only feature_weight trains, got "
                                        r"feature_weight 0.0; set it above 0 .*, or partial_alignment to false"):
        train_config(Eagle)(drafter=EagleConfig(partial_alignment=True), feature_weight=0.0)
    train_config(Eagle)(drafter=EagleConfig(feature_sampling=True), feature_weight=0.0)


# EAGLE-3 --------------------------------------------------------------------------------------------------------------


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
    drafter = made("eagle3", tiny_target)
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
    drafter = randomised(Eagle3.create(Eagle3Config(fc_norm=True), tiny_target))
    features = text(tiny_target, drafter, list(range(20, 30)))
    normed = [weight * state / torch.sqrt(state.square().mean(-1, keepdim=True) + drafter.block.norm_eps)
              for weight, state in zip([drafter.get_parameter(f"fc_norm.{tap}.weight") for tap in (0, 1)],
                                       [features.taps[layer] for layer in (0, 1)], strict=True)]
    with torch.no_grad():
        torch.testing.assert_close(drafter.fuse(features.final(), features.taps),
                                   torch.cat(normed, dim=-1) @ drafter.fc.weight.mT, atol=1e-5, rtol=1e-5)


def test_norm_before_fc_normalises_all_tapped_states_together(tiny_target: Target) -> None:
    drafter = randomised(Eagle3.create(Eagle3Config(norm_before_fc=True), tiny_target))
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
    drafter = randomised(Eagle3.create(Eagle3Config(steps=2, hidden_size=24), tiny_target))
    features = text(tiny_target, drafter, [20, 21, 22, 23])
    drafter.rollout(features, 2, drafter.contexts(features))[1].sum().backward()
    table_VD = drafter.get_parameter("embed_tokens.weight")
    assert table_VD.grad is not None
    assert table_VD.grad.abs().sum(-1).nonzero()[:, 0].tolist() == [21, 22, 23]


@pytest.mark.parametrize(("config", "told"), [
    (Eagle3Config(hidden_size=24, output="shared"),
     "output is 'shared', but the output layer of tiny-random reads states 32 wide, not of hidden_size 24; set output"),
])
def test_widths_that_do_not_go_together_are_refused(config: Eagle3Config, told: str, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=told):
        Eagle3.create(config, tiny_target)
    with pytest.raises(UserError, match=told):
        draft_module(Eagle3)(tiny_target, train_config(Eagle3)(drafter=config))


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


# Settings of EAGLE-1 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "told"), [
    ({"steps": 0}, "steps must be at least 1, got 0"),
    ({"vocabulary_size": 1.5}, "vocabulary_size must be a whole number of at least 1 or null, got 1.5"),
    ({"noise": -1.0}, "noise must be at least 0, got -1.0"),
])
def test_impossible_settings_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        EagleConfig(**settings)  # type: ignore[arg-type]


def test_what_does_not_fit_the_target_is_refused(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="vocabulary_size is 101, but the target has 100 tokens; set it to at most 100"):
        Eagle.create(EagleConfig(vocabulary_size=101), tiny_target, torch.arange(101))
    with pytest.raises(UserError, match="vocabulary_size is 7 but 6 token ids were given"):
        Eagle.create(EagleConfig(vocabulary_size=7), tiny_target, torch.arange(6))
    with pytest.raises(UserError, match="a drafter of the family eagle is described by"):
        Eagle.rebuild({"heads": 4}, tiny_target.identity)
    drafter = Eagle.create(EagleConfig(), tiny_target)
    other = Eagle(EagleConfig(), SimpleNamespace(hidden_size=drafter.hidden_size, vocab_size=99), drafter.block)
    with pytest.raises(UserError, match=r"belongs to a target of width 32 and 99 tokens, but tiny-random has .* 100"):
        other.bind(tiny_target)


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
