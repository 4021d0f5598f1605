"""Drafting with a causal draft model that reads the text itself, into its own cache, grows trees there, and may predict
several tokens in one pass through mask tokens (PARD, arXiv:2504.18583).

After a text that ends at its token p, K - 1 mask tokens take the positions p + 1, p + 2, ...: the k-th of them predicts
the token at p + k + 1. In training every position p of a text is such an end, an *anchor*. All texts and all their mask
tokens share one pass: mask token k of anchor p sees the text up to p and the anchor's own mask tokens up to itself, and
no text token sees a mask token. All of them would make a pass K times as long, so only a falling share of the anchors
keeps its k-th mask token (conditional drop, section 3.3): share r ** k, at least r_min.

A drafter may add what the target's states say to its inputs (PARD-2, arXiv:2605.08632): a token gets the state of the
one before it, and all mask tokens of an anchor what the anchor gets, the newest state that there is while drafting.

Shapes: B rows, R rows that change, F nodes of a draft pass, W cache slots in use, N tokens, H depths scored at once, Q
draft vocabulary, D hidden size, L positions of a row or places of the text buffer, K depths, S mask tokens of a row or
rows of a state, G tokens of a window or key-value heads, E width of a key, X width of a value."""

from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from ..features import Features
from ..interfaces.proposer import DraftState, Frontier, Observation, Proposer, Scores
from ..row_buffers import RowBuffer
from ..target.attention.segment_attention import QUERIES, AttentionForm, Segments, attend_inside, attend_seen
from .block_cache import BlockRows
from .decoder_block import AttentionContext

WAITING = 16
"""Most accepted tokens that are read together with the root; a longer text, such as a prompt, is read at once."""
PIECE = 512  # Most tokens of a text of its own that a draft reads in one pass
SLOT = -1  # Placeholder id of a mask token, which has a learned embedding and no id


class Text(DraftState):
    """Each row's tokens, the root last, allocated once, after a `margin` of empty places that a window may reach."""

    tokens_SL: Tensor  # The tokens, -1 where there is none
    roots_S: Tensor  # Place of the root of each row

    def __init__(self, rows: int, capacity: int, margin: int, device: torch.device) -> None:
        texts = RowBuffer(rows, margin + capacity + 1, blank=-1, device=device, dtype=torch.long)
        places = RowBuffer(rows, blank=margin, device=device, dtype=torch.long)
        self.held, self.tokens_SL, self.roots_S = (texts, places), texts.values, places.values

    def append(self, rows_R: Tensor, observation: Observation) -> Tensor:
        """Add the new tokens and the root after them; returns the place of each new token, [R, N]."""
        columns_N = torch.arange(observation.tokens_BN.shape[1], device=rows_R.device)
        # The processed tokens start with the former root and overwrite it. Tokens beyond a row's count come after its
        # root and are overwritten next time.
        places_RN = self.roots_S[rows_R, None] + columns_N
        self.tokens_SL[rows_R[:, None], places_RN] = observation.tokens_BN
        self.roots_S.index_add_(0, rows_R, observation.counts_B)
        self.tokens_SL[rows_R, self.roots_S[rows_R]] = observation.roots_B
        return places_RN

    def endings(self, rows_R: Tensor, places_RN: Tensor, length: int) -> Tensor:
        """The `length` tokens up to each place, [R, N, length]; -1 before the start of the text."""
        back_G = torch.arange(1 - length, 1, device=places_RN.device)
        return self.tokens_SL[rows_R[:, None, None], places_RN[..., None] + back_G]


