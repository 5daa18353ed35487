"""Remote calls over SMQ, the Python way: the same as the application `rpc`, which is written in Lua.

A caller sends {id, name, arguments} as JSON to the server's ETID, which is 1, and gets {id, value} or {id, error} back
at its own ETID.
"""

import time

import gevent

from smqrt import hub

smq = hub.create()


def add(a, b):
    """add(a, b): the sum of two numbers"""
    return a + b


def reverse(text):
    """reverse(text): the text read from its end"""
    return text[::-1]


def clock():
    """clock(): date and time of the server"""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def slow(ms):
    """slow(ms): waits so long, while other calls go on"""
    gevent.sleep(ms / 1000)
    return f"waited {ms} ms"


def list_all():
    """list(): what can be called"""
    return [{"name": name, "example": EXAMPLES[name], "help": FUNCTIONS[name].__doc__} for name in sorted(FUNCTIONS)]


FUNCTIONS = {"add": add, "reverse": reverse, "clock": clock, "slow": slow, "list": list_all}
EXAMPLES = {"add": "2, 40", "reverse": '"stressed"', "clock": "", "slow": "1500", "list": ""}


def answer(call, ptid):
    reply = {"id": call.get("id")}
    function = FUNCTIONS.get(call.get("name"))
    if function is None:
        reply["error"] = f"there is no function {call.get('name')}"
    else:
        try:
            reply["value"] = function(*call.get("arguments", []))
        except Exception as error:
            reply["error"] = str(error)
    smq.publish(reply, ptid)


def on_call(call, ptid, tid, subtid):
    gevent.spawn(answer, call, ptid)  # a greenlet for each: one that takes its time does not hold up the next


smq.subscribe("self", onmsg=on_call, json=True)


def connect(request, relpath):
    """Browsers and devices come to /python/smq; everything else is for the files of this folder."""
    if relpath != "smq" or not hub.isSMQ(request):
        return False
    smq.connect(request)
    return True


dir.setfunc(connect)
