"""The two ways a command can end badly, and the exit status each one stands for."""


class UserError(Exception):
    """Bad input: one line that names the key or file, the value, and the remedy. Exit status 2, nothing written."""


class RunFailed(Exception):
    """The work itself could not go on (a diverging critic, a spent attempt budget). Exit status 1, state saved."""
