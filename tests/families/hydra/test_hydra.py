"""Hydra and Hydra++: heads against their plain twin, the start, train equals decode on trees and ragged rows, what is
borrowed and what is refused."""

import copy
import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.modules import Features, StaticTree, Target, Topology, UserError
from draftsmith.modules.families.hydra.drafter import Hydra, HydraConfig, HydraState, PrefixLayer
from families.hydra.reference import hydra_state
from support.answers import encoded, frontier, observed
from torch import Tensor

IDS = torch.tensor([2, 5, 9, 30, 31, 60])
PLUS = {"prefix": True, "num_layers": 4}
SHAPES = [
    (HydraConfig(num_heads=3), None),
    (HydraConfig(num_heads=3, num_layers=3, output="copy"), None),
    (HydraConfig(num_heads=3, num_layers=3, tie_blocks=False, vocabulary_size=6), IDS),
    (HydraConfig(num_heads=3, **PLUS), None),
    (HydraConfig(num_heads=4, **PLUS, output="copy", vocabulary_size=6), IDS),
    (HydraConfig(num_heads=3, output="one_copy", vocabulary_size=6), IDS),
]


def randomised(config: HydraConfig, target: Target, ids: Tensor | None = None) -> Hydra:
    """Heads with noise on their weights."""
    drafter = Hydra.create(config, target, ids)
    for parameter in drafter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return drafter.eval()


def packed(target: Target, seed: int = 0, length: int = 12) -> Features:
    """Rows of one to three segments, with padding on either side, random supervision and the target's states."""
    chance, rows = random.Random(seed), 3
    segments, positions, supervised = [], [], []
    for row in range(rows):
        cuts = sorted(chance.sample(range(1, length), row + 1))
        ends = [number for number, (low, high) in enumerate(zip([0, *cuts], [*cuts, length], strict=True))
                for _ in range(low, high)]
        hollow = chance.choice([0, row + 1])
        segments.append([-1 if segment == hollow else segment for segment in ends])
        positions.append([ends[: place + 1].count(segment) - 1 for place, segment in enumerate(ends)])
        supervised.append([chance.random() < 0.7 for _ in ends])
    tokens = torch.randint(4, target.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
    return target.encode(Features(tokens_BL=tokens, supervised_BL=torch.tensor(supervised),
                                  segments_BL=torch.tensor(segments), positions_BL=torch.tensor(positions)))


def after_chunks(drafter: Hydra, features: Features) -> tuple[HydraState, list[int]]:
    """Three rows read in ragged chunks; (state, index of each row's last read position)."""
    state = drafter.start(3, 16)
    drafter.observe(state, torch.arange(3), observed(features, [0, 1, 2], [0, 0, 0], [3, 1, 2]))
    drafter.observe(state, torch.tensor([2, 0]), observed(features, [2, 0], [2, 3], [4, 1]))
    drafter.observe(state, torch.arange(3), observed(features, [0, 1, 2], [4, 1, 6], [1, 2, 0]))
    return state, [4, 2, 5]


def log_probs(drafter: Hydra, features: Features) -> Tensor:
    """Predictions of the training forward, [B, L, K, Q]."""
    hidden = drafter(features).hidden_BLKD
    return torch.stack([drafter.project(hidden[:, :, step], step).log_softmax(-1)
                        for step in range(drafter.config.num_heads)], dim=2)


# Training ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("config", "ids"), SHAPES)
def test_every_head_equals_the_plain_twin(
    config: HydraConfig, ids: Tensor | None, seed: int, tiny_target: Target
) -> None:
    drafter, features = randomised(config, tiny_target, ids), packed(tiny_target, seed)
    found, context = drafter(features).hidden_BLKD, drafter.context(features)
    for row in range(3):
        for place in range(12):
            for step in range(config.num_heads):
                expected = hydra_state(drafter, features, context, row, place, step)
                torch.testing.assert_close(found[row, place, step], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, PLUS])
