"""One slice in this process, as `runner.run` starts it: `python -m bench.gpu.one NUMBER RECORD SECONDS`."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

from bench.gpu.parts import Setup, lacks_here
from bench.gpu.record import Record
from bench.gpu.runner import AGAIN, measure
from bench.gpu.sizes import REAL
from bench.gpu.slices import SLICES


def main() -> int:
    number, path, seconds = sys.argv[1:]
    warnings.filterwarnings("ignore", message="AdamW updates parameters in torch.bfloat16")  # in eager PyTorch they are, too
    of = next(s for s in SLICES if s.number == int(number))
    setup = Setup(REAL, lacks_here())
    until = time.monotonic() + float(seconds)
    return 0 if measure(of, setup, Record(Path(path)), lambda words: print(words, flush=True), until) else AGAIN


if __name__ == "__main__":
    sys.exit(main())
