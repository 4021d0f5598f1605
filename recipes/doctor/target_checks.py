"""Checks of the training rows by passes of the target: whether they are its own answers, and the stored states its own.

Shapes: N tokens of an answer, C of a chunk of it, V vocabulary, D hidden size."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.state_engines import BOUNDS, gap
from ...data.store.feature_shards import FINAL, FeatureShard, read_features, tap
from ...data.store.feature_store import read_rows
from ...data.store.token_store import SOURCES, learned_tokens
from ...modules import Target, TargetIdentity, UserError
from .case import Case, DataSample, Finding, group, judged, spread, unchecked

ROWS, STATE_ROWS = 64, 32  # Rows whose answers, and whose stored states, are compared with the target's
CHUNK = 128  # Places whose distributions are formed at once
LEAST_ARGMAX = 0.9  # Least share of a greedy answer's tokens that are the target's argmax; another model has two thirds
MOST_SURPRISE = 5.0  # Of a sampled answer at its own temperature, in standard deviations of what the target draws
ROUNDED_STATES = 0.06  # Largest difference by a number format of eight bits, as a share of a state's length (fp8: 0.02)


@dataclass(frozen=True)
class Agreement:
    """One row of answers against the target's distribution."""

    kl: float
    """Mean KL, in nats: of the answer's tokens as point masses for a greedy one; for a sampled one the mean surprise
    -log p above the entropy of p, which estimates it."""
    argmax: float  # Share of the tokens that are the target's argmax
    off: bool  # Whether the target would not write it so


def _identity(case: Case, data: DataSample) -> Finding:
    """The target that the data name; a quantised form of a model writes other answers."""
    written, here, name = data.manifest.target, case.target.identity, "target of the data"
    given = int((data.shard.sources_R == SOURCES.index("text")).sum())
    # Who wrote answers of a file, no record says: whether they could be the target's is for `_policy`.
    if given == data.shard.num_rows and written.weights_hash == here.weights_hash:
        return unchecked(name, "all answers come from prompts.path, see on-policy")
    others = f"; {given} of {data.shard.num_rows} rows come from prompts.path" if given else ""
    return judged(name, f"{in_words(written)}; here {in_words(here)}{others}",
                  "the other rows are its answers" if given else "the data are its answers",
                  (written.weights_hash != here.weights_hash, "the data are answers of another target",
                   "distil with target.name, revision, adapter and quantization as they are served"))


def _policy(case: Case, data: DataSample) -> Finding:
    """Distance of the rows from what the target would write."""
    chosen = spread(range(len(data.names)), ROWS)
    names = [data.names[row] for row in chosen]
    states = read_rows(case.target, data.shard, chosen, [FINAL], case.target.dtype)
    labels_T, found = learned_tokens(data.shard), dict[int, Agreement]()
    for place, row in enumerate(chosen):
        start, stop = data.shard.span(row)
        # Repetitions are easy for any model, and hide an answer of another one.
        places_N = labels_T[start:stop].nonzero()[:, 0]
        places_N = places_N[places_N > 0]
        if len(places_N):
            tokens_N = data.shard.tokens_T[start:stop][places_N].long()
            found[place] = agreement(case.target, states[row][FINAL][places_N - 1], tokens_N,
                                     float(data.shard.temperatures_R[row]))
    if not found:
        return unchecked("on-policy", "no row has a label after another token")
    off = [place for place, one in found.items() if one.off]
    words = group(names, off)

    def means(of: list[Agreement]) -> str:
        return (f"mean KL {sum(one.kl for one in of) / len(of):.2f} nats, "
                f"{sum(one.argmax for one in of) / len(of):.0%} of the tokens are the target's argmax")

    own = [one for one in found.values() if not one.off]
    figure = means([*found.values()])
    if words and own:
        figure += f"; in that group: {means([found[place] for place in off])}; in the others: {means(own)}"
    greedy = all(float(data.shard.temperatures_R[chosen[place]]) == 0 for place in off)
    return judged("on-policy", figure, "the rows are what the target writes", (
        words, f"{words} are not what the target writes at their temperature" + (
            ", which is greedy: they were drawn, or are another model's" if greedy else ""),
        "let the target answer (distill.answered_by: target) at the distill.temperatures that are marked, with the "
        "target that is served"))


