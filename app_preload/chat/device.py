"""A device in the chat, which replies with the time to messages that contain `time?`."""

import sys
import time

import gevent

from smqrt.client import SmqClient

smq = SmqClient(sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:9357/chat/smq.lsp")
smq.onconnect = smq.onreconnect = lambda *_: smq.publish("Clock", "hello")
smq.subscribe("hello", onmsg=lambda name, ptid, *_: ptid == smq.gettid() or smq.publish("Clock", ptid))
smq.subscribe("say", onmsg=lambda text, *_: b"time?" in text and smq.publish(time.strftime("It is %H:%M."), "say"))
gevent.wait()
