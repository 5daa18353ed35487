"""Remote calls over SMQ, the Python way: the same as the application `rpc`, which is written in Lua.

A caller sends {id, name, arguments} as JSON to the server's ETID, which is 1, and gets {id, value} or {id, error} back
at its own ETID. Who has no connection posts {name, arguments} to `call` instead.
"""

from functions import value_of
from gevent.pool import Pool

from smqrt import hub
from smqrt.app import HttpError, dir

MOST_CALLS = 100  # at once: each costs memory, and strangers can ask

smq = hub.create()
calls = Pool(MOST_CALLS)


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


def post(request):
    call = request.json()
    if not isinstance(call, dict):
        raise HttpError(400, "A call is an object.")
    try:
        reply, status = {"value": value_of(call)}, 200
    except Exception as error:
        reply, status = {"error": str(error)}, 400
    request.response.json(reply, status)


def serve(request, relpath):
    """Browsers and devices come to /python/smq, calls by HTTP to /python/call; the rest are files of this folder."""
    if relpath == "smq" and hub.isSMQ(request):
        smq.connect(request)
    elif relpath == "call" and request.method == "POST":
        post(request)
    else:
        return False
    return True


dir.setfunc(serve)
