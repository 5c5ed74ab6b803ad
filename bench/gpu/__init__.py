"""What only a card can say: `make gpu`, or `python -m bench gpu`, measures it and writes `bench/GPU.md`.

    python -m bench gpu                      # every slice that is still open, the most valuable first
    python -m bench gpu --slice 4 --again    # the fourth anew
    python -m bench gpu --minutes 9          # what there is time for; the next call goes on from there

Problem: a card is at hand for minutes, and the question is open for months. Idea: seventeen slices of a few minutes each, made of parts;
the rows of a part are written as soon as they are measured, and a part that has rows is passed over. So any call may be stopped, and the
next one goes on. Each slice runs in a process of its own: a part that breaks its process or the card's context is written down as that, and
the parts behind it run in a new one.

It needs this folder's tree and a torch >= 2.11 with CUDA. What else a part needs (pytest, transformers, compute-sanitizer, NCCL) it says in
its row where it is not there.

`slices`: which there are. `parts`: what they are made of. `record`: GPU.md. `runner`: processes, limits. `sizes`: how large everything is.
"""
