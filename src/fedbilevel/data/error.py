"""What is wrong with data."""


class DataError(ValueError):
    """The clients' data do not fit together."""
