"""Named errors: a mistake of the user, and a tree whose parents are out of order."""


class UserError(ValueError):
    """A mistake in what the user gave: the message names the value, the bound and the remedy. The command line prints
    it as one sentence and exits with code 2; from Python it is an ordinary `ValueError`."""


class TreeError(ValueError):
    """A tree in which some node's parent does not come before it."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(f"row {rows[0]}: a node's parent must come before the node")
        self.rows = rows  # The rows whose trees are wrong, ascending
