"""Whatever ends the engine's thread is heard by all who wait for it."""

from __future__ import annotations

import pytest
from tandem_engine.loop import EngineLoop
from waiting import until


class Panic(BaseException):
    """As of pyo3, for a panic in Rust."""


class Failing:
    """An engine whose first step fails."""

    num_steps = 0

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def has_work(self) -> bool:
        return True

    def work_done(self) -> int:
        return 0

    def snapshot(self) -> None:
        return None

    def step(self) -> list:
        raise self._error


@pytest.mark.parametrize("error", [ValueError("a bug"), Panic("in Rust"), SystemExit(3)])
async def test_a_failure_of_any_kind_is_heard(error: BaseException) -> None:
    heard, ended = [], []
    loop = EngineLoop(Failing(error), on_failure=ended.append)
    loop.listen("r", heard.append)
    loop.start()
    await until(lambda: heard)
    assert ended == heard == [loop.failed]
    assert isinstance(loop.failed, Exception)
    assert str(error) in str(loop.failed)
    with pytest.raises(type(loop.failed)):
        loop.call(lambda: None).result(timeout=5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_thread_that_cannot_report_its_failure_has_died() -> None:
    def cannot(_: Exception) -> None:
        raise SystemExit

    loop = EngineLoop(Failing(ValueError()), on_failure=cannot)
    assert not loop.has_died()
    loop.start()
    await until(loop.has_died)