class CausalState(Text):
    """The texts, the draft model's cache of them and the drafted tree."""

    def __init__(self, rows: int, capacity: int, read: BlockRows) -> None:
        super().__init__(rows, capacity, 0, read.cache.lengths_B.device)
        self.read = read
        self.held, self.caches = (*self.held, read.cache), (read.cache,)
        self.host_lengths = [0] * rows  # Tokens of each text without the root
        self.apart = [False] * rows  # Whether a row reads a text of its own in place of the prompt
        self.rooted = False  # Whether the tree holds the roots
        self.most = WAITING  # Most tokens of a row that an observation may leave unread
        self.at_once = False  # Whether every pass of one shape may accept more, so that its observation reads them
        self.given: RowBuffer | None = None
        """Additions of the target's states to the newest tokens' inputs, the root last; None where they add nothing."""

    def give(self, values: RowBuffer) -> None:
        """Keep what the target's states add to the inputs of the `WAITING` + 1 newest tokens, [S, N, D]."""
        self.given, self.held = values, (*self.held, values)

    def drop_tree(self) -> None:
        """Discard the roots and the nodes of their trees."""
        self.rooted = False
        self.read.drop_tree()

    def clear(self, rows_R: Tensor) -> None:
        """Reset the rows, texts and cache."""
        super().clear(rows_R)
        for row in rows_R.tolist():
            self.host_lengths[row], self.apart[row] = 0, False

    def keep(self, rows_R: Tensor) -> None:
        """Keep the rows `rows_R`, in that order."""
        super().keep(rows_R)
        kept = [self.host_lengths[row] for row in rows_R.tolist()]
        self.host_lengths = [*kept, *[0] * (len(self.host_lengths) - len(kept))]
        apart = [self.apart[row] for row in rows_R.tolist()]
        self.apart = [*apart, *[False] * (len(self.apart) - len(apart))]

    def unread(self, rows: Sequence[int]) -> list[int]:
        """Tokens of these rows that are not in the cache, their roots not counted."""
        return [self.host_lengths[row] - self.read.cache.host_lengths[row] for row in rows]

    def expect(self, path: int, skipped: bool) -> None:
        """Let each pass of one shape read as many tokens as one may leave unread; none, if a pass may read nothing."""
        self.most, self.at_once = 0 if skipped else min(WAITING, path), skipped or path > WAITING

    def advance(self, counts: Sequence[int]) -> None:
        """Count the accepted tokens, and those that the cache holds now: all that were unread before the pass."""
        read = self.unread(range(len(counts)))
        for row, count in enumerate(counts):
            self.host_lengths[row] += count
            read[row] += count if self.at_once else 0
        self.read.cache.advance(read)


