"""EAGLE-1, HASS and FSPAD: passes and halves against their plain twins, what each loss trains, what is refused."""

import dataclasses
from itertools import repeat

import pytest
import torch
from draftsmith.modules import Eagle, EagleConfig, Features, Target, UserError
from draftsmith.modules.parts.decoder_block import AttentionContext
from draftsmith.modules.parts.shared_embeddings import shifted
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.trainers import DraftModule, draft_module, train_config
from families.eagle.reference import fspad, harmonised
from support.answers import level, packed, read, text
from support.families import randomised

FSPAD = EagleConfig(feature_sampling=True, partial_alignment=True, steps=2)


def made(config: EagleConfig, target: Target) -> Eagle:
    return randomised(Eagle.create(config, target).to(target.dtype))


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
    drafter = made(EagleConfig(), tiny_target_f64)
    features = text(tiny_target_f64, drafter, list(range(20, 32)))
    embedded_LD = shifted(drafter.embed(features.tokens_BL), features, 1)[0]
    with torch.no_grad():
        steps = drafter.rollout(features, 3, drafter.contexts(features))
        passes = harmonised(drafter, features.final()[0], embedded_LD, 3)
    for k in range(3):
        torch.testing.assert_close(steps[k][0, : 12 - k - 1], passes[k][k:-1], atol=1e-10, rtol=1e-10)


def test_no_gradient_of_a_pass_goes_through_the_one_before(tiny_target: Target) -> None:
    drafter = made(EagleConfig(steps=2), tiny_target)
    features = text(tiny_target, drafter, list(range(20, 32)))
    first, second = drafter.rollout(features, 2, drafter.contexts(features))
    first.retain_grad()
    second.sum().backward()
    assert first.grad is None
    assert drafter.fc.weight.grad is not None


def test_noise_is_added_in_training_alone(tiny_target: Target) -> None:
    drafter = made(EagleConfig(noise=0.1), tiny_target)
    final = text(tiny_target, drafter, list(range(20, 30))).final()
    assert torch.equal(drafter.fuse(final, {}), final)
    apart = drafter.train().fuse(final, {}) - final
    assert 0.05 < float(apart.abs().max()) <= 0.1 + 1e-6


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
    drafter = made(FSPAD, tiny_target_f64)
    features = text(tiny_target_f64, drafter, list(range(20, 30)))
    itself = AttentionContext(positions_BN=features.positions_BL, visible_BNW=torch.eye(10, dtype=torch.bool)[None])
    group = drafter.block.num_heads // drafter.block.num_kv_heads
    with torch.no_grad():
        steps = drafter.rollout(features, 3, repeat(itself))
        for place in range(7):
            read = features.final()[0, place]
            for step, own in enumerate(steps):
                embedded = shifted(drafter.embed(features.tokens_BL), features, 1 + step)[0, place]
                logit, read = fspad(drafter.state_dict(), embedded, read, group)
                torch.testing.assert_close(drafter.finish(own)[0, place], logit, atol=1e-10, rtol=1e-10)
                torch.testing.assert_close(drafter.feed(own)[0, place], read, atol=1e-10, rtol=1e-10)
                assert not torch.allclose(logit, read)


def test_the_output_layer_reads_the_first_state_alone_in_training_and_while_decoding(tiny_target: Target) -> None:
    drafter = made(FSPAD, tiny_target)
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
    total, _ = module.vocabulary_loss(drafts, features, module.weights(2))
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


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "told"), [
    ({"steps": 0}, "steps must be at least 1, got 0"),
    ({"vocabulary_size": 1.5}, "vocabulary_size must be a whole number of at least 1 or null, got 1.5"),
    ({"noise": -1.0}, "noise must be at least 0, got -1.0"),
])
def test_impossible_settings_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        EagleConfig(**settings)  # type: ignore[arg-type]


def test_a_vocabulary_larger_than_the_targets_is_refused(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="vocabulary_size is 101, but the target has 100 tokens; set it to at most 100"):
        Eagle.create(EagleConfig(vocabulary_size=101), tiny_target, torch.arange(101))
