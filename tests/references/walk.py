"""The slow plain twin of `follow`: one node at a time."""


def walk(tokens: list[int], parents: list[int], real: list[bool], choices: list[int]) -> list[int]:
    """Tokens emitted by one row: the accepted ones, then the target's choice after the last."""
    node, emitted = 0, []
    while True:
        children = [
            child
            for child in range(1, len(tokens))
            if parents[child] == node and real[child] and tokens[child] == choices[node]
        ]
        if not children:
            return [*emitted, choices[node]]
        # Duplicate siblings hold the same token; the one whose line goes deepest is as good as any.
        tails = [walk_from(child, tokens, parents, real, choices) for child in children]
        return emitted + max(tails, key=len)


def walk_from(node: int, tokens: list[int], parents: list[int], real: list[bool], choices: list[int]) -> list[int]:
    """The same below a node that has been accepted."""
    children = [
        child
        for child in range(1, len(tokens))
        if parents[child] == node and real[child] and tokens[child] == choices[node]
    ]
    tails = [walk_from(child, tokens, parents, real, choices) for child in children] or [[choices[node]]]
    return [tokens[node], *max(tails, key=len)]
