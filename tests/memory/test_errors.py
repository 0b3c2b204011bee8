"""Errors: what says that which memory is out, and what a released one holds: nothing of what its frames held."""

from __future__ import annotations

import errno
import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ballast.memory.errors import DoesNotFitError, is_out_of_memory, is_out_of_ram, release_frames
from ballast.memory.files import one_line
from ballast.memory.weights import hostbuffer, reader
from ballast.memory.weights.reader import FileExtent, read


def of_windows(code: int) -> OSError:
    error = OSError(errno.EINVAL, "The paging file is too small for this operation to complete")
    error.winerror = code  # type: ignore[attr-defined]
    return error


OF_DEVICES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
    RuntimeError("miopenStatusAllocFailed"),
    RuntimeError("CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("Native API failed. Native API returns: -6 (PI_ERROR_OUT_OF_HOST_MEMORY)"),
]
OF_RAM = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    of_windows(1455),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4611686018427387904 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you tried to ..."),
    ValueError("Error while opening: The paging file is too small for this operation to complete. (os error 1455)"),
]
OF_NEITHER = [
    OSError(errno.EIO, "Input/output error"),
    of_windows(5),
    OSError(),
    ValueError("out of memory"),
    DoesNotFitError("transformer does not fit: out of memory"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", [*OF_DEVICES, *OF_RAM, *OF_NEITHER], ids=repr)
def test_memory_of_the_device_is_told_from_ram(error: BaseException) -> None:
    assert is_out_of_memory(error) == (error in OF_DEVICES)
    assert is_out_of_ram(error) == (error in OF_RAM)


def test_what_torch_says_here_when_ram_is_refused() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_ram(refused.value)
    assert not is_out_of_memory(refused.value)


def test_refused_buffer_is_told_in_one_line() -> None:
    before = set(hostbuffer._pages)
    with pytest.raises(MemoryError, match=r"^the system refuses .* of RAM for weights \(.+\)\. Close .*\.$") as refused:
        hostbuffer.allocate(2**60)
    assert "\n" not in str(refused.value)
    assert set(hostbuffer._pages) == before


def test_refused_ram_passes_through_those_who_explain_other_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="Cannot allocate") as passed, one_line(tmp_path, "read"):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    assert is_out_of_ram(passed.value)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    (tmp_path / "a").write_bytes(bytes(8))
    monkeypatch.setattr(reader, "_read_extent", refuse)
    with pytest.raises(OSError, match="Cannot allocate") as passed:
        read([(FileExtent(tmp_path / "a", 0, 8, torch.uint8, torch.uint8, 0), hostbuffer.allocate(8))])
    assert is_out_of_ram(passed.value)


class Thing:
    """Takes the place of a tensor."""


@pytest.fixture
def things() -> Iterator[Callable[[], Thing]]:
    """Makes things, none of which may be left at the end of the test. Without the collector."""
    made: list[weakref.ref[Thing]] = []

    def make() -> Thing:
        thing = Thing()
        made.append(weakref.ref(thing))
        return thing

    gc.disable()
    yield make
    gc.enable()
    assert made and not any(each() for each in made)


def closing_over(thing: Thing) -> None:
    def inner() -> None:
        nonlocal thing
        thing = [thing]  # type: ignore[assignment]
        raise ValueError("here")

    inner()


@contextmanager
def opened(thing: Thing) -> Iterator[None]:
    yield


def through_generators(make: Callable[[], Thing]) -> None:
    def steps(thing: Thing) -> Iterator[None]:
        yield closing_over(thing)

    with opened(make()):
        for _ in steps(make()):
            pass


def leading_to_another(make: Callable[[], Thing]) -> None:
    held = make()
    try:
        through_generators(make)
    except ValueError as error:
        raise KeyError(id(held)) from error


def hiding_another(make: Callable[[], Thing]) -> None:
    held = make()
    try:
        through_generators(make)
    except ValueError:
        raise KeyError(id(held)) from None


def lacking_an_attribute(make: Callable[[], Thing]) -> None:
    make().absent  # type: ignore[attr-defined]  # noqa: B018


def in_a_thread(make: Callable[[], Thing]) -> None:
    raised: list[Exception] = []

    def run() -> None:
        try:
            leading_to_another(make)
        except KeyError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise raised.pop()


WAYS = [through_generators, leading_to_another, hiding_another, lacking_an_attribute, in_a_thread]


@pytest.mark.parametrize("fail", WAYS)
def test_caught_error_is_shown_as_before_and_holds_nothing(fail: Any, things: Callable[[], Thing]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        fail(things)
    before = traceback.format_exception(caught.value)
    assert f"in {fail.__name__}" in "".join(before)
    for _ in range(2):
        release_frames(caught.value)
        assert traceback.format_exception(caught.value) == before


@pytest.mark.skipif(sys.version_info < (3, 11), reason="lines have no table that is read so")
@pytest.mark.parametrize("fail", WAYS)
def test_frames_are_let_go_of_where_calls_are_traced(fail: Any, things: Callable[[], Thing]) -> None:
    """By a debugger, a measure of coverage, or hypothesis: Python keeps a line for each instruction of what is called.

    A table of lines that told of more instructions than there are would be written beyond the end of that memory.
    """
    with pytest.raises(Exception) as caught:  # noqa: PT011
        fail(things)
    release_frames(caught.value)
    for frame, _ in traceback.walk_tb(caught.value.__traceback__):
        assert 2 * len(list(frame.f_code.co_positions())) <= len(frame.f_code.co_code), frame

    def tracer(*_: Any) -> Any:
        return tracer

    before, shown = sys.gettrace(), traceback.format_exception(caught.value)
    sys.settrace(tracer)
    try:
        release_frames(caught.value)
    finally:
        sys.settrace(before)
    assert traceback.format_exception(caught.value) == shown


@pytest.mark.parametrize("fail", WAYS)
def test_error_that_is_let_out_again_holds_nothing_of_what_ended(fail: Any, things: Callable[[], Thing]) -> None:
    @contextmanager
    def stage() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            before = traceback.format_exc()
            release_frames(error)
            assert traceback.format_exc() == before
            raise

    def run() -> None:
        with stage():
            fail(things)

    with pytest.raises(Exception) as caught:  # noqa: PT011
        run()
    shown = "".join(traceback.format_exception(caught.value))
    assert all(f"in {name}" in shown for name in ("run", fail.__name__))
