"""Recipe files: what they extend, which keys win, and files that cannot be read. Every key is set by a shipped one or
serves a user's own target, data, engine or machine; they are few."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith.modules import UserError
from draftsmith.recipes.commands.acceptance_head import SpecdecArguments
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.recipes.reading.command_line import LINE_ONLY
from draftsmith.recipes.reading.keys import keys_of
from draftsmith.recipes.reading.recipe_files import merge, read_recipe, recipe_path
from draftsmith.recipes.recipe import Recipe
from draftsmith.trainers import TrainConfig
from draftsmith.trainers.families import family_configs, family_names


def write(folder: Path, **texts: str) -> Path:
    """Write recipe files by name; returns the first."""
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(texts))}.yaml"


def test_own_keys_win_section_by_section(tmp_path: Path) -> None:
    file = write(tmp_path, mine="extends: base\nout: a\ntrain:\n  lora:\n    rank: 2\n",
                 base="out: b\ntrain:\n  lr: 1.0\n  lora:\n    rank: 1\n    alpha: 3\ntree:\n  used_nodes: 1\n")
    assert read_recipe(str(file)) == {"out": "a", "train": {"lr": 1.0, "lora": {"rank": 2, "alpha": 3}},
                                      "tree": {"used_nodes": 1}}


def test_a_recipe_extends_by_a_path_relative_to_itself_or_a_shipped_name(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    write(tmp_path, base="extends: embedded\nout: b\n")
    file = write(tmp_path / "inner", mine="extends: ../base.yaml\nfamily: medusa\n")
    content = read_recipe(str(file))
    assert content["out"] == "b"
    assert content["target"] == read_recipe(recipe_path("embedded"))["target"]


def test_a_file_beside_the_recipe_comes_before_a_shipped_one(tmp_path: Path) -> None:
    file = write(tmp_path, mine="extends: embedded\n", embedded="out: own\n")
    assert read_recipe(str(file)) == {"out": "own"}


def test_another_family_brings_its_own_drafter(tmp_path: Path) -> None:
    base = {"family": "medusa", "drafter": {"num_heads": 3}, "train": {"lr": 1.0}}
    assert merge(base, {"family": "eagle3"}) == {"family": "eagle3", "train": {"lr": 1.0}}
    assert merge(base, {"family": "medusa"}) == base
    words = ["--config", "tiny", "--out", str(tmp_path), "--family", "eagle3"]
    given = COMMANDS["run"].parse(words).settings
    assert (given["family"], given["train"]["max_steps"], given["drafter"]["steps"]) == ("eagle3", 30, 7)


@pytest.mark.parametrize(("texts", "message"), [
    ({"a": "extends: b\n", "b": "extends: c\n", "c": "extends: b\n"},
     r"recipes extend each other in a circle: b.yaml -> c.yaml -> b.yaml; remove one `extends`"),
    ({"a": "extends: a\n"}, r"in a circle: a.yaml -> a.yaml"),
    ({"a": "extends: gone\n"}, r"a.yaml extends 'gone', but there is no recipe 'gone'; give .*quickstart"),
    ({"a": "extends: [b, c]\n"}, r"a.yaml: extends must be the name or path of one recipe, got \['b', 'c'\]"),
    ({"a": "out: a\nout: b\n"}, r"a.yaml is not a YAML file: the key 'out' is given twice \(line 1\)"),
    ({"a": "extends: b\n", "b": "tree:\n  degree: 1\n  degree: 2\n"}, r"b.yaml is not .* 'degree' is given"),
    ({"a": "- out\n"}, r"a.yaml must hold the sections of a recipe \(key: value\), got list"),
])
def test_recipes_that_cannot_be_read(texts: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_recipe(str(write(tmp_path, **texts)))


def test_an_empty_recipe_is_an_empty_one(tmp_path: Path) -> None:
    assert read_recipe(str(write(tmp_path, a="# nothing\n"))) == {}


def test_keys_of_one_family_are_read_for_it_alone(tmp_path: Path) -> None:
    """They win over the recipe in which they stand, and a recipe that extends it wins over them."""
    families = {"medusa": {"train": {"lr": 2.0}, "drafter": {"num_heads": 5}}, "eagle": {"train": {"lr": 3.0}}}
    base = {"train": {"lr": 1.0, "clip": 1.0}, "by_family": families}
    assert merge(base) == {"train": {"lr": 1.0, "clip": 1.0}}
    assert merge({"family": "medusa", "drafter": {"num_heads": 3, "num_layers": 2}}, base) == {
        "family": "medusa", "drafter": {"num_heads": 5, "num_layers": 2}, "train": {"lr": 2.0, "clip": 1.0}}
    assert merge(base, {"family": "eagle", "train": {"clip": 0.5}}) == {
        "family": "eagle", "train": {"lr": 3.0, "clip": 0.5}}
    file = write(tmp_path, mine="extends: base\ntrain: {lr: 9.0}\n",
                 base="by_family: {medusa: {train: {lr: 2.0, clip: 0.1}}}\n")
    words = ["--config", "tiny", "--config", str(file)]
    given = COMMANDS["run"].parse(words).values.train
    assert (given.lr, given.clip, given.max_steps) == (9.0, 0.1, 30)
    given = COMMANDS["run"].parse([*words, "--train.clip", "0.2"]).values.train
    assert (given.lr, given.clip) == (9.0, 0.2)


@pytest.mark.parametrize(("text", "message"), [
    ("by_family: {eagel: {}}", "by_family names an unknown family 'eagel'; choose one of medusa, "),
    ("by_family: [eagle]", r"by_family must hold the names of families with sections below each, got \['eagle'\]"),
    *((f"by_family: {{eagle: {{{key}: medusa}}}}", f"{key} stands inside by_family, where it has no effect; write it")
      for key in ("family", "extends", "by_family")),
    ("by_family: {eagle: 3}", "by_family must hold the names of families .*; write it as the recipe eight_billion do"),
    ("by_family: {medusa: {drafter: {heads: 3}}}", r"unknown key drafter.heads: did you mean drafter.num_heads\?"),
])
def test_wrong_keys_of_a_family_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        COMMANDS["run"].parse(["--config", "tiny", "--config", str(write(tmp_path, a=text))])


def test_what_recipes_share_stands_once(tmp_path: Path) -> None:
    """No recipe repeats a value that it inherits."""
    shared, folder = read_recipe(recipe_path("embedded")), Path(recipe_path("tiny")).parent
    extending = [file for file in folder.glob("*.yaml") if "\nextends: embedded" in file.read_text()]
    assert len(extending) > 5
    for file in extending:
        own = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("extends:"))
        assert not repeated(read_recipe(str(write(tmp_path, own=own))), shared), file.name


def named(content: dict[str, Any], prefix: str = "") -> set[str]:
    """The keys that a recipe sets."""
    below = [named(value, f"{prefix}{key}.") for key, value in content.items() if isinstance(value, dict)]
    return {f"{prefix}{key}" for key in content}.union(*below)


def test_a_target_replaces_all_that_the_embedded_one_sets() -> None:
    """But for what says how a target writes its own prompts, which means nothing to prompts of a dataset."""
    left = named(read_recipe(recipe_path("embedded"))) - named(read_recipe(recipe_path("eight_billion")))
    assert left == {"prompts.own_kinds", "prompts.own_openings", "prompts.own_max_tokens"}


METHODS = sorted(file.stem for file in Path(recipe_path("tiny")).parent.glob("*.yaml")
                 if "family" in read_recipe(str(file)) and file.stem not in (
                     "tiny", "mtp", "eagle3_domain", "fastdraft_text", "fastdraft_code"))
"""Recipes of methods, which a target can follow."""
TARGETS = {"eight_billion": "Llama-3.1-8B", "hybrid_9b": "Nemotron-Nano-9B", "seventy_billion": "Llama-3.3-70B"}
"""Targets, and a part of each one's name."""


