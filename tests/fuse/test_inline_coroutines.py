"""Coroutines that run without a task until they have to wait."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from irdmafs.inline import Detached, Rest, detach, run

T = TypeVar("T")


async def run_or_resume(coro: Any) -> Any:
    """What the kernel session does, in one task."""
    try:
        return run(coro)
    except Detached:
        return await Rest(coro)


# -- without waiting ---------------------------------------------------------------------------------


async def test_what_runs_inside_another_inline_leaves_the_outer_one_inline() -> None:
    async def inner() -> None:
        pass

    async def outer() -> None:
        run(inner())
        await detach()

    coro = outer()
    with pytest.raises(Detached):
        run(coro)

    await Rest(coro)


async def test_what_waits_without_detach_is_an_error_and_the_next_one_runs() -> None:
    async def impatient() -> None:
        await trio.lowlevel.checkpoint()

    async def patient() -> str:
        return "done"

    coro = impatient()
    with pytest.raises(RuntimeError, match=r"impatient.* waited without detach"):
        run(coro)
    coro.close()
    assert run(patient()) == "done"
    with trio.testing.assert_no_checkpoints():
        await detach()


async def test_an_exception_leaves_the_next_coroutine_inline_and_the_task_not() -> None:
    async def failing() -> None:
        raise ValueError

    async def detaching() -> None:
        await detach()

    with pytest.raises(ValueError):
        run(failing())
    with trio.testing.assert_no_checkpoints():
        await detach()
    coro = detaching()
    with pytest.raises(Detached):
        run(coro)
    await Rest(coro)


# -- detached ----------------------------------------------------------------------------------------


def test_nothing_after_detach_runs_before_resume() -> None:
    steps: list[str] = []

    async def detaching() -> str:
        steps.append("before")
        await detach()
        steps.append("after")
        return "value"

    coro = detaching()
    with pytest.raises(Detached):
        run(coro)
    assert steps == ["before"]

    async def main() -> None:
        assert await Rest(coro) == "value"

    trio.run(main)
    assert steps == ["before", "after"]


def test_a_detached_coroutine_may_run_others_inline() -> None:
    async def quick() -> str:
        return "quick"

    async def slow() -> str:
        await detach()
        await trio.lowlevel.checkpoint()
        return "slow"

    async def outer() -> list[str]:
        await detach()
        results = [run(quick())]
        await trio.lowlevel.checkpoint()
        other = slow()
        with pytest.raises(Detached):
            run(other)
        return [*results, await Rest(other)]

    assert trio.run(run_or_resume, outer()) == ["quick", "slow"]


# -- cancelled ---------------------------------------------------------------------------------------


async def test_cancelling_the_task_cancels_the_coroutine_which_cleans_up() -> None:
    steps: list[str] = []

    async def waiting() -> None:
        await detach()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
            steps.append("cleaned up")

    coro = waiting()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_or_resume, coro)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert nursery.cancel_scope.cancelled_caught
    assert inspect.getcoroutinestate(coro) == inspect.CORO_CLOSED
    assert steps == ["cleaned up"]


async def test_a_task_cancelled_before_it_began_cancels_at_the_first_wait() -> None:
    steps: list[str] = []

    async def waiting() -> None:
        await detach()
        steps.append("resumed")
        await trio.lowlevel.checkpoint()
        steps.append("never")

    with trio.CancelScope() as scope:
        scope.cancel()
        await run_or_resume(waiting())
    assert scope.cancelled_caught
    assert steps == ["resumed"]


def test_a_scope_inside_the_detached_part_cancels_only_what_is_in_it() -> None:
    async def limited() -> str:
        await detach()
        with trio.CancelScope() as scope:
            scope.cancel()
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return f"went on, {scope.cancelled_caught}"

    assert trio.run(run_or_resume, limited()) == "went on, True"


async def test_what_finished_before_its_cancellation_keeps_its_result() -> None:
    async def cancelling() -> str:
        await detach()
        scope.cancel()
        return "finished"

    with trio.CancelScope() as scope:
        assert await run_or_resume(cancelling()) == "finished"
    assert not scope.cancelled_caught


# -- any program -------------------------------------------------------------------------------------

# A coroutine is a list of steps; a list within it is a coroutine that it awaits, and catches.
steps = st.recursive(
    st.sampled_from(["value", "wait", "wait for a value", "wait for an error", "fail"]),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=25,
)
Trace = list[object]


async def program(what: Any, trace: Trace, before_waiting: Callable[[], Awaitable[object]]) -> int:
    for number, step in enumerate(what):
        match step:
            case "value":
                trace.append(number)
            case "wait":
                await before_waiting()
                await trio.lowlevel.checkpoint()
                trace.append("waited")
            case "wait for a value":
                await before_waiting()
                send, receive = trio.open_memory_channel[int](1)
                send.send_nowait(number)
                trace.append(await receive.receive())
            case "wait for an error":
                await before_waiting()
                send, receive = trio.open_memory_channel[int](1)
                send.close()
                try:
                    await receive.receive()
                except trio.EndOfChannel:
                    trace.append("end")
            case "fail":
                raise KeyError(number)
            case _:
                try:
                    trace.append(await program(step, trace, before_waiting))
                except KeyError as error:
                    trace.append(error.args)
    return len(trace)


@settings(max_examples=100, deadline=None)
@given(what=st.lists(steps, max_size=8))
def test_a_coroutine_does_the_same_inline_as_awaited(what: Any) -> None:
    async def nothing() -> None:
        pass

    async def outcome(coro: Any, runner: Callable[[Any], Awaitable[Any]]) -> object:
        try:
            return await runner(coro)
        except KeyError as error:
            return error.args

    async def awaited(coro: Any) -> Any:
        return await coro

    async def main() -> None:
        inline_trace: Trace = []
        plain_trace: Trace = []
        inline = await outcome(program(what, inline_trace, detach), run_or_resume)
        plain = await outcome(program(what, plain_trace, nothing), awaited)
        assert (inline, inline_trace) == (plain, plain_trace)

    trio.run(main)
