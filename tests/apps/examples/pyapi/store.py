"""A module beside `.preload.py`."""

from models.item import NAME

from smqrt.app import app, dir

name = f"the store of {dir.name}, {NAME}"


def lazily():
    from smqrt.app import app as same  # a greenlet runs nobody's code, but this module is the application's

    return same is app


def count():
    return app.closed


def fail(values):
    try:
        return 1 / values[0]
    except ZeroDivisionError as error:
        raise LookupError("no such thing") from error