class CausalDraft(Proposer[CausalState]):
    """A draft model with a causal cache: its states equal those of one pass over the text and the drafted path. This
    class holds text, cache and trees; a subclass defines the layers that run and the output layer."""

    kept: Sequence[int]  # Layers that run, ascending
    num_layers: int  # Number of layers of the whole model
    cache_groups: Sequence[Hashable]
    """A mark of each layer, equal where keys and values have equal shapes, see `RowCache`."""
    window: int | None = None  # The window of its layers; None where one of them sees the whole text
    reads_own_text = True  # True: it reads no states of the target's
    slots: int = 0
    """Mask tokens after the root, one for each depth beyond the first; 0 when depths are drafted one by one."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the weights."""

    @abstractmethod
    def run(self, tokens_BF: Tensor, attention: AttentionContext, key_positions_BW: Tensor,
            given_BFD: Tensor | None = None) -> Tensor:
        """Final states [B, F, D] of new tokens, `SLOT` for a mask token; keys go to the cache of `attention`. What the
        target's states add to the inputs is given where they do."""

    @abstractmethod
    def read_out(self, final: Tensor) -> Scores:
        """Scores of states [B, F, H, D]: those of depth h of node f come from `final[:, f, h]`."""

    def added(self, observation: Observation) -> Tensor:
        """Additions of the target's states at the observed tokens to the inputs of the tokens after them, [R, N, D]."""
        raise NotImplementedError

    def start(self, rows: int, capacity: int) -> CausalState:
        """An empty state."""
        # Rows are padded to the row with the most unread tokens.
        read = BlockRows(len(self.kept), rows, capacity + WAITING + 1 + self.slots, self.device,
                         [self.cache_groups[layer] for layer in self.kept], self.window)
        # The storage holds the layers that run alone; the model numbers all of them, but the others never write.
        places = {layer: place for place, layer in enumerate(self.kept)}
        read.cache.layers = [read.cache.layers[places.get(layer, 0)] for layer in range(self.num_layers)]
        return CausalState(rows, capacity, read)

    def open(self, state: CausalState, row_R: Tensor, *, reference: Sequence[int], own_text: Sequence[int]) -> None:
        """Reset a row; it reads `own_text`, if there is one, which stands in place of the prompt's tokens."""
        super().open(state, row_R, reference=reference, own_text=own_text)
        for start in range(0, len(own_text), PIECE):
            tokens_BN = row_R.new_tensor([own_text[start : start + PIECE]])
            # The root comes with the prompt.
            self.observe(state, row_R, Observation(
                tokens_BN=tokens_BN, counts_B=row_R.new_tensor([tokens_BN.shape[1]]), final_BND=tokens_BN[..., None],
                taps={}, roots_B=torch.zeros_like(row_R)))
        for row in row_R.tolist() if own_text else ():
            state.apart[row] = True

    def observe(self, state: CausalState, rows_R: Tensor, observation: Observation) -> None:
        """Store the new tokens. A few are read together with the root, many are read at once."""
        state.drop_tree()
        rows, counts = observation.on_host(rows_R)
        if observation.prompt and any(state.apart[row] for row in rows):
            # Of a prompt, rows with a text of their own take what follows it: in the end, the first of the answer.
            state.tokens_SL[rows_R, state.roots_S[rows_R]] = observation.roots_B
            if not (others := [place for place, row in enumerate(rows) if not state.apart[row]]):
                return
            rows, counts = [rows[place] for place in others], [counts[place] for place in others]
            rows_R, observation = rows_R[others], replace(
                observation, tokens_BN=observation.tokens_BN[others], counts_B=observation.counts_B[others],
                roots_B=observation.roots_B[others])
        given_RMD, former_R = None, state.roots_S[rows_R]
        if state.given is not None:
            # Left of the new ones stand those of the newest tokens, the former root's last.
            given_RMD = torch.cat([state.given.values[rows_R], self.added(observation).to(state.given.values)], dim=1)
            newest_RN = observation.counts_B[:, None] + torch.arange(WAITING + 1, device=rows_R.device)
            state.given.values.index_copy_(0, rows_R, _at(given_RMD, newest_RN))
        state.append(rows_R, observation)
        for row, count in zip(rows, counts, strict=True):
            state.host_lengths[row] += count
        if state.read.cache.bound is not None:
            if state.at_once:
                self._read(state, rows, observation.tokens_BN.shape[1], given_RMD, former_R, roots=0)
        elif (most := max(state.unread(rows))) > state.most:
            self._read(state, rows, most, given_RMD, former_R, roots=0)

    @torch.no_grad()
    def expand(self, state: CausalState, frontier: Frontier) -> Scores:
        """Log-probabilities of the children of the frontier nodes; with mask tokens of every depth below the root.
        Raises ValueError if a drafter with mask tokens gets a node other than the root."""
        if state.rooted:
            if self.slots:
                raise ValueError(f"this {self.family} drafter scores every depth from the root at once; pass only the "
                                 "root")
            attention = state.read.add_nodes(frontier)
            final_BFD = self.run(frontier.tokens_BF, attention, state.read.key_positions())
            return self.read_out(final_BFD[:, :, None])
        # First the unread tokens, the root and the mask tokens after it are read.
        rows = list(range(len(frontier.nodes_BF)))
        unread = max(state.unread(rows)) if state.read.cache.bound is None else state.most
        given_RMD = None if state.given is None else state.given.values[: len(rows)]
        final_BND, counts_B = self._read(state, rows, unread + 1, given_RMD, state.roots_S[: len(rows)], roots=1)
        state.rooted = True
        # The tree starts with the root, which was read after the committed tokens.
        state.read.nodes_BM, state.read.above_BMM = state.read.root_B1, state.read.root_B11
        wanted_BH = counts_B[:, None] - 1 + torch.arange(1 + self.slots, device=counts_B.device)
        return self.read_out(final_BND.gather(1, wanted_BH[..., None].expand(-1, -1, final_BND.shape[-1]))[:, None])

    @torch.no_grad()
    def _read(self, state: CausalState, rows: list[int], width: int, given_RMD: Tensor | None, last_R: Tensor, *,
              roots: int) -> tuple[Tensor, Tensor]:
        """(final states [R, N, D], left-aligned, counts [R]) of the tokens of these rows that are not in the cache,
        with their roots if `roots` is 1; all but the roots are committed. Rows are padded to `width` tokens. Mask
        tokens come after each root; later mask tokens see them. They are neither counted nor committed. What is given
        to the inputs starts with that of `WAITING` tokens and the one at the place `last_R`."""
        counts = state.unread(rows)
        rows_R = state.read.cache.row_numbers(rows)
        counts_R = state.roots_S[rows_R] + roots - state.read.cache.lengths_B[rows_R]
        attention = state.read.read(rows, width + roots * self.slots)
        places_RN = attention.positions_BN.clamp(max=state.tokens_SL.shape[1] - 1)
        tokens_RN = state.tokens_SL[rows_R[:, None], places_RN].clamp(min=0)
        if self.slots and roots:
            order_N = torch.arange(tokens_RN.shape[1], device=tokens_RN.device)
            tokens_RN = torch.where(order_N < counts_R[:, None], tokens_RN, SLOT)
        if given_RMD is not None:
            # Mask tokens get what the root gets.
            given_RMD = _at(given_RMD, attention.positions_BN - last_R[:, None] + WAITING)
        final_RND = self.run(tokens_RN, attention, state.read.key_positions(), given_RMD)
        state.read.commit(counts_R - roots, counts)
        return final_RND, counts_R


