"""The one error a user can cause."""


class UserError(ValueError):
    """A mistake in what the user gave: the message names the value, the bound and the remedy.

    The command line prints it as one sentence and exits with code 2; from Python it is an ordinary `ValueError`.
    """
