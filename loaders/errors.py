"""The base class of errors whose sentence is enough for the user."""


class ExpectedError(Exception):
    """Says in one sentence what is wrong, with the value, and what to do: a program shows it without a traceback.

    Other packages derive their errors from it too, beside a built-in class: `class BadFile(ExpectedError, OSError)`.
    """
