"""Remote calls over SMQ, the Python way: the same as the application `rpc`, which is written in Lua.

A caller sends {id, name, arguments} as JSON to the server's ETID, which is 1, and gets {id, value} or {id, error} back
at its own ETID.
"""

import time

import gevent
from gevent.pool import Pool

from smqrt import hub

MOST_CALLS = 100  # at once: each costs memory, and strangers can ask
LONGEST_MS = 2000

smq = hub.create()
calls = Pool(MOST_CALLS)


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
    ms = min(ms, LONGEST_MS)
    gevent.sleep(ms / 1000)
    return f"waited {ms} ms"


def list_all():
    """list(): what can be called"""
    return [{"name": name, "example": EXAMPLES[name], "help": FUNCTIONS[name].__doc__} for name in sorted(FUNCTIONS)]


FUNCTIONS = {"add": add, "reverse": reverse, "clock": clock, "slow": slow, "list": list_all}
EXAMPLES = {"add": "2, 40", "reverse": '"stressed"', "clock": "", "slow": "1500", "list": ""}


def value_of(call):
    name = call.get("name")
    if not isinstance(name, str) or name not in FUNCTIONS:
        raise LookupError(f"there is no function {name}")
    return FUNCTIONS[name](*call.get("arguments", []))


def answer(call, ptid):
    try:
        smq.publish({"id": call.get("id"), "value": value_of(call)}, ptid)
    except Exception as error:  # strangers send whatever they like
        smq.publish({"id": call.get("id"), "error": str(error)}, ptid)


def on_call(call, ptid, tid, subtid):
    if not isinstance(call, dict):
        smq.publish({"error": "a call is an object"}, ptid)
    elif calls.full():
        smq.publish({"id": call.get("id"), "error": "too many calls at once"}, ptid)
    else:
        calls.spawn(answer, call, ptid)  # a greenlet for each: one that takes its time does not hold up the next


def onunload():
    calls.kill()


smq.subscribe("self", onmsg=on_call, json=True)


def connect(request, relpath):
    """Browsers and devices come to /python/smq; everything else is for the files of this folder."""
    if relpath != "smq" or not hub.isSMQ(request):
        return False
    smq.connect(request)
    return True


dir.setfunc(connect)
