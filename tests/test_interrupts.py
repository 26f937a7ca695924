"""Ctrl-C, wherever it comes."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOST = """
import gc, os, signal, time
{listen}
def callback(phase, info):
    if phase == "start":
        os.kill(os.getpid(), signal.SIGINT)
        gc.callbacks.clear()
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
try:
    {place}
    time.sleep(0.5)
    print("lost")
except KeyboardInterrupt:
    print("heard")
"""


@pytest.mark.parametrize("place", ["gc.callbacks.append(callback); gc.collect()", "Finalized()"])
@pytest.mark.parametrize(
    ("listen", "told"),
    [("", "lost"), ("from iclens.interrupts import listen; listen()", "heard")],
    ids=["alone", "listening"],
)
def test_an_interrupt_in_a_place_that_swallows_it(place, listen, told) -> None:
    """Python alone loses it: the oracle of why `listen` is there."""
    script = LOST.format(place=place, listen=listen)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout.split() == [told], ran.stderr


@pytest.mark.parametrize("threads", [0, 3])
def test_an_interrupt_waits_for_what_must_not_be_interrupted(threads) -> None:
    """Also where other threads, which do not block it, get it."""
    script = f"""
import os, signal, threading, time
from iclens.interrupts import held_back, listen
listen()
for _ in range({threads}):
    threading.Thread(target=time.sleep, args=(0.5,)).start()
try:
    with held_back():
        os.kill(os.getpid(), signal.SIGINT)
        print("whole")
    print("not heard")
except KeyboardInterrupt:
    print("heard")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout.split() == ["whole", "heard"], ran.stderr
