"""Makes .venv, the environment that every `make` target uses, and says what it is doing meanwhile.

Problem: a fresh machine needs one command; a machine that already has a torch (a cluster image, conda, another
virtual environment) must keep it, for a second one is gigabytes and may not fit the driver.
Idea: look at the pythons at hand; if one has torch >= 2.11, put its site-packages behind those of .venv with a .pth
file (this works for a plain interpreter and for a virtual environment alike) and hold pip to exactly that torch.

    python3 tools/setup_venv.py ".[dev,models]"            # PYTHON=/path/to/python chooses the interpreter

Runs on the standard library of any Python >= 3.8, so that an old one still gets a readable message.
"""

import itertools
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
MADE_FROM = VENV / "made_from.txt"
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)

PROBE = """
import importlib.metadata as md, importlib.util as iu, json, sys
names = {}
for d in md.distributions():
    if d.metadata and d.metadata["Name"]: names.setdefault(d.metadata["Name"], d.version)
print(json.dumps(dict(
    python=sys.version_info[:3], executable=sys.executable, prefix=sys.prefix, installed=names,
    can_make_venv=bool(iu.find_spec("ensurepip") and iu.find_spec("venv")),
    site=[p for p in sys.path if p.rstrip("/").endswith(("site-packages", "dist-packages"))])))
"""


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def probe(command):
    """What one interpreter is and has, or None if it does not run."""
    path = shutil.which(command)
    if path is None:
        return None
    done = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, cwd="/")
    if done.returncode != 0:
        return None
    found = json.loads(done.stdout)
    found["installed"] = {canonical(name): version for name, version in found["installed"].items()}
    return found


def dotted(version):
    return ".".join(map(str, version))


def new_enough(python):
    return tuple(python["python"]) >= OLDEST_PYTHON and python["can_make_venv"]


def has_torch(python):
    """Whether this interpreter's torch is new enough and really imports (a broken one is not worth keeping)."""
    version = re.match(r"(\d+)\.(\d+)", python["installed"].get("torch", ""))
    if version is None or tuple(map(int, version.groups())) < OLDEST_TORCH:
        return False
    return subprocess.run([python["executable"], "-c", "import torch"], capture_output=True, cwd="/").returncode == 0


def choose_python():
    """The first interpreter with a usable torch, else the first that is new enough."""
    asked = os.environ.get("PYTHON")
    earlier = [MADE_FROM.read_text().strip()] if MADE_FROM.exists() else []  # an update stays with its interpreter
    commands = [asked] if asked else [*earlier, "python3", "python", *(f"python3.{minor}" for minor in range(11, 16))]
    found = [python for python in map(probe, commands) if python is not None and python["prefix"] != str(VENV)]
    usable = [python for python in found if new_enough(python)]
    if not usable:
        seen = ", ".join(f"{p['executable']} ({dotted(p['python'])})" for p in found) or "none"
        sys.exit(
            f"colofunc needs Python >= 3.11 with the modules venv and ensurepip; found: {seen}.\n"
            "Try: apt-get install python3.11 python3.11-venv, or make PYTHON=/path/to/python3.11 ..."
        )
    return next(((python, True) for python in usable if has_torch(python)), (usable[0], False))


def write_constraints(python, reuse):
    """constraints.txt, less what the reused environment already has, plus its very torch."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    if reuse:
        have = python["installed"]
        lines = [line for line in lines if canonical(line.split("==")[0]) not in have]
        lines += [f"{name}=={have[name]}" for name in ("torch", "torchvision") if name in have]
    path = VENV / "constraints.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def fits(python):
    """Whether .venv works and has this interpreter's version: not left half-made, its interpreter not gone."""
    if not VENV_PYTHON.exists():
        return False
    code = "import pip, sys; print(*sys.version_info[:2])"
    done = subprocess.run([VENV_PYTHON, "-c", code], capture_output=True, text=True)
    return done.returncode == 0 and done.stdout.split() == [str(part) for part in python["python"][:2]]


def make_venv(python, reuse):
    if VENV.exists() and not fits(python):
        shutil.rmtree(VENV)
    if not VENV_PYTHON.exists():
        subprocess.run([python["executable"], "-m", "venv", str(VENV)], check=True)
    MADE_FROM.write_text(python["executable"] + "\n")
    purelib = subprocess.run(
        [VENV_PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    behind = Path(purelib) / "reused_environment.pth"
    if reuse:
        behind.write_text("\n".join(python["site"]) + "\n")
    elif behind.exists():
        behind.unlink()


def show(text, live):
    if live:
        width = shutil.get_terminal_size().columns - 1
        print("\r" + text[:width].ljust(width), end="", flush=True)
    else:
        print(text, flush=True)


def run_shown(command, log):
    """Run pip with its output in a log file and one line on the screen: seconds and what is being fetched."""
    live, start, doing, shown_at = sys.stdout.isatty(), time.time(), "starting pip", 0.0
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    lines = queue.Queue()
    output = itertools.chain(process.stdout, [None])
    threading.Thread(target=lambda: [lines.put(line) for line in output], daemon=True).start()
    with open(log, "w") as file:
        while True:
            try:
                line = lines.get(timeout=0.5)
                if line is None:
                    break
                file.write(line)
                file.flush()
                if re.match(r"\s*(Collecting|Downloading|Using cached|Processing|Building|Installing|Obtaining)", line):
                    doing = line.strip().split(": ")[0][:90].replace("Installing collected", "Unpacking all")
            except queue.Empty:
                pass
            if time.time() - shown_at > (0.2 if live else 15):
                shown_at = time.time()
                show(f"  [{shown_at - start:3.0f} s] {doing}", live)
    status = process.wait()
    show(f"  [{time.time() - start:3.0f} s] {'done' if status == 0 else 'pip failed'}", live)
    if live:
        print()
    return status


def main():
    wanted = sys.argv[1]
    python, reuse = choose_python()
    print(f"colofunc: setting up .venv with Python {dotted(python['python'])}", end=", ")
    if reuse:
        print(f"keeping torch {python['installed']['torch']} of {python['executable']}", flush=True)
    elif MADE_FROM.exists():
        print("bringing it up to date", flush=True)
    else:
        print("downloading torch (once: some minutes, about 6 GB on disk)", flush=True)
    make_venv(python, reuse)
    log = VENV / "install.log"
    pip = [VENV_PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    status = run_shown([*pip, "-e", wanted, "-c", str(write_constraints(python, reuse))], log)
    if status != 0:
        print("\n".join(log.read_text().splitlines()[-25:]))
        sys.exit(f"colofunc: the installation failed; the whole output is in {log.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
