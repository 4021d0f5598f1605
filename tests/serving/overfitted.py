"""Drafters that know a few greedy answers of a tiny target by heart: whoever loads one as it was trained accepts every
draft, and any wrong name, shape, norm, offset or layer shows as a draft that is rejected.

Shapes: B rows, L positions, K draft steps, Q entries of the draft vocabulary.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from draftsmith.export import Artifact, ExportSettings, export_artifact
from draftsmith.export.layouts.parts.gguf_file import FLOAT32
from draftsmith.modules import (
    BlockDraft,
    BlockDraftConfig,
    Drafter,
    DraftLM,
    DraftLMConfig,
    Eagle,
    Eagle3,
    Eagle3Config,
    EagleConfig,
    Features,
    PEagle,
    PEagleConfig,
    Target,
    Topology,
)
from draftsmith.modules.families.medusa.drafter import Medusa, MedusaConfig
from draftsmith.modules.files.atomic_files import write_atomically
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from filelock import FileLock
from safetensors.torch import load_file, save_file
from support.target_folders import write_vocabulary
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen3Config

STEPS = 3  # Tokens of a draft
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 12, 28
"""The first token of an answer comes of the prompt's pass, six drafts of three with the target's token after each make
25, and a seventh draft 28: no draft goes beyond the answer."""
MASK = 3  # Id of the mask token, which no text contains
BLOCK_MASK = 999  # That of drafters of blocks: a row of the target's embedding after the tokenizer's last token
HEAD_DIM, ROPE_BASE = 32, 20000.0  # Width of a head, and rotary base
VOCABULARY = "vocabulary.gguf"  # The target's tokens in GGUF
ENTRIES = 300  # Tokens of a reduced vocabulary
Maker = Callable[[Target, Tensor], Drafter]  # Of a drafter, given the ids of a reduced vocabulary
_MOST, _ENOUGH = 1500, 0.05  # Most optimizer steps; loss of a token at which a drafter knows it for certain


def tiny_llama() -> Any:
    """A random Llama of six layers and 1,000 tokens with a rotary base of its own, whose greedy answers vary."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=HEAD_DIM, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Prompts and the target's greedy answers."""

    rows: list[list[int]]  # Prompt and answer
    features: Features  # The same with the target's states after all its layers; the answers are supervised

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts alone."""
        return [row[:PROMPT_TOKENS] for row in self.rows]

    @property
    def answers(self) -> list[list[int]]:
        """The answers alone."""
        return [row[PROMPT_TOKENS:] for row in self.rows]

    def token_ids(self) -> Tensor:
        """A reduced vocabulary with every token of the answers, in an order of its own, [Q]."""
        used = {token for answer in self.answers for token in answer}
        order = (torch.randperm(996, generator=torch.Generator().manual_seed(1)) + 4).tolist()
        rest = [token for token in order if token not in used]
        return torch.tensor(sorted([*used, *rest[: ENTRIES - len(used)]]))


@torch.no_grad()
def texts_of(target: Target) -> Texts:
    """Random prompts and their greedy answers, encoded with the outputs of all layers."""
    prompts_BL = torch.randint(MASK + 1, 1000, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    with target.native() as model:
        rows = model.generate(prompts_BL, attention_mask=torch.ones_like(prompts_BL), max_new_tokens=ANSWER_TOKENS,
                              min_new_tokens=ANSWER_TOKENS, do_sample=False, eos_token_id=None).tolist()
    if any(MASK in row for row in rows):
        raise RuntimeError("an answer contains the mask token; choose another seed")
    supervised = [False] * PROMPT_TOKENS + [True] * ANSWER_TOKENS
    features = target.encode(Features.from_rows([(row, supervised) for row in rows]), tuple(range(target.num_layers)))
    return Texts(rows=rows, features=features)


def overfit(drafter: Drafter, texts: Texts, frozen: dict[str, float] | None = None) -> int:
    """Train until every draft step is right at every token of the answers; returns the optimizer steps."""
    parameters = dict(drafter.named_parameters())
    with torch.no_grad():
        for name, value in (frozen or {}).items():
            parameters.pop(name).fill_(value).requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in parameters.values() if one.requires_grad], lr=2e-3, weight_decay=0.0)
    drafter.train()
    for step in range(_MOST):
        loss, right = _loss(drafter, texts.features)
        if right and loss.item() < _ENOUGH:
            drafter.eval()
            return step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise RuntimeError(f"the {drafter.family} drafter does not know its texts after {_MOST} steps")


def _loss(drafter: Drafter, features: Features) -> tuple[Tensor, bool]:
    """(mean loss over the draft steps, whether every guess is right)."""
    drafts = drafter(features)
    ids_Q = drafter.token_ids_Q
    index_V = torch.arange(1000)
    if ids_Q is not None:
        index_V = torch.full((1000,), -1)
        index_V[ids_Q] = torch.arange(len(ids_Q))
    losses, right = [], True
    # A choice among candidates is learned with the slots alone, whose steps come after its own.
    for step, offset in enumerate(drafts.offsets[: STEPS + drafts.choices]):
        labels_BL, valid_BL = features.labels(offset)
        if drafts.valid_BLK is not None:
            valid_BL = valid_BL & drafts.valid_BLK[..., step]
        logits = drafter.project(drafts.hidden_BLKD[:, :, step][valid_BL], step)
        wanted = index_V[labels_BL[valid_BL]]
        offered = logits.gather(1, wanted[:, None])[:, 0] > -torch.inf
        losses.append(functional.cross_entropy(logits[offered], wanted[offered]))
        right = right and bool((logits.argmax(-1) == wanted).all())
    return torch.stack(losses).mean(), right


HELD = {"midlayer.input_layernorm.weight": 0.02, "fc.bias": 1.0}
"""Parameters that keep one value: EAGLE-3's norm of the token, so small that it must listen to the tapped states, and
EAGLE-1's bias, so large that who drops it guesses otherwise; a trained one may do without."""