@torch.no_grad()
def agreement(target: Target, final_ND: Tensor, tokens_N: Tensor, temperature: float) -> Agreement:
    """Compare the tokens of an answer with the target's distributions at them, made from its final states before each;
    at temperature 0 it was greedy."""
    surprise = variance = hits = 0.0
    for states_CD, tokens_C in zip(torch.split(final_ND, CHUNK), torch.split(tokens_N, CHUNK), strict=True):
        logits_CV = target.logits(states_CD.to(target.device, target.dtype)).double().cpu()
        for token, value in target.biases.added:
            logits_CV[:, token] += value
        hits += float((logits_CV.argmax(-1) == tokens_C).sum())
        log_p_CV = (logits_CV / (temperature or 1.0)).log_softmax(-1)
        own_C = log_p_CV.gather(1, tokens_C[:, None])[:, 0]
        if temperature:
            p_CV, log_p_CV = log_p_CV.exp(), log_p_CV.clamp(min=-1e4)
            mean_C = (p_CV * log_p_CV).sum(-1)
            surprise += float((mean_C - own_C).sum())
            variance += float(((p_CV * log_p_CV**2).sum(-1) - mean_C**2).clamp(min=0).sum())
        else:
            surprise -= float(own_C.sum())
    count = len(tokens_N)
    off = surprise > MOST_SURPRISE * math.sqrt(variance) + 1e-6 * count if temperature else hits < LEAST_ARGMAX * count
    return Agreement(kl=surprise / count, argmax=hits / count, off=off)


def _states(case: Case, data: DataSample) -> Finding:
    """The stored states of some rows against the target's own, row by row, and what wrong ones are."""
    target, name = case.target, "stored states"
    try:
        listed = read_features(data.folder)
    except UserError as error:
        return unchecked(name, error)
    if not listed or not case.artifact.drafter.reads_states:
        return unchecked(name, "none are stored" if not listed else "the draft reads none")
    taps = case.artifact.drafter.taps
    near = {layer + step for layer in taps for step in (-1, 0, 1)} & set(range(target.num_layers))
    wanted, chosen = (FINAL, *map(tap, sorted({*taps}))), spread(range(len(data.names)), STATE_ROWS)
    own = read_rows(target, data.shard, chosen, (FINAL, *map(tap, sorted(near))), target.dtype)
    opened, gaps, kinds = dict[str, FeatureShard](), dict[int, float](), dict[int, str]()
    # Train answers may be written, with their states, in another number format than the target's.
    written = getattr(torch, str(data.manifest.recipe.get("distill", {}).get("train_dtype")), target.dtype)
    bound = ROUNDED_STATES if listed.dtype in ("int8", "fp8") else max(
        BOUNDS.get(dtype, ROUNDED_STATES) for dtype in (getattr(torch, listed.dtype), target.dtype, written))
    for place, row in enumerate(chosen):
        record, _, first = data.places[row]
        start, stop = data.shard.span(row)
        try:
            if record.file not in opened:
                opened[record.file] = FeatureShard(data.folder, record, taps)
            final, tapped = opened[record.file].slices(first, first + stop - start)
        except UserError as error:
            return unchecked(name, error)
        stored = {FINAL: final.states(), **{tap(layer): states.states() for layer, states in tapped.items()}}
        for kind in wanted:
            found = gap(stored[kind], own[row][kind])
            gaps[place] = max(gaps.get(place, 0.0), found)
            if found > bound and place not in kinds:
                kinds[place] = _origin(stored[kind], kind, own[row])
    names = [data.names[row] for row in chosen]
    words = group(names, kinds)
    what = ", ".join(dict.fromkeys(kinds.values()))
    return judged(name, f"they differ from the target's by {max(gaps.values()):.2g} of their length at most, and "
                  f"rounding explains {bound:g}", "the target gives them",
                  (words, f"{words} have {what}", "delete features.json of the data and run draftsmith distill again, "
                   "with target.name, drafter.taps and distill.states_from as they are to be"))


def in_words(identity: TargetIdentity) -> str:
    """Name of a target, with the format of its weights where they are quantised."""
    form = f" in {identity.quantization}" if identity.quantization else ""
    return f"{identity.name}{form}{' with an adapter' if identity.adapter else ''}"


def _origin(stored_ND: Tensor, name: str, own: dict[str, Tensor]) -> str:
    """Origin of wrong states: another layer, other positions, or another target."""
    gaps = {other: gap(stored_ND, states_ND) for other, states_ND in own.items() if other != name}
    # A draft that taps nothing has no other states to compare with.
    nearest = min(gaps, key=lambda other: gaps[other], default=None)
    whole = gap(stored_ND, own[name])
    if nearest is not None and gaps[nearest] < whole / 2:
        return f"the states {nearest} in place of {name}"
    # The first token sees itself alone, wherever it stands: only rotations of later ones can differ.
    first = gap(stored_ND[:1], own[name][:1])
    return (f"states {name} that differ from the second token on, as with another rotary base or other positions"
            if first < whole / 10 else f"states {name} of another target")


TARGET_CHECKS = (_identity, _policy, _states)