def test_a_guess_depends_neither_on_later_tokens_nor_on_other_segments(
    settings: dict[str, Any], tiny_target: Target
) -> None:
    """Head k at p guesses p + 2 + k: its guess does not depend on tokens and states from there on."""
    drafter, features = randomised(HydraConfig(num_heads=3, **settings), tiny_target), packed(tiny_target, 1)
    before = drafter(features).hidden_BLKD
    for row, changed in ((0, 7), (1, 4), (2, 10)):
        tokens, final = features.tokens_BL.clone(), features.final().clone()
        tokens[row, changed:] = (tokens[row, changed:] + 1) % tiny_target.vocab_size
        final[row, changed:] += 1
        after = drafter(dataclasses.replace(features, tokens_BL=tokens, final_BLD=final)).hidden_BLKD
        for step in range(3):
            same = max(0, changed - 1 - step)
            assert torch.equal(after[row, :same, step], before[row, :same, step])
            label = changed - 2 - step
            if features.labels(2 + step)[1][row, max(0, label)] and label >= 0:
                assert torch.equal(after[row, label, step], before[row, label, step])
        elsewhere = features.segments_BL[row] != features.segments_BL[row, changed:].unique()[:, None]
        apart = elsewhere.all(0)
        torch.testing.assert_close(after[row, apart], before[row, apart])


@pytest.mark.parametrize("settings", [{}, {"num_layers": 3, "output": "copy"}, {"output": "one_copy"}])
def test_heads_start_as_the_targets_output_layer(settings: dict[str, Any], tiny_target: Target) -> None:
    drafter, features = Hydra.create(HydraConfig(num_heads=3, **settings), tiny_target), encoded(tiny_target)
    hidden = drafter(features).hidden_BLKD
    torch.testing.assert_close(hidden, features.final()[:, :, None].expand_as(hidden), atol=1e-6, rtol=1e-5)
    expected = tiny_target.logits(features.final())
    torch.testing.assert_close(drafter.project(hidden[:, :, 1], 1), expected, atol=1e-4, rtol=1e-4)


def test_a_new_prefix_layer_barely_changes_the_states(tiny_target: Target) -> None:
    drafter, features = Hydra.create(HydraConfig(num_heads=2, **PLUS), tiny_target), encoded(tiny_target)
    context, final = drafter.context(features), features.final()
    assert torch.cosine_similarity(context, final, dim=-1).min() > 0.9999
    torch.testing.assert_close(context, final, atol=0.2, rtol=0.2)
    found, expected = (tiny_target.logits(states).argmax(-1) for states in (context, final))
    assert torch.equal(found, expected)


def test_all_trained_parts_get_gradients_and_the_target_none(tiny_target: Target) -> None:
    drafter = randomised(HydraConfig(num_heads=3, **PLUS, output="copy"), tiny_target)
    hidden = drafter(encoded(tiny_target)).hidden_BLKD
    torch.stack([drafter.project(hidden[:, :, step], step).logsumexp(-1).sum() for step in range(3)]).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in drafter.parameters())
    assert all(parameter.grad is None for parameter in tiny_target.model.parameters())


def test_backward_stores_the_embeddings_once_for_all_heads(tiny_target: Target) -> None:
    """Tensors stored for backward grow with K, not with K times K: none has the size [B, L, K, (K + 1) D]."""

    def kept(heads: int) -> int:
        drafter, features = Hydra.create(HydraConfig(num_heads=heads), tiny_target), encoded(tiny_target, 2, 12)
        own, sizes = {parameter.data_ptr() for parameter in drafter.parameters()}, {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.setdefault(tensor.data_ptr(), tensor.numel()) and tensor, lambda tensor: tensor):
            drafter(features)
        return sum(size for place, size in sizes.items() if place not in own) // (2 * 12 * 32)

    assert kept(8) - kept(4) <= 2 * (kept(4) - kept(2)) + 1


