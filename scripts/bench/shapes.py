"""The shapes of the comparison and their bars: at most how much of a peer's CPU a message may cost us."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Shape:
    """One traffic shape.

    Attributes:
        key: the word for `--only`.
        options: the options of smqload.
        bars: by broker, how many times our CPU per message the peer's must be.
        websocket: also SMQ over WebSocket, and only ours speaks it.
        has_floor: whether the relay, which reads nothing, can carry it.
    """

    key: str
    title: str
    options: str
    bars: dict[str, float] = field(default_factory=dict)
    websocket: bool = False
    has_floor: bool = True

    @property
    def is_idle(self) -> bool:
        return "--mode idle" in self.options


def _bars(mosquitto: float, nats: float, redis: float, floor: float = 0.0) -> dict[str, float]:
    peers = {"mosquitto": mosquitto, "nats": nats, "redis": redis}
    return {**peers, "floor": floor} if floor else peers


_PAIRS = "--pubs 100 --topics 100 --subs 100"

SHAPES = [
    Shape("bulk", "1 to 1, 16 B, bulk", "--batch 64", _bars(40, 4, 4, 0.8)),
    Shape("single", "1 to 1, 16 B, one write per message", "--batch 1", _bars(6, 8, 1, 0.8)),
    Shape("1k", "1 to 1, 1 KB", "--size 1024 --batch 64", _bars(14, 4, 2.8, 0.65)),
    Shape("60k", "1 to 1, 60 KB", "--size 60000 --batch 4 --window 16", _bars(2, 7, 1.6, 0.8)),
    Shape("fan100", "1 to 100, 16 B", "--subs 100 --batch 1 --window 100", _bars(18, 2.5, 1.4, 0.7)),
    Shape("fan1000", "1 to 1000, 128 B", "--subs 1000 --size 128 --batch 1 --window 100", _bars(18, 2.5, 1.4, 0.7)),
    Shape("pairs", "100 pairs, one write per message", f"{_PAIRS} --batch 1 --window 1", _bars(1.8, 3, 1, 0.8)),
    Shape("pairs-batched", "100 pairs, batched", f"{_PAIRS} --batch 8 --window 64", _bars(18, 2.5, 2, 0.7)),
    Shape("ping", "ping by ETID", "--mode ping", _bars(1.2, 2.2, 1.3, 0.65)),
    Shape("open", "20k msg/s open loop", "--rate 20000 --batch 1 --window 0", _bars(1, 1.4, 1, 0.7)),
    Shape(
        "mixed",
        "16 rotating topics, mixed sizes",
        "--topics 16 --subs 16 --rotate 16 --vary --size 256",
        _bars(7, 2.5, 3),
        has_floor=False,
    ),
    Shape("websocket", "WebSocket 1 to 1, 128 B", "--size 128", websocket=True),
    Shape(
        "idle",
        "10,000 idle subscribed clients",
        "--mode idle --conns 10000 --subscribe --hold 1",
        {"nats": 5, "redis": 3},
        has_floor=False,
    ),
]
IDLE_BYTES_BAR = 3072
CONNECTS_BAR = 10_000
