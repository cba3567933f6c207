"""The program that runs a command on one node of a run over ssh; nothing of ours need be installed there for it.

It reads its standard input: an order as a line of JSON, then a line for each signal to pass on, `end`, or an empty one as a sign of
life. When the input closes or falls silent, because the launcher was killed, its machine was lost or the network was, it ends the
command.
"""

from __future__ import annotations

from toolkit.launch.signals import SAME_PRESS_SECONDS

SILENCE_SECONDS = 60.0  # of the launcher, after which a node ends its command
GRACE_SECONDS = 10.0  # from an order to end until the program kills what is left

NODE_PROGRAM = f"""
import json, os, select, signal, subprocess, sys, time
text = b""
def read(seconds):
    global text
    if not select.select([0], [], [], seconds)[0]:
        return True
    got = os.read(0, 65536)
    text += got
    return bool(got)
while b"\\n" not in text:
    if not read(60):
        sys.exit(1)
order, _, text = text.partition(b"\\n")
order = json.loads(order)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
def own_session():
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
try:
    os.chdir(order["folder"])
    child = subprocess.Popen(order["argv"], env={{**os.environ, **order["environment"]}}, stdin=subprocess.DEVNULL, preexec_fn=own_session)
except OSError as error:
    print("cannot start", order["argv"][0], "in", order["folder"] + ":", error, file=sys.stderr)
    sys.exit(127)
heard, kill_at = time.monotonic(), None
def end():
    global kill_at
    if kill_at is None:
        kill_at = time.monotonic() + {GRACE_SECONDS}
        child.send_signal(signal.SIGTERM)
        time.sleep({SAME_PRESS_SECONDS} + 0.2)
        child.send_signal(signal.SIGTERM)
is_open = True
while child.poll() is None:
    if is_open:
        is_open = read(0.1)
        if not is_open:
            end()
    else:
        time.sleep(0.1)
    while b"\\n" in text:
        word, _, text = text.partition(b"\\n")
        heard = time.monotonic()
        if word == b"end":
            end()
        elif word:
            child.send_signal(int(word))
    if time.monotonic() - heard > {SILENCE_SECONDS}:
        end()
    if kill_at is not None and time.monotonic() > kill_at:
        os.killpg(child.pid, signal.SIGKILL)
try:
    os.killpg(child.pid, signal.SIGKILL)
except OSError:
    pass
sys.stdout.flush()
code = child.wait()
os._exit(code if code >= 0 else 128 - code)
"""
