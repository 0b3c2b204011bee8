"""A released error: it reads as it was raised, and holds nothing of what its frames held."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ballast.memory.errors import release_frames


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