def _at(values_RMD: Tensor, columns_RN: Tensor) -> Tensor:
    """The values at these columns, [R, N, D]; the first or the last one beyond an end."""
    columns_RN = columns_RN.clamp(min=0, max=values_RMD.shape[1] - 1)
    return values_RMD.gather(1, columns_RN[..., None].expand(-1, -1, values_RMD.shape[-1]))


# Mask tokens in training ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The mask tokens of a pass, left-aligned; rows with fewer of them are padded."""

    anchors_BS: Tensor  # Position of the text's last token in its row
    depths_BS: Tensor  # Number of the mask token after it, from 1
    real_BS: Tensor  # False at padding


def useful(features: Features, depths: int) -> Tensor:
    """True for depths with a label at a position, bool [B, L, K]: all labels up to that depth exist. While decoding a
    text never ends at a position without a label, and a guess needs the guesses before it."""
    valid_BLK = torch.stack([features.labels(depth + 1)[1] for depth in range(depths)], dim=-1)
    return valid_BLK.long().cumprod(-1).bool()


def conditional_drop(useful_BLK: Tensor, rate: float = 0.7, least: float = 0.2) -> Tensor:
    """A random choice of the mask tokens that are kept, bool [B, L, K], with r the `rate` and r_min the `least`; depth
    0 (the token itself) is unchanged. Anchors are ranked once at random, so that an anchor that keeps mask token k also
    keeps those before it, which mask token k sees."""
    anchors_BL = useful_BLK[..., 0]
    chance_BL = torch.rand(anchors_BL.shape, device=anchors_BL.device).masked_fill(~anchors_BL, 2.0)
    ranks_BL = chance_BL.argsort(-1).argsort(-1)
    shares = [1.0, *(max(rate**depth, least) for depth in range(1, useful_BLK.shape[-1]))]
    counts_BK = torch.stack([anchors_BL.sum(-1) * share for share in shares], dim=-1).floor()
    return useful_BLK & (ranks_BL[..., None] < counts_BK[:, None])


