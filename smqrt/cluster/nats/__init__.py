"""NATS core client for gevent.

from smqrt.nats import connect

nats = connect("nats://user:password@one.example,nats://two.example")
nats.subscribe("news.>", lambda subject, payload, reply, headers: print(subject, payload))
nats.publish("news.weather", b"rain")
nats.close()
"""

from smqrt.cluster.nats.client import NatsClient, NatsCounters, NatsState, OnMessage, OnState, connect
from smqrt.cluster.nats.options import NatsOptions

__all__ = ["NatsClient", "NatsCounters", "NatsOptions", "NatsState", "OnMessage", "OnState", "connect"]
