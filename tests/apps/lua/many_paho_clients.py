"""200 paho clients of a broker, all of which get what two others publish: `-m tests.apps.lua.many_paho_clients PORT`.

A process of its own: paho waits with select(), which takes descriptors below 1024 only, and the process of the tests
may have more open.
"""

from __future__ import annotations

import sys

from tests.apps.lua.paho_clients import PahoClient
from tests.support.waiting import wait_until

PEOPLE, EACH = 200, 30


def main(port: int) -> None:
    people = [PahoClient(port, 4 + number % 2) for number in range(PEOPLE)]
    for person in people:
        person.subscribe("news/#")
    writers = [PahoClient(port, 5), PahoClient(port, 4)]
    for number in range(EACH):
        for at, writer in enumerate(writers):
            writer.publish(f"news/{at}", f"{number}")
    wait_until(lambda: all(len(one.messages) >= 2 * EACH for one in people), f"{2 * EACH} messages for each", 60)
    for person in people:
        for at in (0, 1):
            assert [int(payload) for topic, payload in person.messages if topic == f"news/{at}"] == list(range(EACH))
    for one in people + writers:
        one.leave()
    print(f"{len(people)} clients got all of them in order")


if __name__ == "__main__":
    main(int(sys.argv[1]))