@pytest.mark.parametrize("size", TARGETS)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_learns_for_a_large_target_from_many_long_conversations(method: str, size: str) -> None:
    """Steps read the answers, without prompts, two to ten times; no minutes end anything."""
    recipe = COMMANDS["run"].parse(["--config", method, "--config", size]).values
    batch, train, answers = recipe.batch, recipe.train, recipe.distill
    assert TARGETS[size] in recipe.target.name
    read = (train.max_steps or 0) * train.accumulate * train.devices * batch.rows_per_batch * batch.row_length
    assert 2 <= read / (answers.budget_tokens or 1) <= 10
    assert recipe.prompts.origin == "dataset", "the target's own prompts have one turn"
    assert {train.max_minutes, answers.budget_minutes, recipe.evaluate.budget_minutes} == {None}
    large = recipe.family not in ("prompt_tokens", "hidden_transfer")
    assert answers.budget_tokens == (200_000_000 if large else 20_000_000)
    assert answers.max_new_tokens == (2048 if large else 512)
    if recipe.family in ("medusa", "medusa2"):
        assert train.drafter.output == "one_copy", "vLLM reads one output layer, with its own tokens"
    assert train.drafter.vocabulary_size in (None, 32000)


def repeated(own: dict[str, object], shared: dict[str, object]) -> list[str]:
    """Keys of both with the same value."""
    found = []
    for key in {*own} & {*shared}:
        mine, theirs = own[key], shared[key]
        if isinstance(mine, dict) and isinstance(theirs, dict):
            found += repeated(mine, theirs)
        elif mine == theirs:
            found.append(key)
    return found