def maker(kind: Any, config: Any) -> Maker:
    """Maker of a drafter with these settings."""
    return lambda target, ids_Q: kind.create(config, target, None if config.vocabulary_size is None else ids_Q)


def third(**settings: Any) -> Maker:
    """Maker of an EAGLE-3 drafter over three layers and a reduced vocabulary."""
    return maker(Eagle3, Eagle3Config(taps=(1, 2, 4), steps=STEPS, **{"vocabulary_size": ENTRIES, **settings}))


def blocks(**settings: Any) -> Maker:
    """Maker of a drafter of blocks that drafts as many tokens as are asked for."""
    size = STEPS + (settings.get("aligned") == "same")
    return maker(BlockDraft, BlockDraftConfig(taps=(1, 2, 4), block_size=size, mask_token_id=BLOCK_MASK, rank=16,
                                              **settings))


def choosing(**settings: Any) -> Maker:
    """Maker of a drafter of blocks that chooses among few candidates: llama.cpp keeps the table of their pairs in a
    state, which is narrow here."""
    def made(target: Target, ids_Q: Tensor) -> Drafter:
        drafter: Any = blocks(aligned="same", **settings)(target, ids_Q)
        drafter.correction.most = 8
        return drafter
    return made


def draft_model(**settings: Any) -> Maker:
    """Maker of a draft language model."""
    return maker(DraftLM, DraftLMConfig(num_layers=2, **settings))


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "attention_factor": 1.3}
"""A scaling of the rotary embedding that decides about tokens in texts as short as these."""


def stretched(target: Target, ids_Q: Tensor) -> Drafter:
    """An EAGLE-3 drafter with a scaled rotary embedding, as if its target had one."""
    plain = third()(target, ids_Q)
    said = plain.describe()
    said["block"]["rope_scaling"] = {name: value for name, value in YARN.items() if name != "rope_theta"}
    drafter = Eagle3.rebuild(said, target.identity)
    drafter.load_state_dict(plain.state_dict())
    drafter.bind(target)
    return drafter


def from_folder(config: type[Any], **settings: Any) -> Maker:
    """Maker of a draft language model of a stated architecture, whose first weights come from a folder."""
    def made(target: Target, ids_Q: Tensor) -> Drafter:
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config(
                vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=512,
                pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings)).save_pretrained(folder)
            return DraftLM.create(DraftLMConfig(folder=folder), target)
    return made


