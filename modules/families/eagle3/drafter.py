"""EAGLE-3: a decoder layer over several of the target's states, trained on its own states as while drafting
(arXiv:2503.01840); also with EAGLE-3.1's norms (arXiv:2605.09992), with more than one layer and with EAGLE-4's head.

Its training pass is `EagleDrafter.forward` (parts/feature_drafter.py), its loss `objective` in trainers/objectives.py.

Shapes: B rows, N positions, F nodes, D hidden size, V target vocabulary, Q entries of the draft vocabulary, C
candidates."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from ...config_checks import LATER, Parts, Size
from ...errors import UserError
from ...interfaces.drafter import FamilyCard, Training
from ...interfaces.proposer import Scores
from ...parts.decoder_block import AttentionContext, BlockConfig, DecoderBlock, ResidualLayer, RMSNorm
from ...parts.feature_drafter import EagleDrafter, TappedConfig, block_like, chosen_taps, columns_for, last_norm
from ...parts.heads import CandidateHead, principal
from ...parts.shared_embeddings import Sizes
from ...target.draft_vocabulary import OwnOutput, carry_rows
from ...target.model import Target


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(TappedConfig):
    """The shape of an EAGLE-3 drafter."""

    training_only = frozenset({"steps", "candidates"})
    ahead = ("steps",)
    steps: Parts = 7
    """Draft steps of the training-time test at each position."""
    num_layers: Parts = 1
    """Decoder layers; the first reads token and state, the others are ordinary ones after it. The paper has 1; the
    official code and SGLang run no other number."""
    hidden_size: Size | None = None
    """Width of its layers; None takes the target's. Neither the target's embedding nor its output layer fits another
    width: the drafter then trains its own."""
    fc_norm: bool = False
    """Whether each tapped state has a separate RMSNorm before `fc` (EAGLE-3.1, arXiv:2605.09992), so that the layers of
    the target count alike whatever the size of their states."""
    norm_before_fc: bool = False
    """Whether one RMSNorm over all tapped states stands before `fc` (the speculators library); not with `fc_norm`."""
    norm_before_residual: bool = False
    """Whether the layer's residual starts at the state after its norm (the speculators library, vLLM and llama.cpp) or,
    as in the official code, before it."""
    norm_output: bool = False
    """Whether the next step reads the state after the norm of the output layer (EAGLE-3.1) or before it."""
    output: Literal["shared", "copy"] = "copy"
    """`copy` trains the drafter's own output layer, `shared` reads the target's and adds no weights."""
    head_rank: Size | None = field(default=None, metadata={LATER: True})
    """Rank of EAGLE-4's candidate head, two factors that stand for the whole output layer. Only these are trained, for
    the finished draft of `train.start`; None trains the draft."""
    candidates: Size = field(default=512, metadata={LATER: True})
    """Entries that the output layer scores at a node, the best ones by the product of the factors; only with
    `head_rank`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fc_norm and self.norm_before_fc:
            raise UserError("fc_norm and norm_before_fc are both true, and the states are normalised once; choose one")

    def inherits(self, name: str, start: Any) -> bool:
        """A recipe without a rank trains the draft of a start that has one."""
        return super().inherits(name, start) and name != "head_rank"

    def check_training(self, train: Any) -> None:
        """A candidate head is learned from a finished draft."""
        if self.head_rank is not None and train.start is None:
            raise UserError(f"drafter.head_rank is {self.head_rank}, which trains the candidate head of a finished "
                            "draft and not the draft; name its artifact with train.start, or leave head_rank out")

    def carries(self, name: str, start: Any) -> bool:
        """Further layers pass the state on, and `fc` reads nothing of further taps; a norm over all would change."""
        taps = name == "taps" and not self.norm_before_fc and set(start.taps) < set(self.taps or ())
        layers = name == "num_layers" and start.num_layers < self.num_layers
        return super().carries(name, start) or taps or layers or name == "head_rank"


