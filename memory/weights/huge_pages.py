"""The choice between huge and plain pages for host buffers: whichever this machine hands out faster at the moment.

On bare metal huge pages are faster: 0.3 ms instead of 0.7 ms for 2 MB. A virtual machine that gives free memory back to
its host must ask for each huge page anew, which takes 5 ms: reading weights took twice as long there.
"""

from __future__ import annotations

import mmap
import time
from typing import NamedTuple

import torch

PAGE_BYTES = 2 * 2**20  # of a huge page on x86, and on ARM with pages of 4 KB
_TRIAL_BYTES = 4 * PAGE_BYTES  # smallest buffer that both kinds are timed on
RETRY_BYTES = 2**30  # allocated on plain pages until huge ones are timed again


class Policy(NamedTuple):
    """The kind of pages to take, and the bytes allocated on plain ones since the last trial."""

    huge: bool = True
    plain_bytes: int = 0

    @property
    def is_trial_due(self) -> bool:
        """Return whether to time both kinds for the next large buffer. While pages are huge a trial costs nothing."""
        return self.huge or self.plain_bytes >= RETRY_BYTES

    def tried(self, huge_seconds: float, plain_seconds: float) -> Policy:
        """Return the policy after a trial: the seconds of one huge page, and of plain pages of the same bytes."""
        return Policy(huge_seconds <= plain_seconds)

    def allocated(self, nbytes: int) -> Policy:
        """Return the policy after a buffer of `nbytes`."""
        return self if self.huge else Policy(False, self.plain_bytes + nbytes)


policy = Policy()  # no lock: a race costs one trial more or less


def advise(pages: mmap.mmap, begin: int, nbytes: int) -> None:
    """Ask the system for the pages of a new buffer of whole huge pages. OSError from a kernel without huge pages."""
    global policy
    if nbytes >= _TRIAL_BYTES and policy.is_trial_due:
        huge_seconds = _touch(pages, begin, mmap.MADV_HUGEPAGE)
        policy = policy.tried(huge_seconds, _touch(pages, begin + PAGE_BYTES, mmap.MADV_NOHUGEPAGE))
    pages.madvise(mmap.MADV_HUGEPAGE if policy.huge else mmap.MADV_NOHUGEPAGE, begin, nbytes)
    policy = policy.allocated(nbytes)


def _touch(pages: mmap.mmap, begin: int, advice: int) -> float:
    """Return the seconds until one huge page's bytes are in memory, on pages of the kind `advice`."""
    pages.madvise(advice, begin, PAGE_BYTES)
    start = time.perf_counter()
    torch.frombuffer(pages, dtype=torch.uint8)[begin : begin + PAGE_BYTES : mmap.PAGESIZE].zero_()
    return time.perf_counter() - start
