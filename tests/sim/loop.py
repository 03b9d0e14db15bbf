"""A virtual-time asyncio event loop with simulated operating-system processes.

Owns: time (it jumps to the next timer when nothing is ready), the order of callbacks (FIFO, as asyncio
promises) and the life of processes. A callback belongs to the process in whose context it was made
(`PROCESS`), so freezing or killing a process stops *all* of its code between two callbacks, whatever
primitive it waits on: no cleanup runs, as with SIGSTOP and SIGKILL.

Does no input or output and starts no thread. Raises `Deadlock` when nothing can ever run again,
`Runaway` when a bound on steps or virtual time is passed.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from enum import StrEnum
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

PROCESS: ContextVar[Process | None] = ContextVar("PROCESS", default=None)
"""The process to which the running callback belongs; None: the world outside (servers, actors, tests)."""

OUTSIDE = Context()
"""The context of the world outside: timers made with it fire whatever happens to a process."""

BOOT_TIME_S = 1000.0


class Deadlock(Exception):
    """Nothing is ready and no timer is set, but the main coroutine has not ended."""


class Runaway(Exception):
    """More steps or more virtual time than the bound allows."""


class Life(StrEnum):
    RUNNING = "running"
    FROZEN = "frozen"
    DEAD = "dead"
    REAPED = "reaped"


class Process:
    """A simulated process. `context` is what its first task and its IO completions run in."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.life = Life.RUNNING
        self.backlog: list[asyncio.Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = Context()
        self.context.run(PROCESS.set, self)

    @property
    def is_dead(self) -> bool:
        return self.life in (Life.DEAD, Life.REAPED)

    def __repr__(self) -> str:
        return f"Process({self.name}, {self.life})"


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. `errors` collects what no task of a living process took notice of."""

    _ready: collections.deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, *, steps_max: int = 5_000_000, seconds_max: float = 100_000.0) -> None:
        super().__init__()
        self._now = BOOT_TIME_S
        self._steps_max = steps_max
        self._end = BOOT_TIME_S + seconds_max
        self.steps = 0
        self.errors: list[str] = []
        self.processes: list[Process] = []
        self._owners: WeakKeyDictionary[asyncio.Task[Any], Process] = WeakKeyDictionary()
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._take_error)

    def time(self) -> float:
        return self._now

    # -------------------------------------------------------- processes

    def spawn(self, process: Process, main: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Start `main()` as the first task of a process; the call itself happens inside it."""

        self.processes.append(process)

        async def enter() -> None:
            await main()

        return self.create_task(enter(), name=process.name, context=process.context)

    def freeze(self, process: Process) -> None:
        assert process.life is Life.RUNNING, process
        process.life = Life.FROZEN

    def thaw(self, process: Process) -> None:
        assert process.life is Life.FROZEN, process
        process.life = Life.RUNNING
        self._ready.extend(process.backlog)
        process.backlog.clear()

    def kill(self, process: Process) -> None:
        """Nothing of the process runs ever again (until it is reaped, when nothing can have an effect)."""
        assert not process.is_dead, process
        process.life = Life.DEAD

    async def reap(self, process: Process, seconds: float = 3600.0) -> None:
        """After the history: let a dead process's tasks end, so that no coroutine is left unclosed.

        The fakes refuse dead processes, so nothing that happens here can have an effect.
        """
        assert process.is_dead, process
        process.life = Life.REAPED
        self._ready.extend(process.backlog)
        process.backlog.clear()
        for _ in range(20):
            waiting = [task for task in process.tasks if not task.done()]
            if not waiting:
                break
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting, timeout=seconds / 20)
        for task in process.tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            elif not task.cancelled():
                task.exception()

    def release_all(self) -> None:
        """The history is over: nothing is frozen or kept back, so that every task can end."""
        for process in self.processes:
            process.life = Life.REAPED
            self._ready.extend(process.backlog)
            process.backlog.clear()

    # -------------------------------------------------------- BaseEventLoop's hooks

    def _run_once(self) -> None:
        ready = self._ready
        scheduled = self._scheduled
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)._scheduled = False  # type: ignore[attr-defined]
        if not ready:
            if not scheduled:
                raise Deadlock("nothing is ready and no timer is set")
            self._now = max(self._now, scheduled[0].when())
            if self._now > self._end:
                raise Runaway(f"virtual time {self._now:.3f} s passed its bound")
        while scheduled and scheduled[0].when() <= self._now:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False  # type: ignore[attr-defined]
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.cancelled():
                continue
            process: Process | None = handle._context.get(PROCESS)  # type: ignore[attr-defined]
            if process is not None and process.life in (Life.FROZEN, Life.DEAD):
                process.backlog.append(handle)
                continue
            self.steps += 1
            handle._run()
        if self.steps > self._steps_max:
            raise Runaway(f"more than {self._steps_max} steps, virtual time {self._now:.3f} s")

    def _process_events(self, event_list: object) -> None:
        """Nothing: there is no selector."""

    def _write_to_self(self) -> None:
        """Nothing to wake: one thread."""

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            self._owners[task] = process
            process.tasks.append(task)
            if len(process.tasks) > 200:
                process.tasks = [each for each in process.tasks if not each.done()]
        return task

    def _take_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        task = context.get("task") or context.get("future")
        process = self._owners.get(task) if isinstance(task, asyncio.Task) else PROCESS.get()
        if process is not None and process.is_dead:
            return
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")


def run_virtual(
    main: Callable[[], Coroutine[Any, Any, T]], *, steps_max: int = 5_000_000, seconds_max: float = 100_000.0
) -> T:
    """Run `main()` on a loop of its own until it returns; returns its result.

    Raises what it raises, `Deadlock` or `Runaway`; `AssertionError` when a task's error went unnoticed.
    """
    loop = VirtualLoop(steps_max=steps_max, seconds_max=seconds_max)

    async def until_the_end() -> T:
        try:
            return await main()
        finally:
            loop.release_all()

    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            result = runner.run(until_the_end())
        assert not loop.errors, loop.errors
        return result
    finally:
        if not loop.is_closed():
            loop.close()
