"""Plays a launcher of its own, as Ray Train is one: starts the ranks of fake_training.py, all again when one is lost.

    fake_launcher.py RANKS [arguments of fake_training.py …]

Ranks learn who they are after they have begun, so that nobody can tell it from outside.
"""

import subprocess
import sys
from pathlib import Path

BEGIN = "import os, runpy, sys; os.environ.update(RANK=sys.argv[1], WORLD_SIZE=sys.argv[2]); del sys.argv[1:3]; "
RUN = "sys.argv[0] = sys.argv.pop(1); runpy.run_path(sys.argv[0], run_name='__main__')"
TRAINING = str(Path(__file__).with_name("fake_training.py"))

count = int(sys.argv[1])
while True:
    command = [sys.executable, "-c", BEGIN + RUN]
    ranks = [subprocess.Popen([*command, str(rank), str(count), TRAINING, *sys.argv[2:]]) for rank in range(count)]
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        for rank in ranks:
            try:
                rank.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
    if not any(rank.poll() for rank in ranks):
        break
    for rank in ranks:
        rank.kill()
        rank.wait()
