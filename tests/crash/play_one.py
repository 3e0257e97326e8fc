"""Play one story under a recorder and print what it recorded: `play_one.py DIRECTORY`. For a test that traces it."""

import sys
from pathlib import Path

from crash import stories
from crash.recorder import Call
from crash.test_recorder import everything

recording = stories.play(everything, Path(sys.argv[1]), 2)
for event in recording.trace:
    if isinstance(event.what, Call):
        print(event.what.kind, event.what.path)
