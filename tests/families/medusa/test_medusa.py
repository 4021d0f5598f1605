"""Medusa heads: alignment, identity at the start, train equals decode, borrowed parts, the official code's numbers."""

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from draftsmith.modules import Target, UserError
from draftsmith.modules.families.medusa.drafter import Medusa, MedusaConfig
from draftsmith.modules.target.draft_vocabulary import OutputRows
from safetensors import safe_open
from support.answers import encoded, frontier, observed

FIXTURES = Path(__file__).resolve().parents[4] / "shared" / "fixtures"
IDS = torch.tensor([2, 5, 9, 30, 31, 60])
SHAPES = [
    (MedusaConfig(num_heads=3), None),
    (MedusaConfig(num_heads=3, num_layers=2, output="copy"), None),
    (MedusaConfig(num_heads=2, num_layers=3, tie_blocks=True), None),
    (MedusaConfig(num_heads=3, vocabulary_size=6), IDS),
    (MedusaConfig(num_heads=2, output="copy", vocabulary_size=6), IDS),
    (MedusaConfig(num_heads=3, output="one_copy"), None),
    (MedusaConfig(num_heads=3, output="one_copy", vocabulary_size=6), IDS),
]


def randomised(config: MedusaConfig, target: Target, ids: torch.Tensor | None) -> Medusa:
    """Heads with noise on their weights."""
    drafter = Medusa.create(config, target, ids)
    for parameter in drafter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return drafter


ROOT = frontier([0], [-1], [[0]] * 3)


@pytest.mark.parametrize(("config", "ids"), SHAPES)
def test_train_equals_decode(config: MedusaConfig, ids: torch.Tensor | None, tiny_target: Target) -> None:
    drafter, features = randomised(config, tiny_target, ids), encoded(tiny_target)
    drafts = drafter(features)
    steps = [drafter.project(drafts.hidden_BLKD[:, :, step], step) for step in range(config.num_heads)]
    trained = torch.stack(steps, dim=2).log_softmax(-1)
    state = drafter.start(3, 64)
    drafter.observe(state, torch.arange(3), observed(features, [0, 1, 2], 0, [2, 2, 2]))
    drafter.observe(state, torch.tensor([2, 0]), observed(features, [2, 0], 2, [3, 1]))
    scores = drafter.expand(state, ROOT)
    last = [2, 1, 4]
    expected = torch.stack([trained[row, index] for row, index in enumerate(last)])
    torch.testing.assert_close(scores.log_probs_BFHQ[:, 0], expected, atol=1e-5, rtol=1e-5)
    assert scores.token_ids_Q is None if ids is None else torch.equal(scores.token_ids_Q, ids)


@pytest.mark.parametrize(("config", "ids"), SHAPES)
def test_heads_start_as_the_targets_output_layer(
    config: MedusaConfig, ids: torch.Tensor | None, tiny_target: Target
) -> None:
    drafter, features = Medusa.create(config, tiny_target, ids), encoded(tiny_target)
    drafts = drafter(features)
    assert torch.equal(drafts.hidden_BLKD, features.final()[:, :, None].expand_as(drafts.hidden_BLKD))
    expected = tiny_target.logits(features.final())
    expected = expected if ids is None else expected[..., ids]
    for step in range(config.num_heads):
        found = drafter.project(drafts.hidden_BLKD[:, :, step], step)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_one_copy_is_read_by_all_heads(tiny_target: Target) -> None:
    drafter = randomised(MedusaConfig(num_heads=3, output="one_copy", vocabulary_size=6), tiny_target, IDS)
    states, weight_QD = torch.randn(4, 32), drafter.output_parameters(0)[0]
    for step in range(3):
        assert drafter.output_parameters(step)[0] is weight_QD
        torch.testing.assert_close(drafter.project(states, step), states @ weight_QD.T)
    assert not torch.equal(weight_QD, tiny_target.output_weight()[IDS])


def test_tied_blocks_equal_separate_equal_blocks(tiny_target: Target) -> None:
    tied = randomised(MedusaConfig(num_heads=1, num_layers=3, tie_blocks=True), tiny_target, None)
    free = Medusa.create(MedusaConfig(num_heads=1, num_layers=3), tiny_target)
    weights = tied.state_dict()
    free.load_state_dict({f"heads.0.{layer}.linear.{part}": weights[f"heads.0.0.linear.{part}"]
                          for layer in range(3) for part in ("weight", "bias")})
    final = torch.randn(2, 5, tiny_target.hidden_size)
    torch.testing.assert_close(tied._states(final), free._states(final))
    for drafter in (tied, free):
        drafter._states(final).square().sum().backward()
    parts = torch.stack([block.linear.weight.grad for block in free.heads[0]])
    torch.testing.assert_close(tied.heads[0][0].linear.weight.grad, parts.sum(0))


