"""Slow plain twins of `draftsmith.trainers.objectives`: one row, one entry of the vocabulary at a time.

`p` are the target's probabilities over its whole vocabulary, `q` the draft's, `ids` the target id of each entry of q.
"""


def inside(p, ids):
    """p over the draft vocabulary, renormalised."""
    mass = sum(p[token] for token in ids)
    return [p[token] / mass for token in ids]


def kl(a, b):
    return sum(x * (x.log() - y.log()) for x, y in zip(a, b, strict=True))


def alpha(p, q, ids):
    """Chance that a token drawn from q is accepted: p is not renormalised."""
    return sum(min(p[token], q[entry]) for entry, token in enumerate(ids))


def loss(name, p, q, ids, label, beta=0.5, eta=3.0):
    """The loss of one row; `label` is an entry of the draft vocabulary."""
    own = inside(p, ids)
    middle = [beta * x + (1 - beta) * y for x, y in zip(own, q, strict=True)]
    share = (-eta * alpha(p, q, ids).detach()).exp()
    return {
        "hard": lambda: -q[label].log(),
        "argmax": lambda: -q[max(range(len(ids)), key=lambda entry: own[entry])].log(),
        "soft": lambda: -sum(x * y.log() for x, y in zip(own, q, strict=True)),
        "reverse_kl": lambda: kl(q, own),
        "jsd": lambda: beta * kl(own, middle) + (1 - beta) * kl(q, middle),
        "tvd": lambda: sum((x - y).abs() for x, y in zip(own, q, strict=True)) / 2,
        "hard_tvd": lambda: -0.1 * q[label].log() + 0.9 * sum((x - y).abs() for x, y in zip(own, q, strict=True)),
        "hard_soft": lambda: -0.1 * q[label].log() - sum(x * y.log() for x, y in zip(own, q, strict=True)),
        "lk_alpha": lambda: -alpha(p, q, ids).log(),
        "lk_hybrid": lambda: share * kl(own, q) + (1 - share) * (1 - alpha(p, q, ids)),
    }[name]()