def test_dropout_and_noise_act_in_training_only(tiny_target: Target) -> None:
    for settings in ({"dropout": 0.5}, {"noise": 5.0}):
        drafter = randomised(HydraConfig(num_heads=2, num_layers=2, **settings), tiny_target)
        features = encoded(tiny_target)
        assert torch.equal(drafter(features).hidden_BLKD, drafter(features).hidden_BLKD)
        drafter.train()
        assert not torch.equal(drafter(features).hidden_BLKD, drafter(features).hidden_BLKD)


# Decoding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "ids"), SHAPES)
def test_train_equals_decode_along_the_true_tokens(
    config: HydraConfig, ids: Tensor | None, tiny_target: Target
) -> None:
    drafter, features = randomised(config, tiny_target, ids), encoded(tiny_target)
    trained = log_probs(drafter, features)
    state, last = after_chunks(drafter, features)
    for step in range(config.num_heads):
        tokens = torch.stack([features.tokens_BL[row, last[row] + 1 + step] for row in range(3)])[:, None]
        scores = drafter.expand(state, frontier([step], [step - 1], tokens))
        expected = torch.stack([trained[row, last[row], step] for row in range(3)])
        # Decoding packs its linear layers, which rounds differently.
        torch.testing.assert_close(scores.log_probs_BFHQ[:, 0, 0], expected, atol=1e-5, rtol=3e-5)
        assert scores.token_ids_Q is None if ids is None else torch.equal(scores.token_ids_Q, ids)


@pytest.mark.parametrize("settings", [{}, PLUS])
def test_every_node_of_a_tree_scores_like_its_path_alone(settings: dict[str, Any], tiny_target: Target) -> None:
    drafter, features = randomised(HydraConfig(num_heads=3, **settings), tiny_target), encoded(tiny_target)
    state, last = after_chunks(drafter, features)
    tokens = torch.randint(4, 90, (3, 9))
    levels = [([0], [-1]), ([3, 1, 2], [0, 0, 0]), ([8, 4, 6, 5], [1, 3, 1, 2])]
    paths: dict[int, list[int]] = {-1: []}
    for nodes, parents in levels:
        found = drafter.expand(state, frontier(nodes, parents, tokens[:, nodes])).log_probs_BFHQ[:, :, 0]
        for column, (node, parent) in enumerate(zip(nodes, parents, strict=True)):
            paths[node] = [*paths[parent], node]
            changed = features.tokens_BL.clone()
            for row in range(3):
                end = last[row] + 1
                changed[row, end : end + len(paths[node])] = tokens[row, paths[node]]
            expected = log_probs(drafter, dataclasses.replace(features, tokens_BL=changed))
            for row in range(3):
                step = len(paths[node]) - 1
                # Decoding packs its linear layers, which rounds differently.
                torch.testing.assert_close(found[row, column], expected[row, last[row], step], atol=1e-5, rtol=3e-5)


def test_a_failed_row_leaves_no_nan(tiny_target: Target) -> None:
    drafter, features = randomised(HydraConfig(num_heads=2, **PLUS), tiny_target), encoded(tiny_target)
    final = features.final().clone()
    final[0, 4] = float("nan")
    state = drafter.start(3, 16)
    broken = dataclasses.replace(features, final_BLD=final)
    drafter.observe(state, torch.arange(3), observed(broken, [0, 1, 2], [0, 0, 0], [6, 2, 3]))
    state.keep(torch.tensor([2, 1]))
    drafter.observe(state, torch.arange(2), observed(features, [2, 1], [3, 2], [1, 1]))
    found = drafter.expand(state, frontier([0], [-1], features.tokens_BL[[2, 1], [4, 3]][:, None]))
    trained = log_probs(drafter, features)
    wanted = torch.stack([trained[2, 3, 0], trained[1, 2, 0]])
    torch.testing.assert_close(found.log_probs_BFHQ[:, 0, 0], wanted, atol=1e-5, rtol=1e-5)


