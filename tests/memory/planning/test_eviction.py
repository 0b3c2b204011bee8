"""The eviction policy against brute force over every possible choice of parts."""

from __future__ import annotations

from functools import cache
from itertools import product

from ballast.memory.planning.eviction import Use, choose_shrinks, free_for, runs_sooner
from hypothesis import given, settings
from hypothesis import strategies as st


def least_bytes_of_parts(capacity: int, uses: list[Use]) -> int:
    """Fewest bytes that any choice of parts to let go of loads for these uses, from an empty device."""
    units = sorted({use.unit for use in uses})  # type: ignore[type-var]

    @cache
    def load(step: int, held: tuple[int, ...]) -> int:
        if step == len(uses):
            return 0
        use = uses[step]
        index = units.index(use.unit)  # type: ignore[arg-type]
        room = capacity - use.size_bytes - use.working_bytes
        kept = [range(size + 1) if i != index else [use.size_bytes] for i, size in enumerate(held)]
        choices = [keep for keep in product(*kept) if sum(keep) - use.size_bytes <= room]
        return use.size_bytes - held[index] + min(load(step + 1, keep) for keep in choices)

    return load(0, (0,) * len(units))


def load_parts(capacity: int, uses: list[Use], known: bool) -> int:
    """Bytes that the policy loads, asked anew at each use as the manager does."""
    held: dict[object, int] = {}
    loaded = 0
    for step, use in enumerate(uses):
        for unit, size in choose_shrinks(held, capacity, use, uses[step + 1 :] if known else None).items():
            held[unit] -= size
        loaded += use.size_bytes - held.pop(use.unit, 0)
        held[use.unit] = use.size_bytes
        assert sum(held.values()) + use.working_bytes <= capacity
    return loaded


@st.composite
def small_graphs(draw: st.DrawFn) -> tuple[int, list[Use]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    works = draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    order = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=7))
    capacity = draw(st.integers(max(a + b for a, b in zip(sizes, works, strict=True)), sum(sizes) + max(works)))
    return capacity, [Use(i, sizes[i], works[i]) for i in order]


@settings(max_examples=150)
@given(small_graphs())
def test_parts_reload_as_few_bytes_as_the_best_choice(graph: tuple[int, list[Use]]) -> None:
    assert load_parts(*graph, known=True) == least_bytes_of_parts(*graph) <= load_parts(*graph, known=False)


def test_least_recently_used_goes_first() -> None:
    assert choose_shrinks({"old": 4, "mid": 4, "new": 4}, 14, Use("x", 5)) == {"old": 3}
    assert choose_shrinks({"old": 4, "mid": 4, "new": 4}, 11, Use("x", 5)) == {"old": 4, "mid": 2}


def test_nothing_leaves_when_all_fits() -> None:
    assert choose_shrinks({"a": 4, "b": 4}, 13, Use("x", 5)) == {}


def test_everything_leaves_when_even_that_is_too_little() -> None:
    assert choose_shrinks({"a": 4, "b": 4}, 10, Use("x", 20)) == {"a": 4, "b": 4}
    assert choose_shrinks({"a": 4, "b": 4}, 10, Use("x", 20), [Use("a", 4)]) == {"b": 4, "a": 4}


def test_units_that_no_later_node_uses_go_before_those_that_one_does() -> None:
    later = [Use("new", 4)]
    assert choose_shrinks({"old": 4, "new": 4}, 9, Use("x", 5), later) == {"old": 4}
    assert choose_shrinks({"new": 4, "old": 4}, 9, Use("x", 5), later) == {"old": 4}
    held = dict.fromkeys(range(12), 1)
    later = [Use(i, 1) for i in (*range(5), *range(6, 12), 5)]
    assert choose_shrinks(held, 12, Use("x", 1), later) == {5: 1}


def test_two_that_take_turns_in_room_for_one_and_a_half() -> None:
    uses = [Use(name, 10) for name in "abababab"]
    assert load_parts(15, uses, known=True) == 10 + 10 + 6 * 5


@given(
    sizes=st.lists(st.integers(1, 9), max_size=7),
    nobodys=st.sets(st.integers(0, 6)),
    capacity=st.integers(0, 40),
    known=st.booleans(),
)
def test_cached_ones_leave_before_any_other_and_no_more_than_must(
    sizes: list[int], nobodys: set[int], capacity: int, known: bool
) -> None:
    held = dict(enumerate(sizes))
    cached = nobodys & held.keys()
    leaving = choose_shrinks(held, capacity, Use(None, 3), [Use(i, held[i]) for i in held] if known else None, cached)
    left = {unit: held[unit] - leaving.get(unit, 0) for unit in held}
    assert all(0 < size <= held[unit] for unit, size in leaving.items())
    assert sum(left.values()) + 3 <= max(capacity, 3), "too little left"
    assert not leaving or sum(left.values()) + 3 >= min(capacity, sum(sizes) + 3), "more left than had to"
    if set(leaving) - cached:
        assert not any(left[unit] for unit in cached), "others left while a cached one stayed"
    else:
        assert list(leaving) == [unit for unit in held if unit in cached][: len(leaving)] or known


CYCLES = st.lists(st.integers(0, 9), min_size=2, max_size=6, unique=True)


@given(CYCLES, st.integers(2, 4), st.integers(1, 3), st.data())
def test_all_others_of_a_run_that_repeats_come_sooner(
    cycle: list[int], times: int, in_a_row: int, data: st.DataObject
) -> None:
    """Each unit may run several times in a row, as in a list."""
    now = data.draw(st.integers(0, len(cycle) - 1))
    ended = [[unit] for unit in [*cycle * times, *cycle[:now]] for _ in range(in_a_row)]
    ended += [[cycle[now]]] * data.draw(st.integers(0, in_a_row))
    assert runs_sooner(cycle[now], [], ended) == set(cycle) - {cycle[now]}
    assert runs_sooner(10, [], ended) is None, "it has not run"


@given(CYCLES, st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=9), st.data())
def test_what_is_told_counts_more_than_any_guess(order: list[int], ended: list[list[int]], data: st.DataObject) -> None:
    unit = data.draw(st.integers(0, 9))
    before = [other for other in order if other != unit]
    held, staying = {each: 1 + each for each in range(10)}, data.draw(st.sets(st.integers(0, 9)))
    sooner = set(before)
    if before:
        assert runs_sooner(unit, [unit, *before, unit, *range(10)], ended) == sooner
        kept = sum(held[other] for other in (sooner | staying) - {unit})
        assert free_for(unit, 99, held, staying, [*before, unit], ended) == 99 - kept
    told_in_part = runs_sooner(unit, before, ended)
    assert told_in_part is None or told_in_part >= sooner, "a unit never takes from what is told to run sooner"
    assert free_for(unit, 99, held, staying, before, ended) <= 99 - sum(held[o] for o in (sooner | staying) - {unit})


def test_what_an_encoder_left_goes_to_the_transformer_once_its_prompt_is_known() -> None:
    held = {"text": 5, "dit": 1, "vae": 2}
    once = [["text"], ["dit"], ["vae"]]
    assert free_for("dit", 10, held, set(), ["vae"], once[:1]) == 3, "nobody can tell what comes after the first run"
    assert free_for("dit", 10, held, set(), [], [*once, ["text"]]) == 3, "each prompt is new"
    assert free_for("dit", 10, held, set(), [], once) == 8
    assert free_for("dit", 10, held, {"text"}, [], once) == 3, "it is on the device"
    assert free_for("dit", 10, held, set(), ["dit", "vae"], [*once, ["text"], ["dit"], ["dit"]]) == 3, "a list goes on"
