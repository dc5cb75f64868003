"""The exception of this package, and what checks a setting that has a few known values."""

from loaders.arguments import check_choice as check_choice
from loaders.arguments import did_you_mean as did_you_mean


class DataError(ValueError):
    """Data are missing or damaged: one sentence with the file or value, and what to do about it.

    It takes a single string, so that it can be pickled and raised again in another process.
    """
