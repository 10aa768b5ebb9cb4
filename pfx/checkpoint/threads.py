"""Jobs in a few threads, until the program's very end.

The standard library's pools refuse work once the main thread has ended, which is when a save in the
background may still go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def in_threads(act: Callable[[Job], Result], jobs: Sequence[Job], count: int) -> list[Result]:
    """Do all jobs in `count` threads, this one among them; the first error ends them.

    >>> in_threads(lambda n: n * n, [1, 2, 3], 2)
    [1, 4, 9]
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    numbers, lock = iter(range(len(jobs))), threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                results[number] = act(jobs[number])
            except BaseException as error:
                errors.append(error)

    others = [threading.Thread(target=work) for _ in range(min(count, len(jobs)) - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(jobs))]
