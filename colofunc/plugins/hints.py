"""What a plugin tells users of a library where a step cannot go on.

The hook is `colofunc_hints`; `compiler/hints` adds them to errors.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class LibraryHint:
    """What users of a library can write.

    `about`: errors that it is for, by their `about`. `text`: what to write. `file`: the end of the path of a file of the
    library, for a hint that only holds where code of that file was running.
    """

    about: str
    text: str
    file: str = ""
