"""A lamp on a real device. Replace the print call by the GPIO calls of the board."""

import sys

import gevent

from smqrt.client import SmqClient

leds = {"red": False, "green": False, "blue": False}
lamp = {"name": "Lamp on a device", "leds": leds}
smq = SmqClient(sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:9357/led/smq.lsp")


def serve(colour):
    def switch(data, ptid, tid, subtid):
        leds[colour] = data == b"1"
        print(colour, "on" if data == b"1" else "off", flush=True)
        smq.publish(lamp, "lamp/state")

    smq.subscribe("self", colour, onmsg=switch)


for colour in leds:
    serve(colour)
smq.subscribe("lamp/ask", onmsg=lambda data, ptid, *_: smq.publish(lamp, ptid))
smq.onconnect = smq.onreconnect = lambda *_: smq.publish(lamp, "lamp/state")
gevent.wait()