class WideBlock(ResidualLayer):
    """EAGLE-3's layer: attention reads token and state concatenated, each after a norm; the residual is the state,
    with `normed` after its norm."""

    hidden_norm: RMSNorm

    def __init__(self, config: BlockConfig, *, normed: bool = False) -> None:
        super().__init__(config, norms=("input_layernorm", "hidden_norm"), input_size=2 * config.hidden_size)
        self.normed = normed

    def forward(self, embedded_BND: Tensor, read_BND: Tensor, attention: AttentionContext) -> Tensor:
        """The states after the layer, [B, N, D]."""
        normed_BND = self.hidden_norm(read_BND)
        joined = torch.cat([self.input_layernorm(embedded_BND), normed_BND], dim=-1)
        hidden_BND = (normed_BND if self.normed else read_BND) + self.self_attn(joined, attention)
        passed_BND: Tensor = hidden_BND + self.mlp(self.post_attention_layernorm(hidden_BND))
        return passed_BND


class Eagle3(EagleDrafter):
    """fc over the target's tapped states, then decoder layers that read their own states while drafting. Own weights,
    named as in the official code: `fc.weight` [D, taps D], `midlayer.*`, `norm.weight`, with `fc_norm` also
    `fc_norm.{tap}.weight` [D], with `norm_before_fc` `input_norm.weight` [taps D], with more layers `layers.{1...}.*`,
    with `output="copy"` `lm_head.weight` [Q, D], with a reduced vocabulary its ids, `token_ids` [Q], with a candidate
    head `head.{down,up}.weight`, of which alone gradients are found. The target's
    embedding is borrowed, except by layers of a different width, which have `embed_tokens.weight` [V, D]; `fc` and the
    norms before it then read the target's width. Make a new one with `Eagle3.create`."""

    family = "eagle3"
    card = FamilyCard(
        name="EAGLE-3, EAGLE-3.1, EAGLE-4", papers=("2503.01840", "2605.09992"),
        guesses="one decoder layer (or more) over several of the target's states, trained on its own states",
        cost="four stored states of a token, where EAGLE-1 has one; one layer run for each level of the tree")
    config: Eagle3Config
    config_class = Eagle3Config
    # Tokens are always the true ones: a drafter trained on its own guesses learns less. A position is learned where the
    # next token of the text lies in the draft vocabulary; the official code asks it of the target's likeliest token.
    trained_as = Training(objective="soft", offsets=True)
    estimates_states = False
    former_settings = ("target_hidden_size",)  # The identity has it.

    def __init__(self, config: Eagle3Config, sizes: Sizes, block: BlockConfig) -> None:
        # Artifacts from before the setting do not name it, and a start's layers have another shape than the target's.
        config = replace(config, qk_norm=block.qk_norm)
        super().__init__(config, sizes, block)
        if config.taps is None:
            raise UserError("the taps of an EAGLE-3 drafter must be set; use Eagle3.create, which chooses them")
        width, wide, eps = block.hidden_size, sizes.hidden_size, block.norm_eps
        self.taps, self.num_layers, self.trained_steps = config.taps, config.num_layers, config.steps
        self.state_size = width
        # NaN until initialised or loaded: nothing is drawn, and a row that was forgotten shows.
        self.embed_tokens = None if wide == width else nn.Embedding(
            sizes.vocab_size, width, _weight=torch.full((sizes.vocab_size, width), torch.nan))
        self.fc_norm = nn.ModuleList(RMSNorm(wide, eps=eps) for _ in (config.taps if config.fc_norm else ()))
        joined = len(config.taps) * wide
        self.input_norm = RMSNorm(joined, eps=eps) if config.norm_before_fc else None
        self.fc = nn.Linear(joined, width, bias=False)
        self.midlayer = WideBlock(block, normed=config.norm_before_residual)
        self.layers = nn.ModuleDict({str(layer): DecoderBlock(block, layer) for layer in range(1, config.num_layers)})
        self.norm = RMSNorm(width, eps=eps)
        entries = config.vocabulary_size or sizes.vocab_size
        self.lm_head = OwnOutput(width, entries, bias=False) if config.output == "copy" else None
        # A tuple, which registers nothing: the weights have the official name, `lm_head`, alone.
        self.outputs = () if self.lm_head is None else (self.lm_head,)
        self.head: CandidateHead | None = None
        if config.head_rank is not None:
            # The output layer scores what the factors find: they learn its distribution, and nothing else learns.
            self.requires_grad_(False)
            self.head, self.imitated = CandidateHead(width, entries, config.head_rank, config.candidates), self.full

    @classmethod
    def create(cls, config: Any, target: Target, token_ids_Q: Tensor | None = None, start: Self | None = None) -> Self:
        """As of every drafter; a new candidate head is the SVD of the output layer. One of the same rank keeps its
        trained factors, with the rows nearest to the output layer's for tokens that it lacks."""
        drafter = super().create(config, target, token_ids_Q, start)
        if (head := drafter.head) is None or target.device.type == "meta":
            return drafter
        if start is None or start.head is None or start.config.head_rank != drafter.config.head_rank:
            head.factorise(drafter.full_rows)
            return drafter
        with torch.no_grad():
            head.up.weight.copy_(drafter.full_rows.to(head.down.weight) @ torch.linalg.pinv(head.down.weight))
            carry_rows(head.up, drafter.token_ids, start.head.up, start.token_ids, drafter.vocab_size)
        return drafter

    @classmethod
    def fitted(cls, config: Eagle3Config, target: Target) -> tuple[Eagle3Config, BlockConfig]:
        """(settings with the taps chosen, shape of the layers). Raises UserError when taps or widths do not fit."""
        width, qk_norm = config.hidden_size or target.hidden_size, config.qk_norm
        if qk_norm is None:
            # Norms of whole queries, as OLMo 2 has them, are others.
            names = ("q_norm.weight", "q_layernorm.weight", "query_layernorm.weight")
            qk_norm = any(name.endswith(names) and weight.shape == (BlockConfig.like(target).head_dim,)
                          for name, weight in target.layers[-1].named_parameters())
        block = block_like(target, config.rope_base, qk_norm)
        if width != target.hidden_size and config.output == "shared":
            raise UserError(f"output is 'shared', but the output layer of {target.identity.name} reads states "
                            f"{target.hidden_size} wide, not of hidden_size {width}; set output to copy, or leave "
                            "hidden_size out")
        for name, size, most, bound in () if config.head_rank is None else (
                ("head_rank", config.head_rank, width, "the width of the draft's states"),
                ("candidates", config.candidates, config.vocabulary_size or target.vocab_size, "the draft vocabulary")):
            if size > most:
                raise UserError(f"{name} must be at most {most}, {bound}, got {size}; lower drafter.{name}")
        # Of another width in the same proportions, with heads of the same width.
        heads = max(1, round(block.num_heads * width / block.hidden_size))
        shared = max(1, heads * block.num_kv_heads // block.num_heads)
        while heads % shared:
            shared -= 1
        block = replace(block, hidden_size=width, num_heads=heads, num_kv_heads=shared,
                        intermediate_size=max(1, round(block.intermediate_size * width / block.hidden_size)))
        return replace(config, taps=chosen_taps(config.taps, target), qk_norm=qk_norm), block

    def initialise(self, target: Target) -> None:
        """Set weights that pass the highest tap on unchanged and read it as the target reads its last layer. The
        official code starts with random weights and trains for days."""
        self.fc.weight.zero_()
        for layer in (self.midlayer, *self.layers.values()):
            cast(ResidualLayer, layer).zero_output()
        norm_D = last_norm(target, self.block.norm_eps)
        width, wide = self.block.hidden_size, len(norm_D)
        if self.embed_tokens is None:
            self.fc.weight[:, -wide:] = torch.eye(wide, device=norm_D.device)
            self.norm.weight.copy_(norm_D)
            if self.lm_head is not None:
                self.lm_head.weight.copy_(self.output_rows().weight_QD)
            return
        # A narrower or wider drafter reads principal components: of the output layer, and of the embedding.
        read_QD = self.output_rows().weight_QD.to(norm_D.dtype) * norm_D
        axes_DE = principal(read_QD, width)
        self.fc.weight[:, -wide:] = axes_DE.mT
        # A state with the same norm in E components in place of D has a larger root mean square.
        self.norm.weight.fill_((wide / width) ** 0.5)
        if self.lm_head is not None:
            self.lm_head.weight.copy_(read_QD @ axes_DE)
        table_VD = target.model.get_input_embeddings().weight.to(norm_D.dtype)
        self.embed_tokens.weight.copy_(table_VD @ principal(table_VD, width))

    def carried(self, start: Self) -> dict[str, Tensor]:
        """The start's tensors; `fc` has columns of zeros for further taps. `create` carries a head's rows."""
        renamed = {f"fc_norm.{place}.weight": f"fc_norm.{self.taps.index(tap)}.weight"
                   for place, tap in enumerate(start.taps)}
        tensors = {renamed.get(name, name): tensor for name, tensor in super().carried(start).items()
                   if not name.startswith("head.")
                   or (name == "head.down.weight" and self.config.head_rank == start.config.head_rank)}
        return {**tensors, "fc.weight": columns_for(self.taps, start.fc.weight, start.taps)}

    def fuse(self, final_BND: Tensor, taps: dict[int, Tensor]) -> Tensor:
        """One state from the concatenated tapped states, ascending by layer. Raises ValueError if a tap is missing."""
        read = self.tapped(taps)
        if self.config.fc_norm:
            read = [norm(state_BND) for norm, state_BND in zip(self.fc_norm, read, strict=True)]
        joined_BND = torch.cat(read, dim=-1)
        fused_BND: Tensor = self.fc(joined_BND if self.input_norm is None else self.input_norm(joined_BND))
        return fused_BND

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of token ids: the target's without gradients, or its own."""
        self.output_rows()  # An unbound drafter refuses to run even if it would read nothing of the target.
        if self.embed_tokens is None:
            return super().embed(tokens)
        return cast(Tensor, self.embed_tokens(tokens))

    def step(self, embedded_BND: Tensor, read_BND: Tensor, attention: AttentionContext) -> Tensor:
        """The last layer's states, [B, N, D], before the norm."""
        passed_BND: Tensor = self.midlayer(embedded_BND, read_BND, attention)
        for layer in self.layers.values():
            passed_BND = layer(passed_BND, attention)
        return passed_BND

    def feed(self, own: Tensor) -> Tensor:
        """The state itself with its gradient, so that a step also learns to serve the next ones."""
        return self.finish(own) if self.config.norm_output else own

    def finish(self, own: Tensor) -> Tensor:
        """The state after the norm."""
        return cast(Tensor, self.norm(own))

    # The candidate head of EAGLE-4 ------------------------------------------------------------------------------------

    def full(self, hidden: Tensor) -> Tensor:
        """Logits of the whole output layer, [..., Q]."""
        return super().project(hidden, 0)

    def output_parameters(self, step: int) -> tuple[nn.Parameter, ...]:
        return super().output_parameters(step) if self.head is None else tuple(self.head.parameters())

    def project(self, hidden: Tensor, step: int) -> Tensor:
        """Draft logits [..., Q]; with a candidate head those of its product in training, else of candidates alone."""
        if self.head is None:
            return self.full(hidden)
        if self.training:
            return self.head.logits(hidden, self.output_rows())
        entries_C, logits_C = self.head.rescored(hidden, self.output_rows(), self.full_rows)
        blank_Q = logits_C.new_full((*logits_C.shape[:-1], len(self.full_rows)), -torch.inf)
        return blank_Q.scatter(-1, entries_C, logits_C)

    def scored(self, finished_BFD: Tensor) -> Scores:
        """Scores of the candidates alone, over which the draft's distribution then is."""
        if self.head is None:
            return super().scored(finished_BFD)
        entries_BFC, logits_BFC = self.head.rescored(finished_BFD, self.output_rows(), self.full_rows)
        ids_BFC = entries_BFC if self.token_ids is None else self.token_ids[entries_BFC]
        scores = Scores.from_logits(logits_BFC[:, :, None], states_BFHD=finished_BFD[:, :, None])
        return replace(scores, candidates_BFHQ=ids_BFC[:, :, None], all_guesses=True)

    @property
    def full_rows(self) -> Tensor:
        """The rows of the output layer, its own or the target's, [Q, D]."""
        return self.output_rows().weight_QD if self.lm_head is None else self.lm_head.weight
