"""Sign in as a device and print each change of the door: device.py URL USER PASSWORD."""

import hashlib
import sys

import gevent

from smqrt.client import SmqClient

url, user, password = sys.argv[1:]
smq = SmqClient(url, info=user, onauth=lambda seed, ip: hashlib.sha1(f"{password}{seed}".encode()).hexdigest())
smq.subscribe("door", datatype="json", onmsg=lambda door, *_: print("open" if door["open"] else "closed", flush=True))
gevent.wait()
if smq.end:
    sys.exit(str(smq.end))
