"""Subscribers that never read, while others publish as fast as they can."""

from __future__ import annotations

import gevent
import pytest

from tests.hostile.conftest import Besieged
from tests.hostile.floods import flood
from tests.hostile.strangers import Stranger
from tests.support.device import RAW, WS

SUBSCRIBERS, PUBLISHERS = 200, 10


@pytest.mark.parametrize("payload_bytes", [10, 4000])
@pytest.mark.parametrize("kind", [RAW, WS])
def test_subscribers_that_do_not_read(besieged: Besieged, kind: str, payload_bytes: int) -> None:
    subscribers = [Stranger(besieged, b"deaf-%d" % number, kind) for number in range(SUBSCRIBERS)]
    for device in subscribers:
        device.subscribe(b"flood")
    publishers = [Stranger(besieged, b"loud-%d" % number) for number in range(PUBLISHERS)]
    tid = [device.create(b"flood") for device in publishers][0]
    case = f"SMQ: {PUBLISHERS} flood {SUBSCRIBERS} {kind} subscribers that do not read, {payload_bytes} bytes each"
    with besieged.attack(case, grows_bytes=400 << 20) as attack:
        floods = [gevent.spawn(flood, device, tid, payload_bytes, attack) for device in publishers]
        gevent.joinall(floods, raise_error=True)
        for device in subscribers + publishers:
            device.close()
