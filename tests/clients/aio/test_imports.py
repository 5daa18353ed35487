"""Imports of asyncio programs: no gevent, and one sentence for those who take the other client."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, smqrt, smqrt.aio
from smqrt import aio
client = aio.SmqClient("https://example.com/smq.lsp")
import python_socks.async_.asyncio
print(sorted({"gevent", "greenlet", "lupa"} & set(sys.modules)))
import smqrt.client  # does not warn: no loop runs

async def main():
    del sys.modules["smqrt.client"]
    import smqrt.client

sys.modules["asyncio"].run(main())
"""


def test_imports():
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "[]\n"
    sentence = "RuntimeWarning: smqrt.client is for gevent; asyncio programs import smqrt.aio instead"
    assert done.stderr.count(sentence) == 1, done.stderr
