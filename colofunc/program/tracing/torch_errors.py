"""Errors of torch whose words hide the reason, in words that say it.

Problem: TorchScript drops what Python said, and some errors name a mechanism that the user never asked for. Idea: a table of
how such messages begin; each has what is true of a step, and one thing to try.

    RuntimeError: The following operation failed in the TorchScript interpreter. ...
    TraceError: random operator aten.bernoulli_ at model.py:3 ... This operator was called by TorchScript. Try: ...
"""

from __future__ import annotations

from colofunc.errors import ColofuncError, TraceError
from colofunc.program.tracing.meta import raised_line

SCRIPT = "The following operation failed in the TorchScript interpreter"
SCRIPT_ADVICE = "This operator was called by TorchScript. Try: the Python module or function that was compiled, as it is"
# Part of the message -> what is true; {} is the user's line.
WORDS = {
    "You must implement the jvp function for custom autograd.Function": (
        "forward-mode derivatives (torch.func.jvp, jacfwd, hessian) at {} reach an operator that has none: attention and dropout "
        "stay whole in a step, and have gradients only. Try: torch.func.jacrev in place of jacfwd, jacrev(jacrev(f)) for a hessian"
    ),
    "_apply(): Couldn't swap": (
        "a module that the step makes for itself is converted at {} (.cuda(), .double(), .half()), which would change tensors of the "
        "trace in place. Try: nn.Linear(3, 2, dtype=torch.float64), or the module made outside of the step (cf.functional)"
    ),
}


def in_words(error: Exception, operator: Exception | None) -> Exception | None:
    """The error to raise in place of `error`, None where that says it well. `operator`: what the last failed operator raised."""
    text = str(error)
    if text.startswith(SCRIPT) and operator is not None:
        if isinstance(operator, ColofuncError):
            return TraceError(f"{operator}. {SCRIPT_ADVICE}")
        operator.add_note(SCRIPT_ADVICE)
        return operator
    for part, words in WORDS.items():
        if part in text:
            return TraceError(words.format(raised_line(error)))
    return None
