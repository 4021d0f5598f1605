"""Slow plain twins of the rules of rejection, one node and one child at a time; and the law of a rule."""

import math
from itertools import permutations, product

import torch


def walk(tree, p_NV, log_q_NV, row, tests, choice, draw):
    """Tokens emitted by one row: accepted ones, then one from what is left of p."""
    node, emitted = 0, []
    while True:
        rest, log_left = p_NV[node].clone(), log_q_NV[node].clone()
        for child in range(1, tree.size):
            if int(tree.parents_BN[row, child]) != node or not tree.real_BN[row, child]:
                continue
            token = int(tree.tokens_BN[row, child])
            sampled = tree.drawn is not None and bool(tree.drawn.sampled_BN[row, child])
            q = log_left.softmax(-1) if sampled else torch.eye(len(rest), dtype=rest.dtype)[token]
            if float(tests[child]) < float(rest[token] / q[token]):
                node = child
                emitted.append(token)
                break
            rest = (rest - q).clamp(min=0)
            rest = rest / rest.sum()
            if sampled:
                log_left[token] = -torch.inf
        else:
            return [*emitted, int(draw(rest, choice[node]))]


def siblings(q, width, sampled):
    """([S, K] every list of children that can be drawn, [S] its probability)."""
    if not sampled:
        return q.topk(width).indices[None], torch.ones(1, dtype=q.dtype)
    lists = list(permutations(range(len(q)), width))
    chances = []
    for tokens in lists:
        chance, left = 1.0, 1.0
        for token in tokens:
            chance *= float(q[token]) / left if left > 1e-12 else 0.0
            left -= float(q[token])
        chances.append(chance)
    return torch.tensor(lists), torch.tensor(chances, dtype=q.dtype)


def level_law(reject_siblings, p, q, width, sampled):
    """([V] probability that a token is emitted as an accepted child, [V] as the bonus) at a node, by enumeration."""
    lists, chances = siblings(q, width, sampled)
    marks = torch.full_like(lists, sampled, dtype=torch.bool)
    log_q = q.log().expand(len(lists), -1)
    accept_BK, rest_BV = reject_siblings(p.expand(len(lists), -1), log_q, lists, torch.ones_like(marks), marks)
    accepted, reached = torch.zeros_like(p), chances
    for rank in range(width):
        accepted.index_add_(0, lists[:, rank], reached * accept_BK[:, rank])
        reached = reached * (1 - accept_BK[:, rank])
    return accepted, (reached[:, None] * rest_BV / rest_BV.sum(-1, keepdim=True)).sum(0)


def pair_law(reject_siblings, p_of, q_of, width, sampled):
    """[V, V] law of the first two tokens after a tree two levels deep; a row that stops early goes on with p."""
    accepted, bonus = level_law(reject_siblings, p_of(()), q_of(()), width, sampled)
    rows = []
    for token in range(len(accepted)):
        below = sum(level_law(reject_siblings, p_of((token,)), q_of((token,)), width, sampled))
        rows.append(accepted[token] * below + bonus[token] * p_of((token,)))
    return torch.stack(rows)


def block_chances(p_of, q_of, tokens, end, carry=True):
    """(chance that each prefix of a chain of `end` tokens is accepted by itself, what the next token is drawn from)."""
    carried, chances, rests = 1.0, [], []
    for place in range(end + 1):
        p, q = p_of(tokens[:place]), q_of(tokens[:place]) * (place < end)
        rest = ((carried if carry else 1.0) * p - q).clamp(min=0)
        missing = float(rest.sum()) + 1 - carried
        chances.append(carried if place == end else float(rest.sum()) / missing if missing > 0 else 1.0)
        rests.append(rest / rest.sum() if float(rest.sum()) > 0 else p)
        if place < end:
            carried = min(1.0, carried * float(p[tokens[place]] / q[tokens[place]]))
    return chances, rests


def block_walk(p_of, q_of, tokens, tests, choice, draw):
    """Tokens emitted after a chain of drafted tokens that is verified as a block."""
    chances, rests = block_chances(p_of, q_of, tokens, len(tokens))
    end = max([0, *(place for place in range(1, len(tokens) + 1) if float(tests[place]) < chances[place])])
    return [*tokens[:end], int(draw(rests[end], choice[end]))]


def block_law(p_of, q_of, length_of, most, size, **wrong):
    """([V] * (most + 1) law of the tokens after a block of sampled tokens, their mean number), by enumeration.

    A chain goes on after a path of fewer than `most` tokens where `length_of` says so; a row that stops early goes on
    with p."""
    law, mean = torch.zeros((size,) * (most + 1), dtype=torch.float64), 0.0
    for tokens in product(range(size), repeat=most):
        end = next((place for place in range(most) if not length_of(tokens[:place])), most)
        if any(tokens[end:]):
            continue  # The same chain as with zeros after its end
        chances, rests = block_chances(p_of, q_of, tokens, end, **wrong)
        missed = math.prod(float(q_of(tokens[:place])[tokens[place]]) for place in range(end))
        for place in range(end, -1, -1):
            reached = missed * (chances[place] if place else 1.0)
            missed -= reached
            mean += reached * (place + 1)
            for rest in product(range(size), repeat=most + 1 - place):
                path, chance = tokens[:place] + rest, float(rests[place][rest[0]])
                for later in range(place + 1, most + 1):
                    chance *= float(p_of(path[:later])[path[later]])
                law[path] += reached * chance
    return law, mean
