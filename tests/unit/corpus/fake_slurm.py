"""Stands for sbatch, squeue, scancel and scontrol: elements are processes of this machine, faults come from a file.

`FAKE_SLURM` is a folder: `faults.json` names what goes wrong, `jobs/N/ELEMENT.pid` the processes, `calls` the calls.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["FAKE_SLURM"])


def alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def fault(name: str) -> bool:
    """Whether this fault is still to happen; it is used up."""
    path = STATE / "faults.json"
    faults = json.loads(path.read_text())
    left = faults.get(name, 0)
    if left:
        faults[name] = left - 1
        path.write_text(json.dumps(faults))
    return bool(left)


def start(folder: Path, element: str) -> None:
    words = dict(word[2:].partition("=")[::2] for word in json.loads((folder / "options.json").read_text()))
    number = folder.name
    out = words["output"].replace("%A", number).replace("%a", element)
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": element, "SLURM_JOB_ID": number}
    with open(out, "a") as log:
        process = subprocess.Popen(
            ["/bin/sh", str(folder / "script")], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            cwd=words["chdir"], start_new_session=True,
        )  # fmt: skip
    (folder / f"{element}.pid").write_text(str(process.pid))


def sbatch(words: list[str]) -> int:
    if fault("sbatch_fails"):
        print("sbatch: error: Unable to contact slurm controller (connect failure)", file=sys.stderr)
        return 1
    assert {"--parsable", "--requeue"} <= set(words), words
    number = str(100 + len(list((STATE / "jobs").iterdir())))
    folder = STATE / "jobs" / number
    folder.mkdir()
    (folder / "script").write_text(sys.stdin.read())
    (folder / "options.json").write_text(json.dumps(words))
    last = next(int(word.rpartition("-")[2]) for word in words if word.startswith("--array="))
    if fault("forgotten"):  # the controller dies before it has written the job down
        (folder / "forgotten").touch()
    else:
        for element in map(str, range(last + 1)):
            if fault("held"):
                (folder / f"{element}.held").touch()
            else:
                start(folder, element)
    print(number)
    return 0


def squeue(words: list[str]) -> int:
    if fault("squeue_fails"):
        print("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", file=sys.stderr)
        return 1
    numbers = next(word.partition("=")[2].split(",") for word in words if word.startswith("--jobs="))
    rows = []
    for folder in (STATE / "jobs" / number for number in numbers):
        rows += [f"{folder.name}_{path.stem}|PENDING|JobHeldUser" for path in folder.glob("*.held")]
        for path in folder.glob("*.pid"):
            if alive(int(path.read_text())):
                rows.append(f"{folder.name}_{path.stem}|RUNNING|None")
            elif (folder / f"{path.stem}.requeue").exists():
                (folder / f"{path.stem}.requeue").unlink()
                start(folder, path.stem)
                rows.append(f"{folder.name}_{path.stem}|RUNNING|None")
    if fault("queue_forgets"):  # elements run on, the queue knows nothing of them
        rows = []
    if not rows:
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    print("\n".join(rows))
    return 0


def scancel(words: list[str]) -> int:
    for folder in (STATE / "jobs" / number for number in words):
        for path in [*folder.glob("*.held"), *folder.glob("*.requeue")]:
            path.unlink()
        for path in folder.glob("*.pid"):
            if alive(pid := int(path.read_text())):
                os.killpg(pid, signal.SIGTERM)
    return 0


def scontrol(words: list[str]) -> int:
    match = re.fullmatch(r"(\d+)_(\d+)", words[1])
    assert words[0] == "release" and match, words
    folder = STATE / "jobs" / match[1]
    (folder / f"{match[2]}.held").unlink()
    start(folder, match[2])
    return 0


if __name__ == "__main__":
    with open(STATE / "calls", "a") as calls:
        calls.write(sys.argv[1] + "\n")
    sys.exit({"sbatch": sbatch, "squeue": squeue, "scancel": scancel, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