def pack(kept_BLK: Tensor) -> Slots:
    """The kept mask tokens of each row in the order of their anchors."""
    masks = kept_BLK.shape[-1] - 1
    flat_BM = kept_BLK[..., 1:].flatten(1)
    width = int(flat_BM.sum(-1).max())
    order_BS = flat_BM.byte().argsort(dim=-1, descending=True, stable=True)[:, :width]
    return Slots(anchors_BS=order_BS // masks, depths_BS=order_BS % masks + 1, real_BS=flat_BM.gather(1, order_BS))


def visible(features: Features, slots: Slots) -> Tensor:
    """Attention mask of the tokens of a row followed by its mask tokens, bool [B, L + S, L + S]."""
    text_BLL = features.visible()
    anchors_BS, depths_BS = slots.anchors_BS, slots.depths_BS
    length = text_BLL.shape[1]
    own_BSL = text_BLL.gather(1, anchors_BS[..., None].expand(-1, -1, length))
    same_BSS = (anchors_BS[:, :, None] == anchors_BS[:, None]) & slots.real_BS[:, None]
    chain_BSS = same_BSS & (depths_BS[:, :, None] >= depths_BS[:, None])
    unseen_BLS = text_BLL.new_zeros(text_BLL.shape[0], length, anchors_BS.shape[1])
    return torch.cat([torch.cat([text_BLL, unseen_BLS], dim=2), torch.cat([own_BSL, chain_BSS], dim=2)], dim=1)


@dataclass(frozen=True, eq=False, kw_only=True)
class TextAndSlots(Segments):
    """Long training rows followed by their mask tokens, which see what `visible` says, without that mask: it would grow
    with the square of both. Mask tokens go through in blocks, each with the keys up to its last anchor."""

    features: Features
    slots: Slots
    positions_BM: Tensor  # Position of each token and of each mask token after them
    anchors: tuple[tuple[int, ...], ...]  # Anchor of each real mask token by row, ascending, on the host

    @classmethod
    def after(cls, features: Features, slots: Slots, positions_BM: Tensor) -> "TextAndSlots":
        """The sight of a batch and its mask tokens; the host waits for where they are."""
        text, rows = Segments.of(features), zip(slots.anchors_BS.cpu(), slots.real_BS.cpu(), strict=True)
        anchors = tuple(tuple(anchors_S[real_S].tolist()) for anchors_S, real_S in rows)
        return cls(lengths=text.lengths, padding=text.padding, features=features, slots=slots, anchors=anchors,
                   positions_BM=positions_BM)

    def attend(self, query_BHNE: Tensor, key_BGNE: Tensor, value_BGNX: Tensor, form: AttentionForm) -> Tensor:
        """Attention output [B, H, N, X] of text and mask tokens; zero at padding."""
        length = self.features.tokens_BL.shape[1]
        text = attend_inside(query_BHNE[:, :, :length], key_BGNE[:, :, :length], value_BGNX[:, :, :length], self, form)
        found = [text.new_zeros(*text.shape[1:2], query_BHNE.shape[2] - length, text.shape[3]) for _ in self.anchors]
        for row, anchors in enumerate(self.anchors):
            ends, blocks = [*accumulate(self.lengths[row])], []
            for start in range(0, len(anchors), QUERIES):
                stop = min(start + QUERIES, len(anchors))
                oldest = [0, *ends][bisect_right(ends, anchors[start])]
                # The mask tokens of an anchor follow each other.
                own = slice(bisect_left(anchors, anchors[start]), stop)
                attend = partial(self._block, row, slice(oldest, anchors[stop - 1] + 1), own, stop - start, form)
                # Masks and scores are computed again for a gradient, not kept.
                blocks.append(checkpoint(attend, query_BHNE[row], key_BGNE[row], value_BGNX[row], use_reentrant=False))
            if blocks:
                found[row] = pad(torch.cat(blocks, dim=1), (0, 0, 0, found[row].shape[1] - len(anchors)))
        return torch.cat([text, torch.stack(found)], dim=2)

    def _block(self, row: int, text: slice, own: slice, count: int, form: AttentionForm, query_HNE: Tensor,
               key_GNE: Tensor, value_GNX: Tensor) -> Tensor:
        """Attention output [H, N, X] of the last `count` of adjacent mask tokens over these and some of the text."""
        segments_L, positions_M = self.features.segments_BL[row], self.positions_BM[row]
        length, anchors_N = len(segments_L), self.slots.anchors_BS[row, own]
        depths_N, order_W = self.slots.depths_BS[row, own], torch.arange(text.start, text.stop, device=anchors_N.device)
        before_NW = (order_W <= anchors_N[:, None]) & (segments_L[text] == segments_L[anchors_N][:, None])
        chain_NN = (anchors_N[:, None] == anchors_N) & (depths_N[:, None] >= depths_N)
        there = slice(length + own.start, length + own.stop)
        near = form.near(positions_M[there], torch.cat([positions_M[text], positions_M[there]]))
        seen_NW = torch.cat([before_NW, chain_NN], dim=1) & near
        keys, values = (torch.cat([states[:, text], states[:, there]], dim=1) for states in (key_GNE, value_GNX))
        return attend_seen(query_HNE[:, there][:, -count:], keys, values, seen_NW[-count:], form)


def by_depth(states_BMD: Tensor, slots: Slots, length: int, depths: int) -> Tensor:
    """States of tokens and mask tokens as [B, L, K, D]: depth k of position p; zero for dropped mask tokens."""
    batch, _, width = states_BMD.shape
    # What is no mask token goes to a place after the last, so that the host need not know how many there are.
    places_BS = torch.where(slots.real_BS, slots.anchors_BS * depths + slots.depths_BS, length * depths)
    found = states_BMD.new_zeros(batch, length * depths + 1, width)
    found = found.scatter(1, places_BS[..., None].expand(-1, -1, width), states_BMD[:, length:])
    ahead_BLKD = found[:, :-1].view(batch, length, depths, width)[:, :, 1:]
    return torch.cat([states_BMD[:, :length, None], ahead_BLKD], dim=2)