def test_only_the_root_may_be_expanded(tiny_target: Target) -> None:
    drafter = Medusa.create(MedusaConfig(num_heads=2), tiny_target)
    wide = dataclasses.replace(ROOT, nodes_BF=torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="pass 1 node, got 2"):
        drafter.expand(drafter.start(3, 64), wide)


@pytest.mark.parametrize(("config", "ids"), SHAPES)
def test_borrowed_weights_are_neither_saved_nor_trained_nor_copied(
    config: MedusaConfig, ids: torch.Tensor | None, tiny_target: Target
) -> None:
    drafter = Medusa.create(config, tiny_target, ids)
    heads = [f"heads.{head}.{layer}.linear.{name}" for head in range(config.num_heads)
             for layer in range(1 if config.tie_blocks else config.num_layers) for name in ("weight", "bias")]
    outputs = {"shared": 0, "copy": config.num_heads, "one_copy": 1}[config.output]
    own = [f"outputs.{head}.weight" for head in range(outputs)]
    assert set(drafter.state_dict()) == {*heads, *own, *(["token_ids"] if ids is not None else [])}
    shared = tiny_target.output_weight().data_ptr()
    assert all(parameter.data_ptr() != shared for parameter in drafter.parameters())
    clone = copy.deepcopy(drafter)
    assert clone._borrowed is drafter._borrowed
    assert clone.heads[0][0].linear.weight.data_ptr() != drafter.heads[0][0].linear.weight.data_ptr()


@pytest.mark.parametrize(("settings", "told"), [
    ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
    ({"num_layers": 0}, "num_layers"), ({"vocabulary_size": 0}, "vocabulary_size"), ({"num_heads": 1.5}, "got 1.5"),
    ({"output": "own"}, "output must be one of shared, copy, one_copy, got 'own'"),
])
def test_impossible_shapes_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        MedusaConfig(**settings)  # type: ignore[arg-type]


def test_ids_need_a_reduced_vocabulary(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="vocabulary_size is None but 6"):
        Medusa.create(MedusaConfig(), tiny_target, IDS)


def test_the_output_layers_bias_and_soft_capping_are_kept(tiny_target: Target) -> None:
    class Capped:
        """A target whose head has a bias and a soft cap."""

        def __init__(self) -> None:
            self.head = torch.nn.Linear(8, 12)

        def output_weight(self) -> torch.Tensor:
            return self.head.weight.detach()

        def post_process(self, logits: torch.Tensor) -> torch.Tensor:
            return 2 * torch.tanh(logits / 2)

        def logits(self, final: torch.Tensor) -> torch.Tensor:
            return self.post_process(self.head(final))

    target, ids, final = Capped(), torch.tensor([1, 4, 7]), torch.randn(5, 8)
    expected = target.logits(final)
    torch.testing.assert_close(OutputRows(target)(final), expected)  # type: ignore[arg-type]
    torch.testing.assert_close(OutputRows(target, ids)(final), expected[:, ids])  # type: ignore[arg-type]


def test_it_compiles_in_one_graph(tiny_target: Target) -> None:
    drafter, features = randomised(MedusaConfig(num_heads=2), tiny_target, None), encoded(tiny_target)
    explained = torch._dynamo.explain(drafter._states)(features.final())
    assert explained.graph_break_count == 0


@pytest.mark.parametrize("name", ["medusa_1layer", "medusa_2layers_tied"])
def test_the_official_codes_logits(name: str, tiny_target: Target) -> None:
    path = FIXTURES / f"{name}.safetensors"
    if not path.exists():
        pytest.skip(f"recorded outputs of the official code are not next to this checkout ({path})")
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        official = json.loads(file.metadata()["config"])
    heads, layers = official["medusa_num_heads"], official["medusa_num_layers"]
    width, vocab = tensors["weight/0.0.linear.weight"].shape[0], tensors["input/target_lm_head"].shape[0]
    config = MedusaConfig(num_heads=heads, num_layers=layers, output="copy")
    drafter = Medusa(config, SimpleNamespace(hidden_size=width, vocab_size=vocab))
    weights = {f"outputs.{head}.weight": tensors[f"weight/{head}.{layers}.weight"] for head in range(heads)}
    weights |= {f"heads.{head}.{layer}.linear.{part}": tensors[f"weight/{head}.{layer}.linear.{part}"]
                for head in range(heads) for layer in range(layers) for part in ("weight", "bias")}
    drafter.load_state_dict(weights)
    # The fixture's target is a matrix alone: an output layer without bias, scale or cap, like the tiny target's.
    drafter._borrowed = OutputRows(tiny_target)
    states = drafter._states(tensors["input/hidden_states"])
    found = torch.stack([drafter.project(states[:, :, head], head) for head in range(heads)])
    torch.testing.assert_close(found, tensors["output/medusa_logits"], atol=1e-4, rtol=1e-5)
