"""The errors of a nursery's tasks, without the exception groups that trio wraps them in."""


def only_error(error: BaseException) -> BaseException:
    """Return the error of a task, as it was raised; the group if several tasks failed."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def first_error(
    group: BaseExceptionGroup[BaseException], *kinds: type[BaseException]
) -> BaseException:
    """Return the first error of the tasks that is of the first kind, or else of the next one (no kinds: an
    OSError); the group itself if there is none."""
    for kind in kinds or (OSError,):
        error: BaseException | None = group.subgroup(kind)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None:
            return error
    return group
