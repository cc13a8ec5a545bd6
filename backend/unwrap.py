"""The errors of a nursery's tasks, without the exception groups that trio wraps them in."""

__all__ = ["first_error", "only_error"]


def only_error(error: BaseException) -> BaseException:
    """Return the error of a task, as it was raised; the group if several tasks failed."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first OSError of the tasks; the group itself if there is none."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            error = first_error(error)
        if isinstance(error, OSError):
            return error
    return group
