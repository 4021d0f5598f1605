"""Verification of a batch: temperatures, random numbers and penalties of its rows, applied to each pass.

Shapes: R rows held, B of them active, N nodes, M nodes with logits, K nodes of a path, V vocabulary, T places.
"""

import torch
from torch import Tensor

from ..random_streams import Draws
from ..token_tree import TokenTree
from ..verification.acceptance_rules import Chances, exact_rule
from ..verification.sampling import Sampling, choose, penalise, widened
from ..verification.tree_walk import Accepted
from .requests import DecodeSettings, Request, uniform_stream
from .row_errors import LOGITS, cut, unreadable


class Referee:
    """Holds temperatures, random numbers and tokens read of every row, all on the device.

    Args:
        settings: shared by the requests.
        rows: how many there are.
        places: most tokens of an answer, the largest tree included.
        vocab_size: tokens of the target.
        sampled: whether any request has a temperature above 0.
        device: the target's.
    """

    def __init__(
        self, settings: DecodeSettings, rows: int, places: int, vocab_size: int, sampled: bool, device: torch.device
    ) -> None:
        self.settings, self.vocab_size, self.sampled = settings, vocab_size, sampled
        self.temperature_R = torch.zeros(rows, device=device)
        self.requests_R = torch.zeros(rows, dtype=torch.long, device=device)
        self.places_R = torch.zeros(rows, dtype=torch.long, device=device)
        self.uniforms_RT = torch.zeros(rows, places if sampled else 1, dtype=torch.float64, device=device)
        penalised = settings.repetition_penalty != 1.0
        self.seen_RV = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device) if penalised else None
        self.last_R = torch.zeros(rows, dtype=torch.long, device=device)
        self.active = 0
        self._samples = [False] * rows

    def open(self, row: int, request: Request) -> None:
        """Start a request in a row."""
        self.active = max(self.active, row + 1)
        self.temperature_R[row], self.requests_R[row], self.places_R[row] = request.temperature, request.index, 0
        self._samples[row] = request.temperature > 0
        if self._samples[row]:
            stream = uniform_stream(self.settings.seed, request.index, self.uniforms_RT.shape[1])
            self.uniforms_RT[row] = torch.from_numpy(stream)
        if self.seen_RV is not None:
            self.seen_RV[row] = False
            self.seen_RV[row, list(request.tokens)] = True
            self.last_R[row] = request.tokens[-1]

    def keep(self, order: list[int], order_R: Tensor) -> None:
        """Row r is the former row order[r]; the others leave."""
        self.active = len(order)
        self._samples = [self._samples[row] for row in order]
        for name in ("temperature_R", "requests_R", "places_R", "uniforms_RT", "seen_RV", "last_R"):
            if (held := getattr(self, name)) is not None:
                setattr(self, name, held[order_R])

    @property
    def draws(self) -> Draws | None:
        """Random numbers for drafting the next trees of the active rows; None when every request is greedy."""
        if not self.sampled:
            return None
        active = slice(0, self.active)
        return Draws(
            seed=self.settings.seed,
            requests_B=self.requests_R[active],
            places_B=self.places_R[active],
            temperature_B=self.temperature_R[active],
        )

    def first_tokens(self, rows: list[int], rows_B: Tensor, logits_BMV: Tensor) -> tuple[Tensor, Tensor]:
        """(first token of each answer, fault of each row) after a piece of the prompts; M is 1."""
        if self.seen_RV is not None:
            seen_BV, last_BMN = self.seen_RV[rows_B], self.last_R[rows_B, None, None]
            logits_BMV = penalise(widened(logits_BMV), self.settings.repetition_penalty, seen_BV, last_BMN)
        chosen_BM = choose(logits_BMV, self.uniforms_RT[rows_B, :1], self._sampling(rows, rows_B))
        self.places_R[rows_B] = 1
        return chosen_BM[:, 0], torch.where(unreadable(logits_BMV)[:, 0], LOGITS, 0)

    def verify(self, tree: TokenTree, logits_BNV: Tensor, faults_B: Tensor) -> tuple[Accepted, Tensor]:
        """(the accepted paths, the fault of each row) of a pass of all active rows."""
        unreadable_BN = unreadable(logits_BNV)
        if self.seen_RV is not None:
            logits_BNV = self._penalised(tree, logits_BNV)
        rule = self.settings.lossy or exact_rule(tree)
        active = list(range(self.active))
        sampling = self._sampling(active, torch.arange(self.active, device=logits_BNV.device))
        accepted = rule.accept(tree, logits_BNV, sampling, self._chances(tree))
        self.places_R[: self.active] += accepted.counts_B
        if self.seen_RV is not None:
            self.seen_RV[: self.active].scatter_(1, _path_tokens(tree, accepted), True)
        accepted, lost_B = cut(accepted, unreadable_BN)
        return accepted, torch.where(lost_B & (faults_B == 0), LOGITS, faults_B)

    def _sampling(self, rows: list[int], rows_B: Tensor) -> Sampling:
        return Sampling(
            temperature_B=self.temperature_R[rows_B],
            top_k=self.settings.top_k,
            top_p=self.settings.top_p,
            min_p=self.settings.min_p,
            sampling_rows=tuple(place for place, row in enumerate(rows) if self._samples[row]),
        )

    def _chances(self, tree: TokenTree) -> Chances:
        if (draws := self.draws) is None:
            nothing_BN = torch.zeros_like(tree.tokens_BN, dtype=torch.float64)
            return Chances(choices_BN=nothing_BN, tests_BN=nothing_BN)
        # The places beyond an answer's limit are padding: their tokens are cut off.
        places_BN = (draws.places_B[:, None] + tree.depths_BN).clamp(max=self.uniforms_RT.shape[1] - 1)
        choices_BN = self.uniforms_RT[: self.active].gather(1, places_BN)
        tests_BN = choices_BN if tree.drawn is None else draws.tests(tree.size)
        return Chances(choices_BN=choices_BN, tests_BN=tests_BN)

    def _penalised(self, tree: TokenTree, logits_BNV: Tensor) -> Tensor:
        assert self.seen_RV is not None
        paths_BNN = torch.where(tree.ancestors_BNN, tree.tokens_BN[:, None, :], tree.tokens_BN[:, :1, None])
        seen_BV = self.seen_RV[: self.active]
        return penalise(widened(logits_BNV), self.settings.repetition_penalty, seen_BV, paths_BNN)


def _path_tokens(tree: TokenTree, accepted: Accepted) -> Tensor:
    """Tokens of the accepted paths; columns beyond a path repeat its root, [B, K]."""
    width = accepted.path_BK.shape[1]
    real_BK = torch.arange(width, device=accepted.path_BK.device) < accepted.counts_B[:, None]
    return torch.where(real_BK, tree.tokens_BN.gather(1, accepted.path_BK), tree.tokens_BN[:, :1])
