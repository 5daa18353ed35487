from tests.workers.served import app

__all__ = ["app"]
