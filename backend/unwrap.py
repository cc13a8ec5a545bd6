"""The one error that callers of a nursery mean, without the groups that trio wraps it in."""

__all__ = ["first_error", "only_error"]


def only_error(error: BaseException) -> BaseException:
    """What one task ended with, as it was raised; the group if there were several reasons."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first OSError that tasks ended with; else the group itself."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            error = first_error(error)
        if isinstance(error, OSError):
            return error
    return group