def test_the_state_grows_with_the_rows_and_stays_in_place(tiny_target: Target) -> None:
    drafter = randomised(HydraConfig(num_heads=3, **PLUS), tiny_target)
    state, _ = after_chunks(drafter, encoded(tiny_target))
    assert state.rows is not None
    storage = state.rows.cache.storage
    assert storage is not None
    assert storage.shape == (2, 3, 2, 16, 8), "keys and values of one layer"
    place = storage.data_ptr()
    features = encoded(tiny_target)
    drafter.observe(state, torch.arange(3), observed(features, [0, 1, 2], [5, 3, 6], [2, 3, 1]))
    assert state.rows.cache.storage is storage
    assert storage.data_ptr() == place
    plain = Hydra.create(HydraConfig(), tiny_target).start(3, 1 << 30)
    assert plain.rows is None
    assert plain.context.values.shape == (3, 32)


def test_a_level_without_a_head_is_refused(tiny_target: Target) -> None:
    drafter = Hydra.create(HydraConfig(num_heads=1), tiny_target)
    state, root = drafter.start(1, 8), frontier([0], [-1], torch.tensor([[3]]))
    drafter.expand(state, root)
    with pytest.raises(ValueError, match="level 1 of the tree needs a head, but there are 1 heads"):
        drafter.expand(state, frontier([1], [0], torch.tensor([[3]])))
    with pytest.raises(UserError, match="2 tokens deep, but this hydra drafter answers 1"):
        StaticTree(Topology.chain(2)).check(drafter)


# Borrowed parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "ids"), SHAPES)
def test_borrowed_weights_are_neither_saved_nor_trained_nor_copied(
    config: HydraConfig, ids: Tensor | None, tiny_target: Target
) -> None:
    drafter = Hydra.create(config, tiny_target, ids)
    blocks = 0 if config.num_layers == 1 else 1 if config.tie_blocks else config.num_layers - 1
    own = {f"heads.{head}.{place}.{part}" for head in range(config.num_heads) for part in ("weight", "bias")
           for place in ("first.linear", "first.res_connection", *(f"blocks.{n}.linear" for n in range(blocks)))}
    outputs = {"shared": 0, "copy": config.num_heads, "one_copy": 1}[config.output]
    own |= {f"outputs.{head}.{part}" for head in range(outputs) for part in ("weight", "bias")}
    layer = PrefixLayer(drafter.block).state_dict() if drafter.block is not None else {}
    own |= {f"prefix.{name}" for name in layer} | ({"token_ids"} if ids is not None else set())
    assert set(drafter.state_dict()) == own
    borrowed = {tiny_target.output_weight().data_ptr(), tiny_target.model.get_input_embeddings().weight.data_ptr()}
    assert not borrowed & {parameter.data_ptr() for parameter in drafter.parameters()}
    clone = copy.deepcopy(drafter)
    assert clone._borrowed is drafter._borrowed
    assert clone.heads[0].first.linear.weight.data_ptr() != drafter.heads[0].first.linear.weight.data_ptr()


def test_a_prefix_needs_the_shape_of_its_layer() -> None:
    with pytest.raises(UserError, match="prefix is True, so the shape of its layer must be given"):
        Hydra(HydraConfig(prefix=True), SimpleNamespace(hidden_size=32, vocab_size=9))


@pytest.mark.parametrize(("settings", "told"), [
    ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
    ({"num_layers": 0}, "num_layers"), ({"vocabulary_size": 0}, "vocabulary_size"), ({"num_heads": 1.5}, "got 1.5"),
    ({"output": "own"}, "output must be one of shared, copy, one_copy, got 'own'"),
    ({"dropout": 1.0}, "dropout must be below 1, got 1.0"),
    ({"dropout": -0.1}, "dropout must be at least 0, got -0.1"),
    ({"noise": -1.0}, "noise must be at least 0, got -1.0"),
])
def test_impossible_shapes_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        HydraConfig(**settings)  # type: ignore[arg-type]


def test_it_compiles_in_one_graph(tiny_target: Target) -> None:
    drafter, features = randomised(HydraConfig(num_heads=2), tiny_target), encoded(tiny_target)
    context = drafter.context(features)
    explained = torch._dynamo.explain(drafter._states)(context, [context] * 2)
    assert explained.graph_break_count == 0
