"""The two ways a command can end badly, and the exit status each one stands for."""


class UserError(Exception):
    """Bad input: one line that names the key or file, the value, and the remedy. Exit status 2, nothing written."""


class RunFailed(Exception):
    """The work itself could not go on (a diverging critic, a spent attempt budget). Exit status 1, state saved."""


_SHORT = (
    "can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)  # fmt: skip
"""What libraries say when memory is short and the error is not of a kind of its own."""


def out_of_memory(error: BaseException | None) -> bool:
    """Whether a failed allocation is behind an error: in the middle of a capture, another one hides it."""
    while error is not None:
        named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if named or any(words in str(error) for words in _SHORT):
            return True
        error = error.__cause__ or error.__context__
    return False
