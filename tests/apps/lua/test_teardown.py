"""Freeing a runtime: finalizers of Lua objects run when Python's half of them is being taken apart."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
import gevent
from smqrt.apps.lua import api
from smqrt.apps.lua.vm import Services
from smqrt.apps.lua.vm import Vm

def quiet_runtime():
    vm = Vm()
    api.install(vm, Services())
    vm.eval('''
    for i = 1, 50 do
      _G["timer" .. i] = ba.timer(function() return true end)
      _G["digest" .. i] = ba.crypto.hash("sha1")("x")
      _G["own" .. i] = setmetatable({}, {__gc = function() ba.rnd() trace("finalizer") ba.sleep(1) end})
    end
    ''')
    return vm

def busy_runtime():
    vm = quiet_runtime()
    vm.eval('''
    for i = 1, 50 do
      _G["timer" .. i]:set(1, i % 2 == 0)
      ba.thread.run(function() ba.sleep(100000) end)
    end
    ''')
    gevent.sleep(0.01)
    return vm

for _ in range(5):
    quiet_runtime()
    busy_runtime()
    gc.collect()
vm = busy_runtime()
keep = busy_runtime().namespace
print("ready")
"""


def test_runtimes_end_quietly_before_and_at_process_exit() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
    assert "Traceback" not in done.stderr
