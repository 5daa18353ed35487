"""Remote calls over SMQ in Python: the same as the application `rpc`, which is written in Lua.

A caller sends {id, name, arguments} as JSON to the server's ETID, which is 1. The server sends {id, value} or
{id, error} to the caller's ETID. A client without an SMQ connection posts {name, arguments} to `call` instead.
"""

from functions import value_of
from gevent.pool import Pool

from smqrt import hub
from smqrt.app import HttpError, dir

MAX_CALLS = 100  # at the same time: each uses memory, and any client can call

smq = hub.create()
calls = Pool(MAX_CALLS)


def answer(call, ptid):
    try:
        smq.publish({"id": call.get("id"), "value": value_of(call)}, ptid)
    except Exception as error:  # clients can send any arguments
        smq.publish({"id": call.get("id"), "error": str(error)}, ptid)


def on_call(call, ptid, tid, subtid):
    if not isinstance(call, dict):
        smq.publish({"error": "a call must be an object"}, ptid)
    elif calls.full():
        smq.publish({"id": call.get("id"), "error": "too many calls at once"}, ptid)
    else:
        calls.spawn(answer, call, ptid)  # in a separate greenlet, so that a slow call does not delay the next


def onunload():
    calls.kill()


smq.subscribe("self", onmsg=on_call, json=True)


def post(request):
    call = request.json()
    if not isinstance(call, dict):
        raise HttpError(400, "A call must be an object.")
    try:
        reply, status = {"value": value_of(call)}, 200
    except Exception as error:
        reply, status = {"error": str(error)}, 400
    request.response.json(reply, status)


def serve(request, relpath):
    """Browsers and devices connect at /python/smq, HTTP calls use /python/call; others are files of this folder."""
    if relpath == "smq" and hub.isSMQ(request):
        smq.connect(request)
    elif relpath == "call" and request.method == "POST":
        post(request)
    else:
        return False
    return True


dir.setfunc(serve)