@pytest.mark.parametrize("words", [
    ["--prompts.origin", "file", "--prompts.path", "prompts.jsonl"],
    ["--prompts.origin", "dataset", "--prompts.path", "some/dataset"],
])
def test_a_recipe_whose_target_writes_its_prompts_takes_others_too(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the README: what says how the target writes prompts then means nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Tell me a fact."}\n')
    recipe = COMMANDS["run"].parse(["--config", "quickstart", *words]).values
    assert recipe.prompts.own_kinds is not None
    assert recipe.prompts.origin == words[1]


MOST_KEYS = 161
OWN = {
    "the user's target": ("target.pack", "target.chat_template", "target.revision",
                          "target.quantization", "target.adapter", "target.kept_layers", "template.system",
                          "template.tools", "template.enable_thinking", "template.date"),
    "the user's prompts": ("prompts.subset", "prompts.split", "prompts.revision", "prompts.streaming",
                           "prompts.column", "prompts.limit", "prompts.most_skipped"),
    "answers sampled, written or drafted otherwise": (
        "distill.top_k", "distill.top_p", "distill.seed", "distill.draft", "distill.engine"),
    "reference answers of other runs": ("references",),
    "a small disk": ("batch.states_format",),
    "an engine of the user's that gives states": ("distill.states_from",),
    "the sampling of the user's application": (
        "evaluate.top_k", "evaluate.top_p", "evaluate.repetition_penalty", "evaluate.answers", "evaluate.lossy"),
    "what an evaluation compares": ("evaluate.batch_sizes", "evaluate.prompts", "evaluate.prompt_limit"),
    "how sure a block is of its guesses": ("drafter.confidence",),
    "targets whose heads have norms": ("drafter.qk_norm",),
    "acceptance heads of other drafts": ("fit.lr",),
    "the user's devices": ("train.strategy", "target.offload",
                           "evaluate.graphs", "evaluate.compile", "train.activation_checkpointing",
                           "train.num_nodes"),
    "another draw": ("train.seed",),
    "the place where the user looks at trainings": ("train.logger",),
    "another version of the user's target": ("retarget",),
    "checkpoints of other projects": ("drafter.tie_blocks", "drafter.rope_base", "drafter.bias"),
    "a draft model of the user's own shape or weights": (
        "drafter.hidden_size", "drafter.folder"),
    "drafts that decode through the target's layers or several tokens a pass": (
        "drafter.copies",),
    "training on another device than the target's": ("train.accelerator",),
}
"""Keys that no shipped recipe sets, by what they are for."""


def known() -> set[str]:
    """All keys of recipes and of the command specdec; those of families once, those of the command line alone not."""
    found = {*keys_of(Recipe, skip=("train",)), *keys_of(SpecdecArguments, skip=("target",))}
    for family in family_names():
        configs = family_configs(family)
        found |= {*keys_of(configs.drafter, "drafter."), *keys_of(configs.train, "train.", skip=("drafter",))}
    return (found | set(keys_of(TrainConfig, "train.", skip=("drafter",)))) - set(LINE_ONLY)


def test_every_key_has_a_use() -> None:
    recipes = Path(__file__).resolve().parents[3] / "recipes"
    used = {re.sub(r"^by_family\.\w+\.", "", name) for file in recipes.rglob("*.yaml")
            for name in named(yaml.safe_load(file.read_text()))}
    own = {name for names in OWN.values() for name in names}
    assert known() - used == own


def test_there_are_few_keys() -> None:
    assert len(known()) <= MOST_KEYS
