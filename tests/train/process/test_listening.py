"""A process that turns out to have nothing to save ends by signals as any other does."""

import signal
import subprocess
import sys

from failures import each

CODE = """
import os, signal, sys, time
from matmix.train.process import stop
stop.listen()
when, number = sys.argv[1], int(sys.argv[2])
if when == "before":
    os.kill(os.getpid(), number)
    while not stop.received():
        time.sleep(0.01)
stop.listen_no_more()
if when == "after":
    os.kill(os.getpid(), number)
time.sleep(30)
"""


@each("when", ["before", "after"])
@each("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it(when, number):
    run = subprocess.run([sys.executable, "-P", "-c", CODE, when, str(int(number))], capture_output=True, timeout=25)
    assert run.returncode == -number
