"""The memory for bodies of requests."""

from __future__ import annotations

import pytest

from smqrt.http.body import BodyMemory
from smqrt.http.headers import HttpError


def test_bodies_share_one_limit() -> None:
    memory = BodyMemory(100)
    memory.take(60)
    memory.take(40)
    with pytest.raises(HttpError) as refused:
        memory.take(1)
    assert (refused.value.status, refused.value.headers, refused.value.close) == (503, {"Retry-After": "1"}, True)
    assert memory.held_bytes == 100
    memory.give_back(60)
    memory.take(1)
    assert memory.held_bytes == 41
