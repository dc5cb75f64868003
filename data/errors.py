"""The one exception of this package."""


class DataError(ValueError):
    """Data that are missing or broken: one sentence with the file or value, and what to do about it.

    It takes a single string, so that it survives pickling and being raised again in another process.
    """