MAKERS: dict[str, Maker] = {
    "draft_lm": from_folder(LlamaConfig, rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE}),
    "draft_lm, mask tokens": draft_model(depths=STEPS, mask_token_id=MASK),
    "draft_lm, own output": draft_model(),
    "draft_lm, Qwen 2": from_folder(Qwen2Config),
    "draft_lm, Qwen 3": from_folder(Qwen3Config),
    "draft_lm, YaRN": from_folder(LlamaConfig, rope_parameters=YARN),
    "draft_lm, Qwen 3, YaRN": from_folder(Qwen3Config, rope_parameters=YARN),
    "block, DFlash": blocks(aligned="same", causal=False),
    "block, DFlash, reduced": blocks(aligned="same", causal=False, vocabulary_size=ENTRIES),
    "block, JetSpec": blocks(aligned="same", causal=True, num_layers=1),
    "block, DSpark": blocks(aligned="next", causal=False, correction="markov", confidence=True),
    "block, DSpark, reduced": blocks(aligned="next", causal=True, correction="markov", vocabulary_size=ENTRIES),
    "block, DSpark, same": blocks(aligned="same", causal=True, correction="markov"),
    "block, DFlash 2": choosing(causal=False, correction="selector", conv=True),
    "block, DFlash 2, causal": choosing(correction="selector", conv=True, num_layers=1),
    "eagle": maker(Eagle, EagleConfig(bias=False, steps=STEPS)),
    "eagle, bias": maker(Eagle, EagleConfig(bias=True, steps=STEPS)),
    "eagle3": third(),
    "eagle3.1": third(fc_norm=True, norm_output=True),
    "eagle3, other norms": third(norm_before_fc=True, norm_before_residual=True),
    "eagle3, two layers": third(num_layers=2),
    "eagle3, borrowed output": third(output="shared", vocabulary_size=None),
    "eagle3, YaRN": stretched,
    "eagle3, narrow": third(hidden_size=64),
    "p_eagle": maker(PEagle, PEagleConfig(taps=(1, 2, 4), steps=STEPS, num_layers=2, vocabulary_size=ENTRIES,
                                          fc_norm=True, mask_token_id=MASK)),
    "medusa": maker(Medusa, MedusaConfig(num_heads=STEPS, num_layers=2, output="one_copy", vocabulary_size=ENTRIES)),
}
"""Drafters by name: the family, and what is special about it."""


def folder_of(name: str, layout: str, weights: str) -> Path:
    """The folder of an exported drafter: FORMAT/NAME, and its number format where that is not float32."""
    return Path(layout, name if weights == FLOAT32 else f"{name}, {weights}")


def known(name: str, target: Target, texts: Texts, drafters: Path, say: Callable[[str], None]) -> Drafter:
    """A drafter that knows the texts: overfitted here, or by another process that proves another engine."""
    torch.manual_seed(0)
    drafter = MAKERS[name](target, texts.token_ids())
    file = drafters / f"{name}.safetensors"
    drafters.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        if file.is_file():
            drafter.load_state_dict(load_file(file))
            say(f"{name}: knows its texts, as {file} does")
            return drafter.eval()
        held = {part: value for part, value in HELD.items() if part in dict(drafter.named_parameters())}
        say(f"{name}: knows its texts after {overfit(drafter, texts, held)} optimizer steps")
        write_atomically(file, partial(save_file, drafter.state_dict()))
    return drafter


def write_drafters(folder: Path, wanted: dict[str, list[tuple[str, str]]], python: Path, drafters: Path,
                   say: Callable[[str], None]) -> Texts:
    """Write the target into `folder/target`, and overfitted drafters in each wanted format, as `folder_of` says."""
    model = tiny_llama()
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_vocabulary(folder / VOCABULARY, model.config.vocab_size)
    target = Target(model, tiny_tokenizer(), name="./target", pack=0)
    texts = texts_of(target)
    for name, formats in wanted.items():
        drafter = known(name, target, texts, drafters, say)
        artifact = Artifact(drafter=drafter, target=target, topology=Topology.chain(STEPS), identity=target.identity,
                            provenance={})
        # The target as engines get it from users: the commands that are printed name it from the folder of a draft.
        export_artifact(artifact, target, "target", folder / "target")
        for layout, weights in formats:
            settings = ExportSettings(target_gguf=vocabulary, convert_with=python, weights=weights)
            export_artifact(artifact, target, layout, folder / folder_of(name, layout, weights), settings)
            if not (folder / layout / "target").exists():
                (folder / layout / "target").symlink_to("../target")
                (folder / layout / "target.gguf").symlink_to("../target.gguf")
    return texts
