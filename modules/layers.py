"""The target as its own draft model: some of its layers, the others skipped (SWIFT arXiv:2410.06916, Draft & Verify
arXiv:2309.08168), or its first layers only.

Shapes: B rows, R rows that change, F nodes of a draft pass, M cache slots behind what a row has read, the pass's own
included, W cache slots in use, N tokens, D hidden size, L tokens of a text.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .cache import RowCache
from .drafter import DraftState, Frontier, Observation, Proposer, Scores
from .errors import UserError
from .features import Features
from .lookup import Text
from .target import Target

_WAITING = 16
"""Accepted tokens that wait for the root's pass; a longer text, such as a prompt, is read at once."""


@contextmanager
def skipping(target: Target, kept: Sequence[int]) -> Iterator[None]:
    """Let only the layers `kept` of the target do anything inside the block."""
    skipped = [target.layers[index] for index in range(target.num_layers) if index not in set(kept)]
    # Hooks that spread a model over devices replace `forward` on the layer too: what was there must come back.
    former = [layer.__dict__.get("forward") for layer in skipped]
    for layer in skipped:
        layer.__dict__["forward"] = _unchanged
    try:
        yield
    finally:
        for layer, forward in zip(skipped, former, strict=True):
            if forward is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = forward


def _unchanged(hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
    return hidden_states


class LayersState(Text):
    """The texts, and the draft model's cache: what it has read of them, and behind it the nodes drafted so far."""

    def __init__(self, rows: int, capacity: int, cache: RowCache) -> None:
        super().__init__(rows, capacity, 0, cache.lengths_B.device)
        self.cache = cache
        self.host_lengths = [0] * rows
        """Tokens of each text, the root not counted."""
        none_B0 = torch.zeros(rows, 0, dtype=torch.long, device=cache.lengths_B.device)
        self.nodes_BM = self.depths_BM = none_B0
        self.ancestors_BMM = none_B0[:, :, None].bool()

    @property
    def drafted(self) -> int:
        """Nodes in the cache."""
        return self.nodes_BM.shape[1]

    def plant(self, nodes_BM: Tensor, depths_BM: Tensor, ancestors_BMM: Tensor) -> None:
        """Note the nodes that the cache holds, in the order of their slots."""
        self.nodes_BM, self.depths_BM, self.ancestors_BMM = nodes_BM, depths_BM, ancestors_BMM

    def uproot(self) -> None:
        """Take the drafted nodes out of the cache."""
        self.cache.rewind(len(self.host_lengths), self.drafted)
        self.plant(self.nodes_BM[:, :0], self.depths_BM[:, :0], self.ancestors_BMM[:, :0, :0])


class LayerDraft(Proposer):
    """A draft model made of the target's layers `kept`, with the target's embedding, last norm and output layer.

    It reads the text by itself, into a cache of its own: its states are those of a model that consists of the kept
    layers. The papers let the skipping pass read the target's cache, whose keys come from the whole model: that saves
    this cache and reading the prompt, and the kept layers then attend to better states than they could have computed.
    For the first layers of a target both are the same states, computed twice here.

    Args:
        target: the model to draft for; nothing is copied.
        kept: layers that are run, ascending.

    Raises:
        UserError: if `kept` is empty, unordered or beyond the target.
    """

    family = "layers"

    def __init__(self, target: Target, kept: Sequence[int]) -> None:
        if not kept or list(kept) != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= target.num_layers:
            raise UserError(
                f"the layers kept must be ascending numbers from 0 to {target.num_layers - 1}, at least one; "
                f"got {tuple(kept)}"
            )
        self.target, self.kept = target, tuple(kept)

    def start(self, rows: int, capacity: int) -> LayersState:
        """An empty cache."""
        # Beside a row with tokens waiting, the others are padded.
        cache = RowCache(len(self.kept), rows, capacity + _WAITING + 1, self.target.device)
        # The model numbers all its layers, the storage holds the kept ones; the others never write.
        places = {layer: place for place, layer in enumerate(self.kept)}
        cache.layers = [cache.layers[places.get(layer, 0)] for layer in range(self.target.num_layers)]
        return LayersState(rows, capacity, cache)

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """Note the new tokens. A few wait for the root's pass; many are read at once."""
        held = _layers(state)
        held.uproot()
        held.append(rows_R, observation)
        rows = rows_R.tolist()
        for row, count in zip(rows, observation.counts_B.tolist(), strict=True):
            held.host_lengths[row] += count
        if max(held.host_lengths[row] - held.cache.host_lengths[row] for row in rows) > _WAITING:
            self._read(held, rows, roots=0)

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """Log-probabilities of the children of the frontier nodes."""
        held = _layers(state)
        final_BFD = self._root(held, frontier) if held.drafted == 0 else self._nodes(held, frontier)
        logits_BFV = self.target.logits(final_BFD)
        wide = torch.promote_types(logits_BFV.dtype, torch.float32)
        return Scores(log_probs_BFHQ=logits_BFV.to(wide).log_softmax(-1)[:, :, None])

    def _root(self, held: LayersState, frontier: Frontier) -> Tensor:
        """Read what is waiting and the root behind it; the root's state, [B, 1, D]."""
        final_BND, counts_B = self._read(held, list(range(len(held.host_lengths))), roots=1)
        depths_BM = torch.zeros_like(frontier.nodes_BF)
        held.plant(frontier.nodes_BF, depths_BM, torch.ones_like(depths_BM[:, :, None], dtype=torch.bool))
        last_B11 = (counts_B - 1)[:, None, None].expand(-1, 1, final_BND.shape[-1])
        return final_BND.gather(1, last_B11)

    def _read(self, held: LayersState, rows: list[int], *, roots: int) -> tuple[Tensor, Tensor]:
        """Run the tokens of these rows that are not in the cache, with their roots if `roots` is 1, and keep them.

        Returns:
            The final states [R, N, D], left-aligned, and the counts [R].
        """
        device = held.roots_S.device
        counts = [held.host_lengths[row] + roots - held.cache.host_lengths[row] for row in rows]
        rows_R, counts_R = torch.tensor(rows, device=device), torch.tensor(counts, device=device)
        order_N = torch.arange(max(counts), device=device)
        read_R = held.cache.lengths_B[rows_R]
        places_RN = (read_R[:, None] + order_N).clamp(max=held.tokens_SL.shape[1] - 1)
        tokens_RN = held.tokens_SL[rows_R[:, None], places_RN].clamp(min=0)
        depths_RN = order_N.expand_as(tokens_RN)
        earlier_RNN = (order_N[:, None] >= order_N).expand(len(rows), -1, -1)
        final_RND = self._run(held.cache, rows, tokens_RN, read_R, depths_RN, earlier_RNN)
        held.cache.commit(places_RN, counts_R, counts, moved=False)
        return final_RND, counts_R

    def _nodes(self, held: LayersState, frontier: Frontier) -> Tensor:
        """Run new nodes behind those drafted before; their states, [B, F, D]."""
        above_BF = (frontier.parents_BF[:, :, None] == held.nodes_BM[:, None]).long().argmax(-1)
        inherited_BFM = held.ancestors_BMM.gather(1, above_BF[..., None].expand(-1, -1, held.drafted))
        batch, width = above_BF.shape
        itself_BFF = torch.eye(width, dtype=torch.bool, device=above_BF.device).expand(batch, -1, -1)
        visible_BFM = torch.cat([inherited_BFM, itself_BFF], dim=2)
        depths_BM = torch.cat([held.depths_BM, held.depths_BM.gather(1, above_BF) + 1], dim=1)
        read_B = held.cache.lengths_B[:batch] - held.drafted
        final_BFD = self._run(held.cache, list(range(batch)), frontier.tokens_BF, read_B, depths_BM, visible_BFM)
        held.cache.commit(above_BF, torch.full_like(read_B, width), [width] * batch, moved=False)
        nothing_BMF = itself_BFF.new_zeros(batch, held.drafted, width)
        ancestors_BMM = torch.cat([torch.cat([held.ancestors_BMM, nothing_BMF], dim=2), visible_BFM], dim=1)
        held.plant(torch.cat([held.nodes_BM, frontier.nodes_BF], dim=1), depths_BM, ancestors_BMM)
        return final_BFD

    @torch.no_grad()
    def _run(
        self,
        cache: RowCache,
        rows: list[int],
        tokens_BF: Tensor,
        read_B: Tensor,
        depths_BM: Tensor,
        visible_BFM: Tensor,
    ) -> Tensor:
        """One pass of the kept layers: the final states of new tokens in the slots that follow each row's last one.

        Args:
            read_B: tokens of each row that everything sees; M counts the slots behind them.
            depths_BM: how far behind them each slot's token stands.
            visible_BFM: which of the slots each new token sees.
        """
        # Neighbouring rows are read through a view of the cache, others through a copy.
        together = rows == list(range(len(rows)))
        window = cache.open(slice(0, len(rows)) if together else rows, tokens_BF.shape[1])
        slots_W = torch.arange(window.width, device=read_B.device)
        behind_BW = slots_W - read_B[:, None]
        inside_BW = (behind_BW >= 0) & (behind_BW < depths_BM.shape[1])
        behind_BW = behind_BW.clamp(0, depths_BM.shape[1] - 1)
        seen_BFW = visible_BFM.gather(2, behind_BW[:, None].expand(-1, tokens_BF.shape[1], -1)) & inside_BW[:, None]
        positions_BM = (read_B[:, None] + depths_BM).clamp(max=self.target.context_length - 1)
        with skipping(self.target, self.kept):
            return self.target.decoder(  # type: ignore[no-any-return]
                inputs_embeds=self.target.embed(tokens_BF),
                attention_mask=((slots_W < read_B[:, None])[:, None] | seen_BFW)[:, None],
                position_ids=positions_BM[:, -tokens_BF.shape[1] :],
                past_key_values=cache,
                use_cache=True,
                key_positions=torch.where(inside_BW, positions_BM.gather(1, behind_BW), slots_W),
            ).last_hidden_state

    def expand_bytes(self) -> int:
        """The kept layers and the output layer."""
        kept = (parameter for layer in self.kept for parameter in self.target.layers[layer].parameters())
        return self.target.output_weight().nbytes + sum(parameter.nbytes for parameter in kept)

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Forget the rows' texts and what was read of them."""
        held = _layers(state)
        held.uproot()
        held.clear(rows_R)
        for row in rows_R.tolist():
            # Not only emptied: NaN keys of a row that went wrong would reach its successor through the mask.
            held.cache.wipe(row)
            held.host_lengths[row] = 0

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Let row r be the former row rows_R[r]."""
        held, order = _layers(state), rows_R.tolist()
        held.uproot()
        held.keep(rows_R)
        for destination, source in enumerate(order):
            if source != destination:
                held.cache.move(source, destination)
        held.host_lengths = [held.host_lengths[row] for row in order]
        held.plant(*(drafted[: len(order)] for drafted in (held.nodes_BM, held.depths_BM, held.ancestors_BMM)))


def first_layers(target: Target, count: int | None = None) -> LayerDraft:
    """The target's first layers as a draft model; a quarter of them by default."""
    return LayerDraft(target, range(count if count is not None else max(1, target.num_layers // 4)))


def every_other_layer(target: Target) -> LayerDraft:
    """Where SWIFT begins its search: of the layers between the first and the last, every second one is skipped."""
    last = target.num_layers - 1
    return LayerDraft(target, [layer for layer in range(last + 1) if layer in (0, last) or layer % 2 == 0])


@torch.no_grad()
def search_layers(
    target: Target, texts: Sequence[Sequence[int]], count: int, *, trials: int = 100, seed: int = 0
) -> tuple[tuple[int, ...], float]:
    """Which `count` layers agree best with the whole target on texts of its own (SWIFT, section 4.2).

    One pass over all texts scores a choice; each trial exchanges one kept layer for a skipped one and is kept if it is
    better. SWIFT decides for attention and MLP separately and mixes in Bayesian steps; here a layer is skipped whole.

    Args:
        texts: token ids, at least two each.
        count: layers to keep; the first and the last are always among them when it is 2 or more.
        trials: exchanges tried.
        seed: of the exchanges.

    Returns:
        The layers, ascending, and the share of positions where their argmax is the target's.

    Raises:
        UserError: if `count` is not between 1 and the number of layers, or there is no text.
    """
    if not 1 <= count <= target.num_layers:
        raise UserError(f"count must be between 1 and the target's {target.num_layers} layers, got {count}")
    if not texts:
        raise UserError("the layers are chosen on texts of the target; give at least one")
    features, rng, last = _batch(texts), random.Random(seed), target.num_layers - 1
    truth_P = _argmax(target, features, range(last + 1))
    kept = sorted({round(place * last / max(1, count - 1)) for place in range(count)})
    score = float((_argmax(target, features, kept) == truth_P).double().mean())
    fixed = {0, last} if count > 1 else set()
    free = [layer for layer in range(last + 1) if layer not in fixed]
    for _ in range(trials if 0 < count - len(fixed) < len(free) else 0):
        leaving = rng.choice([layer for layer in free if layer in kept])
        entering = rng.choice([layer for layer in free if layer not in kept])
        tried = sorted({*kept, entering} - {leaving})
        found = float((_argmax(target, features, tried) == truth_P).double().mean())
        if found > score:
            kept, score = tried, found
    return tuple(kept), score


def _batch(texts: Sequence[Sequence[int]]) -> Features:
    """The texts as rows, padded on the right."""
    width = max(map(len, texts))
    tokens_BL = torch.tensor([[*text, *([0] * (width - len(text)))] for text in texts])
    real_BL = torch.arange(width) < torch.tensor([[len(text)] for text in texts])
    return Features(
        tokens_BL=tokens_BL,
        supervised_BL=real_BL,
        segments_BL=torch.where(real_BL, 0, -1),
        positions_BL=torch.arange(width).expand_as(tokens_BL),
    )


def _argmax(target: Target, features: Features, kept: Sequence[int]) -> Tensor:
    """The likeliest next token at every real position, [P], by the kept layers alone."""
    with skipping(target, kept):
        encoded = target.encode(features)
    final_PD = encoded.final()[encoded.segments_BL >= 0]
    return torch.cat([target.logits(chunk).argmax(-1) for chunk in torch.split(final_PD, 512)])


def _layers(state: DraftState) -> LayersState:
    if not isinstance(state, LayersState):
        raise TypeError(f"LayerDraft needs the state that its own start() made, got {type(state).__name__}")
    return state
